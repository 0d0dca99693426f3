"""Tests of noting the calls of modules in a step whose kernels are recorded."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.definitions import BrickDefinition  # noqa: E402
from cbtop.profiler.device.kernel_burst import KernelWindow, Keys  # noqa: E402
from cbtop.profiler.instrument import placed_calls  # noqa: E402
from cbtop.profiler.instrument.placed_calls import CallPlaces, PlacedCalls  # noqa: E402
from cbtop.protocol.vocabulary import BrickCategory, NodeKind  # noqa: E402
from tests.profiler.device.fake_cupti import CuptiWorld, FakeCupti  # noqa: E402

STEP = (NodeKind.STEP, "forward")
NORM = BrickDefinition("Norm", BrickCategory.NORM)


def calls_in(places: CallPlaces, elements: Counter[Keys]) -> tuple[PlacedCalls, FakeCupti]:
    """Return the calls of a new step, in which the model has been called, and the CUPTI that records the step."""
    world = CuptiWorld()
    cupti = FakeCupti(world)
    window = KernelWindow(cupti, world, has_calls=True)
    window.begin()
    recording: Any = SimpleNamespace(window=window, step=STEP)
    calls = PlacedCalls(recording, lambda brick: brick, elements, places)
    calls.begin(None, None)
    return calls, cupti


def test_the_same_call_in_a_later_step_has_the_same_place() -> None:
    places, elements = CallPlaces(), Counter[Keys]()
    found = []
    for module in (torch.nn.Identity(), torch.nn.Identity()):  # the host has replaced the module
        calls, _ = calls_in(places, elements)
        span = calls.begin(NORM, module)
        assert span.module is module
        calls.end(span, 3)
        assert span.module is None
        found.append(span)
    assert found[0] is found[1]
    assert elements == {(NORM,): 6}
    assert places.where[found[0].number - 1] == (NORM,)


def test_the_end_of_a_call_ends_all_calls_inside_it() -> None:
    calls, cupti = calls_in(CallPlaces(), Counter())
    outer = calls.begin(("layer", 0), None)
    inner = calls.begin(NORM, torch.nn.Identity())
    calls.end(outer, 1)
    assert inner.module is None
    assert [len(stack) for stack in cupti.stacks.values()] == [1]
    calls.end(inner, 1)
    assert [len(stack) for stack in cupti.stacks.values()] == [1]


def test_calls_beyond_the_bound_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_calls, "MAX_CALLS", 2)
    elements: Counter[Keys] = Counter()
    calls, _ = calls_in(CallPlaces(), elements)
    for expected in (True, False):
        span = calls.begin(NORM, None)
        assert (span is not None) is expected
        calls.end(span, 1)
    assert elements == {(NORM,): 1}
