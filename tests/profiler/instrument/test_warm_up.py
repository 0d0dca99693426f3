"""Tests of the warm-up: the first steps of a kind have their own name until steps no longer become faster."""

from __future__ import annotations

import pytest

from cbtop.profiler.instrument.governor import FIRST_EVERY, FLOOR, Governor
from cbtop.profiler.instrument.warm_up import LEAST, WarmUps
from cbtop.protocol.vocabulary import MAX_WARM_UP_STEPS, WARM_UP, NodeKind

MS = 1_000_000


def warm_up_of(durations_ms: list[float]) -> int:
    """Return the number of warm-up steps."""
    warm_ups = WarmUps()
    names = []
    for duration_ms in durations_ms:
        names.append(warm_ups.named("decode", ""))
        if names[-1].endswith(WARM_UP):
            warm_ups.took("decode", "", round(duration_ms * MS))
    # Steps of the warm-up come first. No such step follows after the warm-up has ended.
    assert names == sorted(names, reverse=True)
    return sum(name == f"decode{WARM_UP}" for name in names)


@pytest.mark.parametrize(
    ("durations_ms", "steps"),
    [
        ([10.0] * 50, LEAST),
        ([67_000.0, *[10.0] * 50], LEAST),
        ([67_000.0, 30_000.0, *[10.0] * 50], 5),
        ([900, 800, 600, 400, 200, 100, 50, *[20.0] * 50], 10),
        ([20.0, 10.0] * 20, LEAST),  # Two kinds of steps take turns, so no warm-up is found.
    ],
)
def test_a_warm_up_ends_when_steps_become_no_faster(durations_ms: list[float], steps: int) -> None:
    assert warm_up_of(durations_ms) == steps


def test_a_warm_up_of_steps_that_never_settle_ends_all_the_same() -> None:
    assert warm_up_of([1000 * 0.8**number for number in range(100)]) == MAX_WARM_UP_STEPS


def test_work_that_shrinks_is_no_warm_up() -> None:
    warm_ups = WarmUps()
    sequences = [max(4, round(128 * 0.9**number)) for number in range(36)]
    names = []
    for size in sequences:
        names.append(warm_ups.named("forward", ""))
        warm_ups.took("forward", "", 300_000 * size + MS, size)
    assert names.count(f"forward{WARM_UP}") == LEAST


def test_each_phase_and_model_has_a_warm_up_of_its_own() -> None:
    warm_ups = WarmUps()
    for _ in range(LEAST):
        assert warm_ups.named("decode", "").endswith(WARM_UP)
        warm_ups.took("decode", "", MS)
    assert warm_ups.named("decode", "") == "decode"
    assert warm_ups.named("prefill", "").endswith(WARM_UP)
    assert warm_ups.named("decode", "draft").endswith(WARM_UP)


def test_of_a_warm_model_only_the_first_step_of_another_kind_is_warm_up() -> None:
    warm_ups = WarmUps()
    names = []
    for _ in range(3):  # Each generation consists of a prompt and six tokens.
        for phase in ("prefill", *["decode"] * 6):
            names.append(warm_ups.named(phase, ""))
            if names[-1].endswith(WARM_UP):
                warm_ups.took(phase, "", MS)
    assert [name for name in names if "prefill" in name] == [f"prefill{WARM_UP}", "prefill", "prefill"]


def test_two_warm_up_steps_are_recorded_then_one_in_four_up_to_a_floor() -> None:
    governor = Governor(3, lambda said: None)
    warm = [governor.is_sampled((NodeKind.STEP, f"decode{WARM_UP}")) for _ in range(10)]
    assert warm == [True, True, *[False] * 8]
    governor.every = 10_000
    recorded = [governor.is_sampled((NodeKind.STEP, "decode")) for _ in range(2 * FLOOR * FIRST_EVERY)]
    assert recorded[0]
    assert FLOOR <= sum(recorded) <= FLOOR + 1
    assert sum(recorded[: FLOOR * FIRST_EVERY + FIRST_EVERY]) >= FLOOR - 1
