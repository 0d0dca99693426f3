"""Tests of the governor, which limits overhead.

It measures the cost of recording and reports this cost with an interval. If needed, the governor records fewer steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cbtop.profiler.instrument.governor import (
    FIRST_EVERY,
    FLOOR,
    LOOK_NS,
    LOOK_STEPS,
    LOOK_TIMES,
    MAX_KINDS,
    MOST_EVERY,
    SHARING_NS,
    GovernedProfiler,
    Governor,
    Sort,
    interval_of,
)
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import CatalogMessage, Node, Sampling
from cbtop.reports import REPORTS
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, record_of, source_of
from tests.profiler.memory import Memory, is_plain
from tests.representatives import first_by_default

MS = 1_000_000


class Running:
    """A running step."""


class Host:
    """A simulated process. Recording a step costs time in this step and in others.

    A recorded step takes `cost_ns` longer. The next plain step of the same model takes `cost_ns / 3` longer. Each
    plain step that runs at the same time as a recorded step takes `cost_ns / 20` longer.
    """

    def __init__(self, *, allowed_percent: float = 1, cost_ns: float = 0.2 * MS, noise: float = 0.01) -> None:
        self.said: list[Sampling] = []
        self.governor = Governor(allowed_percent, self.said.append)
        self.recorded = self.steps = 0
        self.paid_ns = self.lived_ns = 0.0
        self.cost_ns, self._noise = cost_ns, noise
        self._chance = random.Random(7)
        self._swapped_in: set[str] = set()
        self._running = 0  # number of recorded steps that run at the moment

    def step(self, name: str, plain_ns: float, model: str = "", own_ns: int = 0) -> Iterator[float]:
        """Run one step. Yields its duration."""
        step = Running()
        is_recorded = self.governor.is_sampled((name, model))
        mark = self.governor.began(step, model, recorded=is_recorded)
        paid_ns: float = own_ns
        if is_recorded:
            self._swapped_in.add(model)
            self._running += 1
            paid_ns += self.cost_ns
        elif model in self._swapped_in and not self._running:
            self._swapped_in.discard(model)
            paid_ns += self.cost_ns / 3
        elif self._running:
            paid_ns += self.cost_ns / 20
        took_ns = plain_ns * self._chance.gauss(1, self._noise) + paid_ns
        yield took_ns
        self._running -= is_recorded
        self.governor.left(step, mark)
        self.governor.ended(name, model, round(took_ns), mark, own_ns)
        self.steps += 1
        self.recorded += is_recorded
        self.paid_ns += paid_ns
        self.lived_ns += took_ns

    def live(self, steps: Iterable[tuple[str, float] | tuple[str, float, str]], own_ns: int = 0) -> Host:
        """Run `steps` one after another. Each step is (name, duration) or (name, duration, model)."""
        for name, plain_ns, *model in steps:
            for _ in self.step(name, plain_ns, *model, own_ns=own_ns):
                pass
        return self

    def live_in_threads(self, threads: list[Iterator[tuple[str, float]]], until_ns: float) -> Host:
        """Run the steps of all threads in parallel, until a time on the simulated clock."""
        running: list[tuple[float, int, Iterator[float]]] = []

        def begin(now_ns: float, thread: int) -> None:
            step = self.step(*next(threads[thread]))
            heapq.heappush(running, (now_ns + next(step), thread, step))

        for thread in range(len(threads)):
            begin(0, thread)
        now_ns = 0.0
        while now_ns < until_ns:
            now_ns, thread, step = heapq.heappop(running)
            assert next(step, None) is None
            begin(now_ns, thread)
        return self

    @property
    def overhead_percent(self) -> float:
        return 100 * self.paid_ns / self.lived_ns


def decoding(count: int = 6000, plain_ns: float = MS) -> list[tuple[str, float]]:
    return [("decode", plain_ns)] * count


def serving(count: int = 300) -> Iterator[tuple[str, float]]:
    """Yield (name, duration) of the steps of a server: a prompt of random length, then its tokens.

    Each token takes a little longer than the previous token.
    """
    chance = random.Random(8)
    for _ in range(count):
        yield "prefill", chance.uniform(2, 200) * MS
        yield from (("decode", (1 + 0.004 * token) * MS) for token in range(chance.randrange(5, 60)))


WORKLOADS: dict[str, Iterable[tuple[str, float] | tuple[str, float, str]]] = {
    "decoding": decoding(),
    "prompts and their tokens": list(serving()),
    "without a cache, each step longer than the last": [
        ("encode", (1 + step % 500 / 20) * MS) for step in range(8000)
    ],
    "four batches in turn": [("decode", (1 + 3 * (step % 4 == 0)) * MS) for step in range(8000)],
    "two batches in turn": [("decode", (1 + 3 * (step % 2)) * MS) for step in range(8000)],
    "a draft and its target": [
        step for _ in range(1500) for step in [("decode", MS, "draft")] * 4 + [("verify", 6 * MS, "target")]
    ],
    "long steps, then short ones": [*[("prefill", 100 * MS)] * 500, *decoding(6000)],
    "a model for every step": [("prefill", MS, f"Net {number}") for number in range(20_000)],
    "a thousand models in turn": [("prefill", MS, f"Net {number % 1000}") for number in range(60_000)],
    "steps of any length": [("mixed", random.Random(number).uniform(0.2, 5) * MS) for number in range(20_000)],
}
BY_DEFAULT = (
    "prompts and their tokens",
    "four batches in turn",
    "a draft and its target",
    "long steps, then short ones",
)


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(workload, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name, workload in WORKLOADS.items()
    ],
)
def test_recording_stays_within_the_overhead_allowed_whatever_the_steps_are(
    workload: Iterable[tuple[str, float]],
) -> None:
    host = Host().live(workload)
    assert host.overhead_percent <= 1
    assert host.recorded >= 5
    assert host.governor.every < MOST_EVERY


@first_by_default("cost_percent", [20, 100, 400])
def test_it_records_as_many_steps_as_the_overhead_allowed_lets_it(cost_percent: int) -> None:
    host = Host(cost_ns=cost_percent / 100 * MS).live(decoding(30_000))
    all_of_it = 100 * host.paid_ns / host.recorded / (host.lived_ns / host.steps)
    assert 0.95 * all_of_it <= host.governor.every < 1.5 * all_of_it + 10
    last = host.said[-1]
    low, middle, high = (
        percent or math.nan for percent in (last.low_percent, last.overhead_percent, last.high_percent)
    )
    assert low <= middle <= high <= last.allowed_percent == 1
    assert 0.99 * low <= all_of_it / last.every <= 1.01 * high
    assert last.every == host.governor.every


def test_steps_of_threads_next_to_a_recorded_one_are_part_of_its_cost() -> None:
    threads = [itertools.cycle(decoding(1)) for _ in range(8)]
    host = Host(cost_ns=0.5 * MS).live_in_threads(threads, until_ns=5_000 * MS)
    assert host.overhead_percent <= 1
    alone = Host(cost_ns=0.5 * MS).live(decoding(10_000))
    assert host.governor.every > 1.1 * alone.governor.every


def test_an_abandoned_recorded_step_does_not_make_all_others_concurrent() -> None:
    host = Host()
    abandoned = host.step("decode", MS)
    next(abandoned)
    abandoned.close()
    host.live(decoding(500))
    assert host.said[-1].overhead_percent is not None


def test_what_plain_steps_pay_is_part_of_the_figure_and_of_what_is_allowed() -> None:
    # The plain steps cost 5 µs each, which is half of the allowed overhead.
    host = Host().live(decoding(), own_ns=5000)
    assert host.overhead_percent <= 1
    assert host.governor.every > 1.5 * Host().live(decoding()).governor.every


def test_a_fifth_more_is_recorded_if_plain_steps_use_up_the_allowance() -> None:
    dear = Host().live(decoding(), own_ns=20_000)
    assert 10 < dear.governor.every < 200
    # This is the cost of recording alone, including the cost of the first steps.
    assert 0.1 < 100 * (dear.paid_ns - 20_000 * dear.steps) / dear.lived_ns < 0.3
    # The cost of plain steps exceeds the limit. This cost cannot be reduced, so it is reported.
    assert dear.said[-1].overhead_percent == pytest.approx(2.2, abs=0.1)


def test_the_time_to_decide_is_part_of_the_overhead_reported_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("cbtop.protocol.clock.perf_counter_ns", clock)
    said: list[Sampling] = []

    class Slow(Memory):
        def announce(self, message: CatalogMessage, /) -> None:
            if isinstance(message, Sampling):
                clock.sleep_us(5_000)
                said.append(message)

    profiler = GovernedProfiler(1, recorder=Slow())
    for _ in range(2000):
        with profiler.step("decode"):
            clock.sleep_us(10_000)
    # At first, decisions of the governor (looks) are the only cost: 5 ms in LOOK_STEPS steps of 10 ms. Then looks
    # become rarer.
    assert said[2].overhead_percent == pytest.approx(100 * 5 / (LOOK_STEPS * 10), rel=0.02)
    assert said[-1].overhead_percent == pytest.approx(100 / LOOK_TIMES, rel=0.02)


@first_by_default(
    "workload", ["decoding", "prompts and their tokens", "without a cache, each step longer than the last"]
)
def test_every_step_is_recorded_if_that_is_cheap_and_its_cost_stays_measured(workload: str) -> None:
    host = Host(allowed_percent=3, cost_ns=5_000).live(WORKLOADS[workload])
    assert host.governor.every == 1
    assert host.recorded > 0.9 * host.steps
    dear = host.live(decoding(2_000))
    assert dear.governor.every == 1
    dear.cost_ns = 0.3 * MS
    dear.live(decoding(20_000))
    assert 8 < dear.governor.every < 60
    assert dear.said[-1].overhead_percent == pytest.approx(30 * 4 / 3 / dear.governor.every, rel=0.3)


@pytest.mark.parametrize("growth", [0.0, 0.004])
def test_the_cost_of_recording_is_known_from_two_plain_steps_in_a_row(growth: float) -> None:
    host = Host(allowed_percent=50, cost_ns=0.1 * MS, noise=0.001)
    host.live(("decode", (1 + growth * (step % 1000)) * MS) for step in range(20_000))
    assert host.governor.every == 1
    (kind,) = host.governor.kinds.values()
    recorded, after = kind.estimate(Sort.RECORDED), kind.estimate(Sort.AFTER)
    assert recorded is not None
    assert after is not None
    assert recorded.middle == pytest.approx(0.1 * MS, rel=0.05)
    assert after.middle == pytest.approx(0.1 * MS / 3, rel=0.05)


def test_two_steps_in_a_row_are_sometimes_plain_if_every_step_is_recorded() -> None:
    governor = Governor(3, lambda said: None)
    governor.every = 1
    recorded = [governor.is_sampled("decode") for _ in range(64 * 100)]
    plain = [number for number, is_recorded in enumerate(recorded) if not is_recorded]
    assert len(plain) == pytest.approx(2 * 100, abs=4)
    assert all(second == first + 1 for first, second in zip(plain[::2], plain[1::2], strict=True))


def test_models_that_record_at_the_same_time_share_the_allowance() -> None:
    governor = Governor(3, lambda said: None)
    floor, allowed = 5 / 105, 3 / 103
    assert governor.share_of("a", FLOOR - 1, now_ns=1) == pytest.approx(floor)
    assert governor.share_of("a", FLOOR, now_ns=2) == pytest.approx(allowed)
    assert governor.share_of("a", FLOOR, now_ns=2, steady=0.5) == pytest.approx(allowed / 2)
    assert governor.share_of("a", FLOOR - 1, now_ns=2, steady=0.5) == pytest.approx(floor)
    assert governor.share_of("b", 1, now_ns=3) == pytest.approx(floor / 2)
    assert governor.share_of("a", FLOOR, now_ns=4) == pytest.approx(allowed / 2)
    # After this time without a record of model b, model a may use the whole allowed overhead.
    later_ns = 4 + SHARING_NS
    assert governor.share_of("a", FLOOR, now_ns=later_ns) == pytest.approx(allowed)


def test_what_a_window_adds_to_steps_of_others_in_its_thread_is_counted() -> None:
    governor = Governor(3, lambda said: None)
    step = Running()

    def run(duration_ns: int, *, opens: bool = False, closes: bool = False) -> None:
        mark = governor.began(step, "other", recorded=False)
        if opens:
            governor.window_opened()
        if closes:
            governor.window_closed()
        governor.left(step, mark)
        governor.ended("decode", "other", duration_ns, mark)

    for _ in range(20):
        run(10 * MS)
    (kind,) = governor.kinds.values()
    run(13 * MS, opens=True)
    run(14 * MS)
    thread = threading.Thread(target=run, args=(15 * MS,))
    thread.start()
    thread.join()
    assert governor.beside_ns == 7 * MS  # a step in another thread runs at the same time
    run(12 * MS, closes=True)
    assert kind.counts == [20, 0, 0, 4]
    run(10 * MS)
    assert kind.counts[Sort.PLAIN] == 21
    governor.window_opened()
    assert governor.beside_ns == 0


def test_the_overhead_is_never_below_zero() -> None:
    host = Host(cost_ns=-0.05 * MS).live(decoding())
    known = [(said.low_percent, said.overhead_percent, said.high_percent) for said in host.said[1:]]
    assert known
    assert all(percent is not None and percent >= 0 for said in known for percent in said)


def test_where_the_noise_hides_the_cost_it_records_less_and_not_more() -> None:
    quiet, loud = (Host(noise=noise).live(decoding()).governor.every for noise in (0.001, 0.3))
    assert loud > quiet


def test_one_in_four_first_steps_is_recorded_and_excess_cost_is_paid_back() -> None:
    host = Host()
    host.live(decoding(40))
    assert host.governor.every == FIRST_EVERY
    assert host.overhead_percent > 1
    assert [said.overhead_percent for said in host.said] == [None]
    host.live(decoding(200))
    assert host.governor.every > 2 * 20 * 4 / 3
    host.live(decoding(6000))
    assert host.overhead_percent <= 1
    assert host.governor.every < 2 * 20 * 4 / 3


def test_however_dear_it_is_some_steps_are_recorded() -> None:
    host = Host(cost_ns=10**9).live(decoding(400))
    assert 1000 < host.governor.every <= MOST_EVERY
    known = host.recorded
    assert host.live(decoding(2 * MOST_EVERY)).recorded > known


@pytest.mark.parametrize("period", [2, 3, 5, 8, 13, 16, 20, 21, 32, 100])
def test_periodic_steps_are_recorded_as_often_as_any_other(period: int) -> None:
    governor = Governor(1, lambda said: None)
    governor.every, governor.floor = 20, 0
    met = [0] * period
    for number in range(20_000):
        met[number % period] += governor.is_sampled("decode")
    share = sum(met) / period
    assert sum(met) == pytest.approx(1000, abs=5)
    assert all(abs(found - share) <= max(3, share / 4) for found in met)


def test_no_gap_between_recorded_steps_is_much_longer_than_one_in_k() -> None:
    for every in (FIRST_EVERY, 7, 24, 100, 324, 1000):
        governor = Governor(1, lambda said: None)
        governor.every = every
        recorded = [number for number in range(20 * every) if governor.is_sampled("decode")]
        gaps = [after - before for before, after in itertools.pairwise(recorded)]
        assert max(gaps) < 3 * every
        assert min(gaps) > 1


def test_ranks_record_the_same_steps_whatever_share_each_allows_itself() -> None:
    ranks = [Governor(1, lambda said: None) for _ in range(3)]
    steps = ["prefill", *["decode"] * 40] * 50
    recorded: list[set[int]] = [set() for _ in ranks]
    for governor, every, found in zip(ranks, (9, 20, 33), recorded, strict=True):
        for number, name in enumerate(steps):
            governor.every = 4 if number < 200 else every
            if governor.is_sampled((name, "model")):
                found.add(number)
    assert recorded[0] > recorded[1] > recorded[2]


def test_what_is_kept_is_bounded_however_many_models_and_names_there_are() -> None:
    host = Host().live([(f"step {number}", MS, f"Net {number}") for number in range(10_000)])
    governor = host.governor
    assert max(len(governor.kinds), len(governor.begun), len(governor.models)) <= MAX_KINDS + 1
    assert host.recorded < 1000


def test_steps_of_a_governed_profiler_are_told_to_it_and_a_failed_one_is_not() -> None:
    memory = Memory()
    profiler = GovernedProfiler(1, recorder=memory)
    for _ in range(100):
        with profiler.step("decode", tokens=3), profiler.step("draft"), profiler.brick("Inside"):
            pass
    with pytest.raises(ValueError, match="mine"), profiler.step("decode", tokens=3):
        raise ValueError("mine")
    (kind,) = profiler.governor.kinds.values()
    assert profiler.governor.kinds.keys() == {("decode", "")}
    assert kind.seen == 100
    names = {message.id: message.name for message in memory.said if isinstance(message, Node)}
    recorded = [names[tag & 0xFFFF] for tag, *_ in memory.records if not is_plain(tag)]
    assert sum(is_plain(tag) for tag, *_ in memory.records) == 101 - recorded.count("decode")
    assert 100 / FIRST_EVERY / 2 < recorded.count("decode") < 2 * 100 / FIRST_EVERY
    assert recorded.count("Inside") == kind.counts[Sort.RECORDED]
    assert not [model.running for model in profiler.governor.models.values() if model.running]


def test_a_forked_child_measures_for_itself() -> None:
    profiler = GovernedProfiler(1, recorder=Memory())
    profiler.governor.every = 99
    child = os.fork()
    if not child:
        os._exit(profiler.governor.every)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FIRST_EVERY


def test_every_view_says_of_how_many_steps_it_is_and_what_recording_costs(runtime: Path) -> None:
    profiler = GovernedProfiler(1, recorder=RingRecorder(runtime))
    with profiler.step("decode", tokens=1), profiler.brick("One"):
        pass
    view = source_view(record_of(source_of(runtime)))
    assert (view.sample_every, view.overhead) == (FIRST_EVERY, Sampling(FIRST_EVERY, None, None, None, 1.0))
    text = REPORTS["text"]([view], ["bricks"], None)
    assert "what recording costs its steps is n/a: too few were compared yet (at most 1 is allowed)" in text
    profiler.announce(Sampling(20, 8.34, None, None, 1.0))
    view = source_view(record_of(source_of(runtime)))
    text = REPORTS["text"]([view], ["bricks"], None)
    assert "of its steps' time (too few recorded steps for an interval; at most 1 is allowed)" in text
    assert '"low_percent": null' in REPORTS["json"]([view], ["bricks"], None)
    profiler.announce(Sampling(20, 0.62, 0.41, 0.8, 1.0))
    profiler.close()
    view = source_view(record_of(source_of(runtime)))
    text = REPORTS["text"]([view], ["bricks"], None)
    assert "a sample: one step in 20;" in text
    assert "recording costs 0.62% of its steps' time (95 %: 0.41 to 0.80; at most 1 is allowed)" in text
    assert '"overhead_percent": 0.62' in REPORTS["json"]([view], ["bricks"], None)


def test_fewer_than_six_costs_have_no_interval() -> None:
    assert interval_of(8.34, [1.0]) == (None, None)
    assert interval_of(8.34, [1.0, 2.0, 3.0, 4.0, 5.0]) == (None, None)
    low, high = interval_of(4.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (low, high) == (1.0, 6.0)
    assert interval_of(4.0, [0.0] * 6) == (0.0, 4.0)


def test_one_interrupted_look_does_not_raise_the_estimated_cost_of_looks() -> None:
    host = Host(cost_ns=20_000)
    host.governor.look_ns = 100_000
    host.live(decoding(2_000), own_ns=1_000)
    usual = host.governor.every
    for said in range(8):
        before, looked_ns = len(host.said), host.lived_ns
        host.governor.look_ns = 10 * MS if said == 4 else 100_000  # duration of the governor's last decision (look)
        while len(host.said) == before:
            host.live(decoding(1), own_ns=1_000)
        assert host.governor.every <= 2 * usual
        # The governor's next decision is not delayed, although the previous decision took long.
        assert host.lived_ns - looked_ns < 2 * LOOK_NS
