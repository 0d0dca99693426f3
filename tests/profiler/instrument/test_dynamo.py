"""Tests with Dynamo: it compiles the program, but no code of cbtop.

While Dynamo compiles in one thread, calls in other threads are steps.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach, dynamo, install  # noqa: E402
from cbtop.profiler.instrument.dynamo import functions_of, without_dynamo  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from tests.integration.hosts import CBTOP, DEADLINE_S  # noqa: E402
from tests.profiler.instrument.dynamo_state import forget_compiled  # noqa: E402
from tests.profiler.instrument.engines import steps_of  # noqa: E402
from tests.profiler.instrument.tiny import model_of, words  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

# A program that compiles the bound call of a model instead of the model, as `generate` of transformers does.
PROGRAM = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model, x = Model().eval(), torch.ones(1, 8)
torch.set_num_threads(1)
with torch.no_grad():
    if sys.argv[1] == "eager":
        model(x)
    compiled = torch.compile(model.__call__, backend="eager")
    for _ in range(60):
        compiled(x)
print(torch._dynamo.utils.counters["frames"]["total"])
"""


@pytest.mark.slow  # test_wrapping.py compares what is compiled
@pytest.mark.parametrize("first", [pytest.param("compiled", marks=pytest.mark.slow), "eager"])
def test_dynamo_compiles_no_frame_of_cbtop(first: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    recorded = ["run", "--quiet", "--overhead", "100%", "--record", str(tmp_path / "run.cbtop"), "--"]
    bare, watched = (
        subprocess.run(
            [*before, sys.executable, str(program), first],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        for before in ([], [*CBTOP, *recorded])
    )
    assert bare.stdout == watched.stdout == "1\n"
    assert "Warning" not in watched.stderr


class Decorated:
    def method(self) -> None: ...

    @property
    def read(self) -> int:
        return 1

    @staticmethod
    def of_nobody() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @functools.cached_property
    def kept(self) -> int:
        return 1

    @functools.cache  # noqa: B019 - no object of it is ever made
    def remembered(self) -> int:
        return 1

    @contextmanager
    def around(self) -> Iterator[None]:
        yield


def test_functions_behind_decorators_are_marked_and_the_decorators_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "OUR_MODULES", (__name__,))
    found = {function.__name__ for member in vars(Decorated).values() for function in functions_of(member)}
    assert found == {"method", "read", "of_nobody", "of_class", "kept", "remembered", "around"}


def test_functions_are_marked_once_and_those_of_a_later_import_too(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[object] = []
    monkeypatch.setattr(dynamo, "OUR_MODULES", (__name__,))
    monkeypatch.setattr(f"{dynamo.__name__}._frames.set_code_exec_strategy", lambda code, _: marked.append(code))
    dynamo.keep_dynamo_out()
    assert vars(Decorated)["method"].__code__ in marked
    marked.clear()
    dynamo.keep_dynamo_out()
    assert not marked
    monkeypatch.setattr(sys.modules[__name__], "imported_later", lambda: None, raising=False)
    dynamo.keep_dynamo_out()
    assert vars(sys.modules[__name__])["imported_later"].__code__ in marked


def test_the_callback_is_off_in_our_work_and_back_after_an_exception() -> None:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    seen = []
    assert dynamo.set_callback is not None

    def work() -> None:
        seen.append(get_eval_frame_callback())
        raise LookupError

    # The callback False means "run only": compiled code runs, and nothing else is compiled.
    before = dynamo.set_callback(False)
    try:
        with pytest.raises(LookupError):
            without_dynamo(work)
        assert get_eval_frame_callback() is False
    finally:
        dynamo.set_callback(before)
    assert seen == [None]


@pytest.fixture
def _nothing_is_compiled() -> Iterator[None]:
    forget_compiled()
    yield
    forget_compiled()


@contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Run a block of code while another thread compiles a function."""
    begun, done = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        begun.set()
        done.wait(DEADLINE_S)
        return graph

    def compile_function() -> None:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))

    thread = threading.Thread(target=compile_function)
    thread.start()
    try:
        assert begun.wait(DEADLINE_S)
        yield
    finally:
        done.set()
        thread.join()


@first_by_default("is_compiled", [False, True])
@pytest.mark.usefixtures("_nothing_is_compiled")
def test_calls_of_a_thread_are_steps_while_another_thread_compiles(
    is_compiled: bool, profiler: BrickProfiler, memory: Memory
) -> None:
    model = model_of("llama")
    attach(model, profiler)
    called = torch.compile(model, backend="eager", dynamic=False) if is_compiled else model

    def step() -> None:
        # Each thread has its own gradient mode. Code that was compiled for one gradient mode does not fit another
        # mode.
        with torch.no_grad():
            called(words(1, 4))

    step()
    with compiling_elsewhere():
        threads = [threading.Thread(target=step) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        step()
    assert [tokens for _, tokens in steps_of(memory)] == [4] * 5


@pytest.mark.usefixtures("without_gradients", "_nothing_is_compiled")
def test_a_model_is_found_while_another_thread_compiles(profiler: BrickProfiler, memory: Memory) -> None:
    install(profiler)
    model = model_of("llama")
    with compiling_elsewhere():
        for _ in range(3):
            model(words(1, 4))
    assert [tokens for _, tokens in steps_of(memory)] == [4] * 3


@pytest.mark.usefixtures("without_gradients", "_nothing_is_compiled")
def test_a_call_in_the_thread_that_compiles_is_no_step(profiler: BrickProfiler, memory: Memory) -> None:
    model = model_of("llama")
    attach(model, profiler)

    def backend(graph: Any, inputs: Any) -> Any:
        model(words(1, 4))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert steps_of(memory) == []
    model(words(1, 4))
    assert len(steps_of(memory)) == 1
