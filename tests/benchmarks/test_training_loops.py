"""Tests of the benchmark that compares the parts of a training step with the program's own clocks."""

from __future__ import annotations

import math

import pytest

from benchmarks.training_loops import LOOPS, PROGRAM, PartOfLoop


def part(
    bare_ms: float, own_ms: float, cbtop_ms: float, *, step_ms: float = 20.0, hooks_ms: float = 0.0
) -> PartOfLoop:
    return PartOfLoop("train", "optimizer", bare_ms, own_ms, cbtop_ms, step_ms, hooks_ms)


@pytest.mark.parametrize(
    ("found", "is_off"),
    [
        (part(9.0, 10.0, 9.6), False),
        (part(9.0, 10.0, 9.4), True),
        (part(9.0, 10.0, 10.6), True),
        (part(9.0, 10.0, 9.0, hooks_ms=1.0), False),
        (part(0.1, 0.3, 0.15), False),
        (part(0.1, 0.3, 0.05), True),
        (part(10.0, 10.0, math.nan), True),
    ],
)
def test_a_part_is_off_if_neither_5_percent_nor_the_own_work_explains_it(found: PartOfLoop, is_off: bool) -> None:
    assert found.is_off is is_off


def test_every_loop_of_the_program_is_measured() -> None:
    text = PROGRAM.read_text()
    assert [name for name in LOOPS if f"\ndef {name}(device, clocks, steps):" not in text] == []
