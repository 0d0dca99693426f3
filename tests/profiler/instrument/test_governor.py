"""The governor: it measures what recording costs, says so with its interval, and records fewer steps by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cbtop.profiler.instrument.governor import FIRST_EVERY, MOST_EVERY, GovernedProfiler, Governor
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Node, Sampling
from cbtop.reports import REPORTS
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import record_of, source_of
from tests.profiler.memory import Memory

STEP = ("decode", "", 1)


def governed(
    cost_ns: int, *, allowed_percent: float = 1, steps: int = 4000, plain_ns: int = 1_000_000, noise: float = 0.01
) -> tuple[Governor, list[Sampling], int]:
    """After steps of which each that is recorded costs `cost_ns`, a third of it in the step that follows."""
    said: list[Sampling] = []
    governor = Governor(allowed_percent, said.append)
    chance = random.Random(7)
    recorded = follows = False
    count = 0
    for _ in range(steps):
        follows, recorded = recorded, governor.is_sampled("decode")
        took_ns = plain_ns * chance.gauss(1, noise) + (cost_ns * 2 / 3 if recorded else cost_ns / 3 if follows else 0)
        governor.ended(STEP, round(took_ns), recorded=recorded)
        count += recorded
    return governor, said, count


@pytest.mark.parametrize("cost_percent", [20, 100, 400])
def test_it_records_as_many_steps_as_the_overhead_allowed_lets_it(cost_percent: int) -> None:
    governor, said, count = governed(cost_percent * 10_000)
    assert cost_percent <= governor.every < 1.5 * cost_percent + 10
    assert count < 4000 / FIRST_EVERY / 2
    last = said[-1]
    assert last.low_percent <= last.overhead_percent <= last.high_percent <= last.allowed_percent == 1
    assert last.low_percent <= cost_percent / last.every <= last.high_percent
    assert last.every == governor.every


def test_what_costs_little_is_recorded_as_often_as_at_first() -> None:
    governor, said, _ = governed(1_000)
    assert governor.every == FIRST_EVERY
    assert abs(said[-1].overhead_percent) < 0.5


def test_where_the_noise_hides_the_cost_it_records_less_and_not_more() -> None:
    quiet, loud = governed(100_000, noise=0.001)[0], governed(100_000, noise=0.3)[0]
    assert loud.every > quiet.every


def test_however_dear_it_is_some_steps_are_recorded_and_before_it_knows_nothing_is_said() -> None:
    assert governed(10**9, steps=200)[0].every == MOST_EVERY
    assert not governed(10**9, steps=40)[1]
    governor = Governor(1, lambda _: None)
    for number in range(10_000):  # a kind for each, as of prompts whose length is always another
        governor.ended(("prefill", "", number), 5, recorded=governor.is_sampled(("prefill", number)))
    assert max(len(governor._kinds), len(governor._turns)) <= 256


def test_long_steps_that_are_never_alike_do_not_keep_it_from_knowing() -> None:
    said: list[Sampling] = []
    governor = Governor(1, said.append)
    for number in range(400):  # more of them than are remembered
        governor.ended(("prefill", "", number), 10**12, recorded=governor.is_sampled("prefill"))
        recorded = governor.is_sampled("decode")
        governor.ended(STEP, 1_000_000 + 100_000 * recorded, recorded=recorded)
    assert said
    assert governor.every == 10


def test_steps_of_a_governed_profiler_are_told_to_it_and_a_failed_one_is_not() -> None:
    memory = Memory()
    profiler = GovernedProfiler(1, recorder=memory)
    for _ in range(2 * FIRST_EVERY):
        with profiler.step("decode", tokens=3), profiler.step("draft"), profiler.brick("Inside"):
            pass
    with pytest.raises(ValueError, match="mine"), profiler.step("decode", tokens=3):
        raise ValueError("mine")
    (kind,) = profiler.governor._kinds.values()
    assert profiler.governor._kinds.keys() == {("decode", "", 3)}
    assert kind.seen == 2 * FIRST_EVERY
    names = {message.id: message.name for message in memory.said if isinstance(message, Node)}
    assert [names[record[0] & 0xFFFF] for record in memory.records].count("decode") == 3


def test_every_view_says_of_how_many_steps_it_is_and_what_recording_costs(runtime: Path) -> None:
    profiler = GovernedProfiler(1, recorder=RingRecorder(runtime))
    with profiler.step("decode", tokens=1), profiler.brick("One"):
        pass
    view = source_view(record_of(source_of(runtime)))
    assert (view.sample_every, view.overhead) == (FIRST_EVERY, None)
    profiler.announce(Sampling(20, 0.62, 0.41, 0.8, 1.0))
    profiler.close()
    view = source_view(record_of(source_of(runtime)))
    text = REPORTS["text"]([view], ["bricks"], None)
    assert "a sample: one step in 20;" in text
    assert "recording costs 0.62% of its steps' time (95 %: 0.41 to 0.80; at most 1 is allowed)" in text
    assert '"overhead_percent": 0.62' in REPORTS["json"]([view], ["bricks"], None)
