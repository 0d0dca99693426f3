"""Tests of the trend, which has time and work of a limited number of bricks for each of the last seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.client.trend import MAX_BRICKS, SECONDS
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Heartbeat
from cbtop.protocol.vocabulary import BrickId
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, apply, profiler_in, said_at, source_of

SECOND_NS = 1_000_000_000


class Run:
    """A process and its viewer. Both use the same fake clock, and the viewer gets an update every second."""

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
    # The trend is the time per token. A step has two layers and two tokens, so this is the time of one layer. The
    # first second is not in the trend.
    assert rows["Down"].trend_us == (10, 30, None, 20)
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
    # The brick has no time in the first second and 4 µs per token in the second, which has two tokens.
    assert rows["Late"].trend_us == (None, 4)
    assert rows["Down"].trend_us == (10, 5)


def test_a_brick_inside_one_of_its_name_counts_once_as_in_the_time_per_token(runtime: Path) -> None:
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


@pytest.mark.slow
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
    # This viewer connected late. It knows only a part of its first second, so this second is not compared.
    seen = next(row.trend_us for row in rows if row.name == "Down")[1:]
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


POSITION_WORK = Work(flops_per_element=256, bytes_per_call=4_096, bytes_per_element=64)
SCORE = BrickDefinition.of(BrickId.ATTENTION_SCORE, work=POSITION_WORK)
UNDECLARED = BrickDefinition.of(BrickId.ATTENTION_SCORE)


def attend(run: Run, phase: str, positions: int, *, us: float, layers: int = 2) -> None:
    """Run a step whose attention reads the keys of `positions` positions in each layer."""
    with run.profiler.step(phase, tokens=1):
        for layer in range(layers):
            with run.profiler.layer(layer), run.profiler.brick(SCORE, positions):
                run.clock.sleep_us(us)


def held(positions: Sequence[int], us: float) -> tuple[float, float]:
    """Return the expected intensity (FLOP/byte) and GFLOP/s of attention calls with these numbers of positions."""
    flops, moved = (sum(line) for line in zip(*((256 * n, 4_096 + 64 * n) for n in positions), strict=True))
    return pytest.approx(flops / moved, rel=1e-6), pytest.approx(flops / (len(positions) * us * 1e3), rel=1e-6)


def test_each_trail_second_has_the_work_of_calls_of_its_phase_that_end_there(runtime: Path) -> None:
    run, positions = Run(runtime), 100
    attend(run, "decode", 7, us=3)
    run.hear(1)
    wanted: list[object] = []
    for second in range(2, 9):
        attend(run, "prefill", 50_000, us=900)  # a prefill, so that the brick has much more work than in decode steps
        steps = range(positions, positions + (0 if second == 5 else 3))
        for cached in steps:
            attend(run, "decode", cached, us=10 + second)
        wanted.append(held([cached for cached in steps for _ in range(2)], 10 + second) if steps else None)
        positions = 2 * positions
        run.hear(second)
    row = run.rows()["AttentionScore"]
    assert row.trail == tuple(wanted)
    assert len(row.trail) == len(row.trend_us)


def test_the_last_trail_second_is_where_the_mark_of_that_second_would_be(runtime: Path) -> None:
    run = Run(runtime)
    for second in range(1, 5):
        attend(run, "decode", 300 * second, us=second)
        run.hear(second)
    before = run.rows()["AttentionScore"]
    for positions in (2_000, 2_001):
        attend(run, "decode", positions, us=40)
    run.hear(5)
    row = run.rows()["AttentionScore"]
    assert row.flops is not None
    assert before.flops is not None
    assert row.bytes is not None
    assert before.bytes is not None
    took_us = row.total_inclusive_us - before.total_inclusive_us
    flops, moved = row.flops - before.flops, row.bytes - before.bytes
    assert row.trail[-1] == (pytest.approx(flops / moved, rel=1e-6), pytest.approx(flops / took_us / 1e3, rel=1e-6))


def test_a_second_with_an_undeclared_call_has_no_point_and_the_others_have(
    runtime: Path,
) -> None:
    run = Run(runtime)
    for second in range(1, 6):
        attend(run, "decode", 100, us=10)
        if second == 3:
            with run.profiler.step("decode", tokens=1), run.profiler.brick(UNDECLARED):
                run.clock.sleep_us(5)
        if second == 4:
            attend(run, "decode", -1, us=10)  # -1: the number of elements of the calls is unknown
        run.hear(second)
    point = held([100], 10)
    assert run.rows()["AttentionScore"].trail == (point, None, None, point)


def test_work_that_each_call_gives_for_itself_is_that_of_its_second(runtime: Path) -> None:
    definition = BrickDefinition.of(
        BrickId.ATTENTION_SCORE, work=lambda n: Work(flops_per_call=3 * n**2, bytes_per_call=n)
    )
    run = Run(runtime)
    for second in range(1, 5):
        with run.profiler.step("decode", tokens=1), run.profiler.brick(definition, 10 * second):
            run.clock.sleep_us(4)
        run.hear(second)
    assert run.rows()["AttentionScore"].trail == tuple((30 * n, 300 * n * n / 4e3) for n in (2, 3, 4))


some_calls = st.lists(
    st.tuples(st.sampled_from(["lines", "calls", "none", "twice"]), st.integers(0, 5_000) | st.none()), max_size=4
)


@given(st.lists(some_calls, min_size=1, max_size=6))
def test_the_trail_equals_the_statistics_of_each_second_alone_for_any_calls(
    seconds: list[list[tuple[str, int | None]]],
) -> None:
    definitions = {
        "lines": SCORE,
        "calls": BrickDefinition.of(BrickId.ATTENTION_SCORE, work=lambda n: Work(2.0 * n, 0, 10 + n)),
        "none": UNDECLARED,
        "twice": SCORE,
    }
    whole, found = [[("lines", 5)], *seconds], []

    def do(run: Run, second: int) -> None:
        with run.profiler.step("decode", tokens=1):
            for at, (kind, elements) in enumerate(whole[second]):
                with run.profiler.layer(at), run.profiler.brick(definitions[kind], elements):
                    run.clock.sleep_us(7 + second)
                    if kind == "twice":  # The brick contains a brick with its own name.
                        with run.profiler.brick(SCORE, elements):
                            run.clock.sleep_us(3)
        run.hear(second + 1)

    with TemporaryDirectory() as directory:
        run = Run(Path(directory))
        for second in range(len(whole)):
            do(run, second)
        found = list(run.rows()["AttentionScore"].trail)
    wanted: list[object] = []
    for second in range(1, len(whole)):
        with TemporaryDirectory() as directory:
            run = Run(Path(directory))
            do(run, second)
            row = run.rows().get("AttentionScore")
        is_known = row is not None and row.intensity is not None
        wanted.append((pytest.approx(row.intensity), pytest.approx(row.gflops)) if row and is_known else None)
    assert found == (wanted if any(wanted) else [])


def test_work_beyond_all_measure_is_no_point(runtime: Path) -> None:
    vast = BrickDefinition.of(BrickId.LM_HEAD, work=Work(flops_per_element=9e23, bytes_per_element=1))
    run = Run(runtime)
    for second in range(1, 4):
        with run.profiler.step("decode", tokens=1), run.profiler.brick(vast, 10 if second < 3 else 1 << 60):
            run.clock.sleep_us(1)
        run.hear(second)
    assert run.rows()["LmHead"].trail == ((pytest.approx(9e23), pytest.approx(9e21)), None)


def test_where_no_work_is_declared_no_trail_is_kept(runtime: Path) -> None:
    run = Run(runtime)
    decode(run, down_us=1)
    run.hear(1)
    record = next(iter(run.store.sources.values()))
    sizes = []
    for second in range(2, 5):
        decode(run, down_us=second)
        sizes.append(record.trend.size_bytes)
        run.hear(second)
    assert run.rows()["Down"].trail == ()
    assert len(set(np.diff(sizes))) == 1
    before = record.trend.size_bytes
    attend(run, "decode", 10, us=2)
    run.hear(5)
    assert record.trend.size_bytes - before > sizes[1] - sizes[0]
