"""Tests of errors: errors of cbtop never reach a running model.

Errors of the program's signal handlers always reach it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import (
    attach,
    attachment,
    awaited,
    functions,
    generation,
    install,
    model_call,
    open_step,
    steps,
    timed_sections,
    trouble,
    uninstall,
)
from cbtop.profiler.instrument.swapping import swaps
from cbtop.profiler.instrument.wrapping import CallWrapper
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.instrument.tiny import Layer, Stack, model_of, torch, words
from tests.profiler.memory import Memory
from tests.profiler.signals import nothing_is_lost

from torch import nn  # isort: skip


class TroubleError(Exception):
    """An error of cbtop whose text cannot be created."""

    def __str__(self) -> str:
        raise TroubleError


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, without_gradients: None) -> Iterator[None]:
    monkeypatch.setattr(trouble, "_said", {})
    yield
    here = open_step.unit()  # Clean up this thread's open steps, because a test may have let the end of a step fail.
    here.generations.clear()
    here.open.clear()


PLANTED: dict[str, tuple[Any, str]] = {
    "planning": (timed_sections, "plan_of"),
    "looking for layers": (attachment, "holds_a_stack"),
    "keeping Dynamo out": (attachment, "keep_dynamo_out"),
    "the manifest": (attachment, "manifest_of"),
    "wrapping functions": (functions.TimedFunctions, "wrap"),
    "swapping in": (CallWrapper, "swap_in"),
    "swapping out": (CallWrapper, "swap_out"),
    "what is open": (steps, "unit"),
    "what a call is": (model_call, "describe"),
    "a step of the profiler": (open_step, "ActiveStep"),
    "a step that begins": (ActiveStep, "__enter__"),
    "a step that ends": (ActiveStep, "__exit__"),
    "a step of ours": (open_step.OpenStep, "begin"),
    "a model's steps": (steps.ModelSteps, "follow"),
    "the clock": (generation, "perf_counter_ns"),
    "who records here": (functions, "recorded_here"),
    "what is attended": (functions, "_attended"),
    "what is turned": (functions, "elements_of"),
    "a generation": (generation, "Generation"),
    "the choice of a token": (open_step.OpenStep, "begin_sampling"),
    "the end of generate": (open_step.Unit, "end_generate"),
}
# Each fault is planted in a process with `install` and in another process with `attach`. By default, all faults
# are tested with `install`, and one fault with `attach`.
FAULTS = [
    pytest.param(what, how, marks=() if how == "installed" or what == "a step that ends" else pytest.mark.slow)
    for what in PLANTED
    for how in ("installed", "attached")
]
# These functions fail only in Python, because in the compiled hot path, C code replaces the functions.
IN_PYTHON = ("who records here", "what is turned")


@pytest.mark.parametrize(("what", "how"), FAULTS)
def test_what_fails_of_ours_is_said_in_a_line_and_the_model_runs(
    what: str,
    how: str,
    profiler: BrickProfiler,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner, name = PLANTED[what]
    if what in IN_PYTHON:
        monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
        profiler = BrickProfiler(recorder=memory)
    model, inputs = model_of("llama", num_hidden_layers=2), words(2, 5)
    bare = model.generate(inputs, max_new_tokens=3, do_sample=False), model(inputs).logits
    if how == "attached":
        attach(model, profiler)
    else:
        install(profiler)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise TroubleError

    with caplog.at_level(logging.WARNING, "cbtop"), monkeypatch.context() as planted:
        planted.setattr(owner, name, fails)
        for _ in range(2):
            profiler.disable()
            assert torch.equal(model(inputs).logits, bare[1])
            profiler.enable()
            ours = model.generate(inputs, max_new_tokens=3, do_sample=False), model(inputs).logits
            assert all(torch.equal(a, b) for a, b in zip(bare, ours, strict=True))
    model(inputs)
    # With `attach`, the failing function may not have run during the fault, so there may be no message.
    if how == "installed" or caplog.records:
        assert [record.getMessage() for record in caplog.records if "TroubleError" in record.getMessage()]
    assert len(caplog.records) <= 6  # There is at most one line for each wrapped function.


def _whole_steps(memory: Memory) -> int:
    steps = {node.id for node in _nodes(memory).values() if node.kind is NodeKind.STEP and node.parent is None}
    return sum(tag & 0xFFFFFF in steps and not tag & FLAG_AMOUNTS for tag, *_ in memory.records)


def _nodes(memory: Memory) -> dict[int, Node]:
    return {node.id: node for node in memory.said if isinstance(node, Node)}


# Each case: the exception, how cbtop is attached, and n. A signal arrives in every n-th function of cbtop.
SIGNALS = [
    pytest.param(TimeoutError, "attached", 23, marks=pytest.mark.slow),
    (KeyboardInterrupt, "attached", 97),
    (TimeoutError, "installed", 997),
    pytest.param(KeyboardInterrupt, "attached", 29, marks=pytest.mark.slow),
    pytest.param(TimeoutError, "installed", 401, marks=pytest.mark.slow),
    pytest.param(TimeoutError, "attached", 1, marks=pytest.mark.slow),
    pytest.param(KeyboardInterrupt, "installed", 11, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("raised", "how", "every"), SIGNALS)
def test_a_signal_handlers_error_during_a_model_call_reaches_the_host(
    raised: type[Exception],
    how: str,
    every: int,
    profiler: BrickProfiler,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a signal interrupts the end of a step, the step may stay open. Later steps are then recorded inside it."""
    x = torch.ones(1, 1, 2, 4)
    for at in count(0, every):
        uninstall()
        model = Stack()
        bare = model(x)
        if how == "attached":
            attach(model, profiler)
        else:
            install(profiler)

        def use(model: Any = model) -> None:
            model(x)
            model(x)

        if not nothing_is_lost(use, raised, at):
            break
        before = len(memory.records)
        assert torch.equal(model(x), bare)
        assert torch.equal(model(x), bare)
        new = memory.records[before:]
        names = [_nodes(memory)[tag & 0xFFFFFF].name for tag, *_ in new if not tag & FLAG_AMOUNTS]
        assert [names.count(name) for name in ("UpProjection", "Attention (fused)")] == [4, 4], at
        assert names.count("forward") in (2, 4), at
    assert at > 200
    assert not caplog.records


