"""Tests with planted errors: if a function of cbtop fails, the program computes the same and sees no exception."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

import cbtop
from cbtop.profiler.instrument import install, open_step, trouble, uninstall
from cbtop.profiler.profiler import BrickProfiler
from tests.profiler.instrument.tiny import Layer, Stack, model_of, torch, words
from tests.profiler.memory import Memory

from torch.optim import optimizer  # isort: skip

ROOT = str(Path(cbtop.__file__).parent)
# Functions that are not tested: they catch the errors of all other functions, or call the program's own function.
GUARDS = {
    "generates.<locals>.generate",
    "_unless_it_fails.<locals>.guarded",
    "prepares.<locals>.prepare_inputs",
    "timed.<locals>.call",
    "timed.<locals>.call_timed",
    "CallWrapper.plain",
    "scores.<locals>.process_scores",
    "chooses.<locals>.is_done",
    "TimedModel.ask",
    "elements_of",
    "_unless_it_is_odd.<locals>.guarded",
    # The functions below run as C code if it is compiled, so no error can be planted in them.
    "ModelCall.__call__",
    "BrickCall.__call__",
    "FunctionCall.__call__",
    "Slot.__get__",
    "_call_after",
    "call_in",
}
EACH = 30  # by default one function in EACH is tested


class PlantedError(Exception):
    """The planted error, which is raised at the start of a function of cbtop."""


def program() -> list[Any]:
    torch.manual_seed(0)
    model, inputs = Stack(), torch.ones(1, 2, 4, 4)
    outputs = [model(inputs) for _ in range(4)]
    model.layers[0] = Layer()
    outputs += [model(inputs) for _ in range(3)]
    llama, ids = model_of("llama", num_hidden_layers=1), words(1, 3)
    outputs += [llama.generate(ids, max_new_tokens=3, do_sample=False) for _ in range(2)]
    return [*outputs, llama(ids).logits]


def watched(planted: CodeType | None = None) -> tuple[list[Any], list[CodeType]]:
    """Run the program with a profiler.

    Returns its outputs and the functions of cbtop that ran, in order.
    """
    ran: dict[CodeType, None] = {}

    # With a parameter named `frame`, cbtop would take this function for a signal handler.
    def trace(*given: Any) -> None:
        code = given[0].f_code
        if code.co_filename.startswith(ROOT) and not code.co_filename.startswith(f"{ROOT}/tests"):
            ran.setdefault(code)
            if code is planted:
                raise PlantedError(code.co_qualname)

    trouble._said.clear()
    install(BrickProfiler(recorder=Memory()))
    before = sys.gettrace()
    try:
        sys.settrace(trace)
        outputs = program()
    finally:
        sys.settrace(before)
        uninstall()
        here = open_step.unit()
        here.generations.clear()
        here.open.clear()
    return outputs, list(ran)


@pytest.fixture
def _quiet(caplog: pytest.LogCaptureFixture, without_gradients: None) -> Iterator[None]:
    caplog.set_level("CRITICAL", "cbtop")
    yield
    trouble._said.clear()


def _check(share: slice) -> None:
    bare = program()
    outputs, ran = watched()
    assert len(ran) > 200
    assert all(torch.equal(a, b) for a, b in zip(bare, outputs, strict=True))
    for code in [one for one in ran if one.co_qualname not in GUARDS][share]:
        try:
            outputs, _ = watched(code)
        except PlantedError:
            pytest.fail(f"the host saw what {code.co_qualname} raised")
        assert all(torch.equal(a, b) for a, b in zip(bare, outputs, strict=True)), code.co_qualname
        assert not optimizer._global_optimizer_pre_hooks, f"after {code.co_qualname} failed, hooks stay"


@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_of_ours_that_fails_changes_nothing_for_the_host() -> None:
    _check(slice(None, None, EACH))


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("language", ["c", "python"])
def test_each_function_of_ours_may_fail(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if language == "python":
        monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
    _check(slice(None))
