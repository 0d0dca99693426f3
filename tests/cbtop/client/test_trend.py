"""What each brick took, second by second: as many seconds as are shown, of a bounded number of bricks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.client.store import Store
from cbtop.client.trend import MAX_BRICKS, SECONDS
from cbtop.protocol.messages import Heartbeat
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, apply, profiler_in, said_at, source_of

SECOND_NS = 1_000_000_000


class Run:
    """A process whose clock the daemon has, and a viewer that hears of it every second."""

    def __init__(self, directory: Path) -> None:
        self.clock = Clock(0)
        self.profiler = profiler_in(directory, self.clock, 1 << 22)
        self.directory, self.store = directory, Store()
        self.source = None

    def hear(self, second: int) -> None:
        if self.source is None:
            self.source = source_of(self.directory)
            self.source.poll()
            apply(self.store, said_at(self.source.snapshot(), second * SECOND_NS))
        self.source.poll()
        apply(self.store, said_at(self.source.delta(), second * SECOND_NS))
        apply(self.store, [Heartbeat(second * SECOND_NS, (self.source.state_message(),))])

    def rows(self) -> dict[str, BrickRow]:
        assert self.source is not None
        return {row.name: row for row in source_view(self.store.sources[self.source.key]).bricks}


def decode(run: Run, tokens: int = 1, *, down_us: float) -> None:
    with run.profiler.step("decode", tokens=tokens):
        for layer in range(2):
            with run.profiler.layer(layer):
                with run.profiler.brick("Down"):
                    run.clock.sleep_us(down_us)
                with run.profiler.brick("Norm"):
                    run.clock.sleep_us(1)


def test_of_each_second_it_is_the_time_a_token_that_ended_in_it(runtime: Path) -> None:
    run = Run(runtime)
    decode(run, down_us=99)
    run.hear(1)
    for second, us in ((2, 10), (3, 30), (4, None), (5, 20)):
        for _ in range(0 if us is None else 3):
            decode(run, tokens=2, down_us=us)
        run.hear(second)
    rows = run.rows()
    assert rows["Down"].trend_us == (10, 30, None, 20)  # two layers, two tokens; what was there before is no second
    assert rows["Norm"].trend_us == (1, 1, None, 1)
    down = rows["Down"]
    assert (down.trend_last_us, down.trend_least_us, down.trend_most_us) == (20, 10, 30)


def test_a_brick_that_begins_to_run_later_has_nothing_in_the_seconds_before(runtime: Path) -> None:
    run = Run(runtime)
    for second in (1, 2, 3):
        decode(run, down_us=5)
        if second == 3:
            with run.profiler.step("decode", tokens=1), run.profiler.brick("Late"):
                run.clock.sleep_us(8)
        run.hear(second)
    rows = run.rows()
    assert rows["Late"].trend_us == (None, 4)  # of the two tokens in that second, and none before
    assert rows["Down"].trend_us == (10, 5)


def test_a_brick_inside_another_of_its_name_counts_once_as_in_the_time_a_token(runtime: Path) -> None:
    run = Run(runtime)
    for second in (1, 2):
        with run.profiler.step("decode", tokens=1), run.profiler.brick("Outer"), run.profiler.brick("Outer"):
            run.clock.sleep_us(40)
        run.hear(second)
    row = run.rows()["Outer"]
    assert row.trend_us == (row.us_per_token,) == (40,)


def test_without_steps_it_is_the_time_of_a_call(runtime: Path) -> None:
    run = Run(runtime)
    for second, us in ((1, 5), (2, 7), (3, 9)):
        for _ in range(4):
            with run.profiler.brick("Alone"):
                run.clock.sleep_us(us)
        run.hear(second)
    assert run.rows()["Alone"].trend_us == (7, 9)


def test_where_a_step_gives_no_count_of_tokens_there_is_none(runtime: Path) -> None:
    run = Run(runtime)
    for second in (1, 2, 3):
        with run.profiler.step("decode"), run.profiler.brick("Down"):
            run.clock.sleep_us(3)
        run.hear(second)
    row = run.rows()["Down"]
    assert (row.us_per_token, row.trend_us) == (None, ())


def test_sixty_seconds_are_kept_and_a_bounded_number_of_bricks(runtime: Path) -> None:
    run = Run(runtime)
    for second in range(1, SECONDS + 20):
        with run.profiler.step("decode", tokens=1):
            for number in range(MAX_BRICKS + 10):
                with run.profiler.brick(f"brick {number}"):
                    run.clock.sleep_us(second)
        run.hear(second)
    rows = run.rows()
    lengths = [len(row.trend_us) for row in rows.values()]
    assert rows["brick 0"].trend_us == tuple(range(20, SECONDS + 20))
    assert sum(any(row.trend_us) for row in rows.values()) == MAX_BRICKS
    assert max(lengths) == SECONDS
    record = next(iter(run.store.sources.values()))
    size = record.trend.size_bytes
    decode(run, down_us=1)
    run.hear(SECONDS + 21)
    assert record.trend.size_bytes == size
    assert size < 200_000


def test_what_is_older_than_sixty_seconds_goes_where_seconds_were_missed(runtime: Path) -> None:
    run = Run(runtime)
    for second in (1, 2, 3, 50, 63):
        decode(run, down_us=second)
        run.hear(second)
    assert run.rows()["Down"].trend_us == (100, 126)


def test_who_comes_later_sees_the_same_seconds(runtime: Path) -> None:
    run, late = Run(runtime), Store()
    decode(run, down_us=1)
    run.hear(1)
    assert run.source is not None
    for number in range(1, 40):
        decode(run, down_us=number)
        run.source.poll()
        at_ns = SECOND_NS + 300_000_000 * number
        if number == 10:
            apply(late, said_at(run.source.snapshot(), at_ns))
        said = said_at(run.source.delta(), at_ns)
        for store in (run.store, late):
            apply(store, said)
    rows = source_view(late.sources[run.source.key]).bricks
    seen = next(row.trend_us for row in rows if row.name == "Down")[1:]  # less the second in which it came
    assert len(seen) > 5
    assert run.rows()["Down"].trend_us[-len(seen) :] == seen


def test_a_second_takes_no_more_messages_than_one(runtime: Path) -> None:
    run = Run(runtime)
    decode(run, down_us=5)
    run.hear(1)
    for tenth in range(1, 31):
        decode(run, down_us=5)
        assert run.source is not None
        run.source.poll()
        apply(run.store, said_at(run.source.delta(), SECOND_NS + tenth * SECOND_NS // 10))
    assert run.rows()["Down"].trend_us == (pytest.approx(10),) * 3