class Own(torch.Tensor):  # type: ignore[name-defined, misc]
    """A tensor class of the program. With inputs of this class, Python begins and ends steps instead of C."""


def test_a_step_whose_end_is_interrupted_anywhere_ends_and_is_not_kept(profiler: BrickProfiler) -> None:
    model, x = Stack(), torch.ones(1, 1, 2, 4).as_subclass(Own)
    attached = attach(model, profiler)
    closes: Any = open_step.OpenStep.close
    at, left = 0, -1

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal left  # number of opcodes left
        frame.f_trace_opcodes = frame.f_code is closes.__code__
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    while left < 0:
        left, at = at, at + 1
        sys.settrace(trace)
        try:
            model(x)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert not open_step.unit().open, at
        assert not attached.steps.recorded_steps, at
    assert at > 50


@pytest.mark.parametrize("every", [203, pytest.param(17, marks=pytest.mark.slow)])
def test_a_signal_handlers_error_while_a_token_is_chosen_reaches_the_host(
    every: int, profiler: BrickProfiler, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = model_of("llama", num_hidden_layers=2), words(1, 3)
    attach(model, profiler)
    bare = model.generate(inputs, max_new_tokens=2, min_new_tokens=2)

    def use() -> None:
        model.generate(inputs, max_new_tokens=2, min_new_tokens=2)

    caplog.clear()
    for at in count(0, every):
        if not nothing_is_lost(use, TimeoutError, at):
            break
        before = _whole_steps(memory)
        assert torch.equal(model.generate(inputs, max_new_tokens=2, min_new_tokens=2), bare)
        assert _whole_steps(memory) >= before + 2, at
    assert not [record for record in caplog.records if record.name == "cbtop"]


class Odd:
    """An object with a class that cannot be read: `__class__` raises an error."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise TroubleError


def test_arguments_of_which_nothing_can_be_asked_are_passed_on(profiler: BrickProfiler) -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.act = nn.Identity()

        def forward(self, x: Any) -> Any:
            return self.act(x)

    model, odd = Passes(), Odd()
    attach(model, profiler)
    model(torch.ones(1))
    assert model(odd) is odd
    assert model(torch.ones(1)) == 1


def test_an_import_that_cannot_be_followed_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader(importlib.machinery.SourceFileLoader):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "exec_module":
                raise TroubleError
            super().__setattr__(name, value)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            source = tmp_path / f"{name}.py"
            loader = Loader(name, str(source))
            return importlib.util.spec_from_file_location(name, source, loader=loader) if source.exists() else None

    def fails() -> None:
        raise TroubleError

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, object(), Finder])
    for name in ("followed", "not_followed"):
        (tmp_path / f"{name}.py").write_text("there = True")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    awaited.once_imported("not_followed", fails)
    assert importlib.import_module("not_followed").there
    monkeypatch.syspath_prepend(tmp_path)
    awaited.once_imported("followed", fails)
    assert importlib.import_module("followed").there


def test_a_handler_of_the_hosts_may_call_the_model_wherever_it_runs(profiler: BrickProfiler) -> None:
    """A signal can arrive while cbtop holds a lock. A call from its handler must not wait for this lock."""
    model, x = Stack(), torch.ones(1, 1, 2, 4)
    attach(model, profiler)
    with swaps.lock, attachment._lock:
        model(x)
