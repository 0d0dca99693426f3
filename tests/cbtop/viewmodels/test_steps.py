"""Tests of the sequences and cached positions of steps, which are shown next to the times of steps."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest

from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Compilation
from cbtop.protocol.vocabulary import MAX_WARM_UP_STEPS, WARM_UP
from cbtop.reports import REPORTS
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of


def _run(profiler: BrickProfiler, clock: Clock, *steps: tuple[int | None, int | None]) -> None:
    for sequences, cached in steps:
        with profiler.step("decode", tokens=1) as step, profiler.brick("a"):
            step.sequences, step.cached = sequences, cached
            clock.sleep_us(10)


def test_reports_give_the_sequences_of_steps_and_what_their_caches_held(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    _run(profiler, clock, (1, 0), (4, 100), (4, None), (None, None))
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    text = REPORTS["text"]([view], [], None)
    assert "1 to 4 sequences a step, 0 to 100 positions cached before it" in text
    steps = json.loads(REPORTS["json"]([view], [], None))["sources"][0]["steps"]
    assert steps["count"] == 4
    assert steps["sequences"] == {"mean": 3.0, "least": 1, "most": 4, "steps": 3}
    assert steps["cached_positions"] == {"mean": 50.0, "least": 0, "most": 100, "steps": 2}
    assert view.books is not None
    assert view.books.close


def test_of_one_sequence_and_one_position_the_text_has_the_singular(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    _run(profiler, clock, (1, 1))
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert "1 sequence a step, 1 position cached before it" in REPORTS["text"]([view], [], None)


@pytest.mark.parametrize("sample_every", [1, 2])
def test_steps_left_by_an_exception_count_as_failed_in_text_and_json(tmp_path: Path, sample_every: int) -> None:
    clock = Clock()
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(tmp_path, 1 << 20), sample_every=sample_every)
    for at in range(10):
        with suppress(asyncio.CancelledError), profiler.step("decode", tokens=3):
            clock.sleep_us(10)
            if at % 3 == 0:
                raise asyncio.CancelledError
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert view.steps is not None
    assert (view.steps.failed, view.steps.tokens) == (4, 30)
    text = REPORTS["text"]([view], [], None)
    assert ("10 steps (4 failed), 30 tokens" if sample_every == 1 else "(5 recorded, 4 failed), 30 tokens") in text
    assert "of failed steps tokens count" in text
    assert json.loads(REPORTS["json"]([view], [], None))["sources"][0]["steps"]["failed"] == 4


def test_steps_that_say_nothing_of_it_have_no_line_for_it(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    _run(profiler, clock, (None, None))
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    text = REPORTS["text"]([view], [], None)
    assert "cached" not in text
    assert "failed" not in text
    assert json.loads(REPORTS["json"]([view], [], None))["sources"][0]["steps"]["sequences"] is None


def test_of_ranks_together_the_range_is_that_of_all(tmp_path: Path) -> None:
    clock, records = Clock(), []
    for rank, cached in ((0, 5), (1, 70)):
        here = tmp_path / str(rank)
        here.mkdir()
        profiler = profiler_in(here, clock)
        _run(profiler, clock, (2, cached))
        records.append(record_of(source_of(here)))
        profiler.close()
    steps = merged_view(records, MergeMode.SUM).steps
    assert steps is not None
    assert steps.cached is not None
    assert (steps.cached.mean, steps.cached.least, steps.cached.most) == (37.5, 5, 70)


# If the last step has 3, 4 or 5 tokens, all steps together have 7, 8 or 9 tokens. Not every step has one token.
@pytest.mark.parametrize("last", [3, 4, 5])
def test_a_token_has_no_median_where_steps_had_more_and_fewer_of_them(tmp_path: Path, last: int) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for tokens, duration_us in ((1, 20_000), (0, 2_000)) * 4 + ((last, 60_000),):
        with profiler.step("decode", tokens=tokens):
            clock.sleep_us(duration_us)
    for _ in range(4):
        with profiler.step("prefill", tokens=8):
            clock.sleep_us(40_000)
    decode = source_view(record_of(source_of(tmp_path)), "decode").steps
    prefill = source_view(record_of(source_of(tmp_path)), "prefill").steps
    profiler.close()
    assert decode is not None
    assert (decode.us_per_token_p50, decode.us_per_token_p99, decode.us_per_token_max) == (None, None, None)
    assert decode.why_no_us_per_token == "steps differ in tokens"
    assert decode.tokens_per_sec_in_steps == pytest.approx((4 + last) / 0.148)
    assert prefill is not None
    assert prefill.us_per_token_p50 == pytest.approx(5_000, rel=0.01)
    assert prefill.why_no_us_per_token == ""


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(1, 1), (2, 1)], "steps differ in tokens"),
        ([(2, 1), (2, 2)], "steps differ in sequences"),
        ([(1, 1), (None, 1)], "not every step reports its tokens"),
    ],
)
def test_why_the_time_of_a_token_is_unknown_is_in_the_report(
    tmp_path: Path, steps: list[tuple[int | None, int]], why: str
) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for tokens, sequences in steps:
        with profiler.step("decode", tokens=tokens) as step, profiler.brick("a"):
            step.sequences = sequences
            clock.sleep_us(10)
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert view.steps is not None
    assert view.steps.why_no_us_per_token == why
    assert f"ms/token n/a ({why})" in REPORTS["text"]([view], [], None)


def test_a_token_has_no_median_if_two_processes_differ_in_tokens_a_step(tmp_path: Path) -> None:
    """The processes have 1 and 3 tokens per step. The mean is 2, but no step had 2 tokens."""
    records = []
    for tokens in (1, 3):
        here = tmp_path / str(tokens)
        here.mkdir()
        clock = Clock()
        profiler = profiler_in(here, clock)
        for _ in range(4):
            with profiler.step("decode", tokens=tokens):
                clock.sleep_us(10)
        records.append(record_of(source_of(here)))
        profiler.close()
    alone, merged = source_view(records[1]).steps, merged_view(records, MergeMode.SUM).steps
    assert alone is not None
    assert alone.us_per_token_p50 == pytest.approx(10 / 3, rel=0.01)
    assert merged is not None
    assert (merged.tokens, merged.count, merged.us_per_token_p50) == (16, 8, None)


def test_a_step_of_more_tokens_than_there_are_leaves_the_others_readable(tmp_path: Path) -> None:
    """The square of this number of tokens is larger than a message can hold. A viewer would reject such a message."""
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for tokens in (1 << 61, 1):
        with profiler.step("decode", tokens=tokens):
            clock.sleep_us(10)
    steps = source_view(record_of(source_of(tmp_path))).steps
    profiler.close()
    assert steps is not None
    assert (steps.count, steps.us_per_token_p50) == (2, None)


def test_a_rate_with_lost_records_is_a_lower_bound_in_report_and_list(tmp_path: Path) -> None:
    clock = Clock()
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(tmp_path, 1 << 12))
    with profiler.step("decode", tokens=1):
        clock.sleep_us(10)
    source = source_of(tmp_path)
    source.poll()
    for _ in range(1_000):  # These steps overwrite the ring before the daemon reads it.
        with profiler.step("decode", tokens=1):
            clock.sleep_us(10)
    view = source_view(record_of(source))
    profiler.close()
    assert view.loss.lost > 0
    assert re.search(r", ≥[\d,]+ tokens/s", REPORTS["text"]([view], [], None))


def test_steps_of_which_only_some_are_counted_later_have_no_rate(tmp_path: Path) -> None:
    clock = Clock()
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(tmp_path, 1 << 20), sample_every=2)
    for name in ("decode", "decode", "decode", "decode, a sample", "decode, a sample"):
        with profiler.step(name, tokens=1), profiler.brick("a"):
            clock.sleep_us(10)
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert [(steps.phase, steps.tokens_per_sec, steps.is_sample) for steps in view.phases] == [
        ("decode", None, True),
        ("decode, a sample", None, True),
    ]


def test_a_sample_without_tokens_has_an_unknown_rate_of_steps(tmp_path: Path) -> None:
    clock = Clock()
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(tmp_path, 1 << 20))
    with profiler.step("call, a sample"):
        clock.sleep_us(10)
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert view.steps is not None
    assert (view.steps.has_tokens, view.steps.steps_per_sec) == (False, None)


def test_the_rate_of_a_model_is_of_the_time_in_which_it_ran_its_turn(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for model, us in (("", 100), ("Net 2", 50)):
        for _ in range(10):
            with profiler.step("forward", tokens=1, model=model), profiler.brick("a"):
                clock.sleep_us(us)
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    rates = {steps.phase: steps.tokens_per_sec for steps in view.phases}
    assert rates["forward"] == pytest.approx(10_000, rel=0.05)
    assert rates["Net 2 forward"] == pytest.approx(20_000, rel=0.05)


def test_models_that_take_turns_share_the_time(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for _ in range(20):
        for model in ("", "Net 2"):
            with profiler.step("forward", tokens=1, model=model), profiler.brick("a"):
                clock.sleep_us(100)
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert [steps.tokens_per_sec for steps in view.phases] == pytest.approx([5_000, 5_000], rel=0.1)


def test_recompilations_in_the_warm_up_are_said_with_its_time(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for number, is_again in enumerate((False, True, True)):
        with profiler.step(f"decode{WARM_UP}", tokens=1):
            begun_ns = clock()
            clock.sleep_us(2_000_000)
            profiler.announce(Compilation(number, begun_ns, clock(), is_again))
    _run(profiler, clock, (1, 0))
    begun_ns = clock()
    clock.sleep_us(1_000)
    # This compilation began after the first shown step.
    profiler.announce(Compilation(3, begun_ns, clock(), is_again=True))
    _run(profiler, clock, (1, 0))
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    warm_up = view.warm_up
    assert warm_up is not None
    assert (warm_up.steps, warm_up.recompilations, warm_up.recompiled_us) == (3, 2, 4_000_000.0)
    assert view.compiling is not None
    assert (view.compiling.again, view.compiling.again_us) == (1, 1_000.0)
    assert "warm-up: 3 steps, 6.00 s (recompiled 2 times: 4.00 s), in no other figure" in REPORTS["text"](
        [view], [], None
    )


def test_a_warm_up_that_never_settled_is_named(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    for phase, count in (("decode", MAX_WARM_UP_STEPS), ("prefill", 4)):
        for _ in range(count):
            with profiler.step(f"{phase}{WARM_UP}", tokens=1):
                clock.sleep_us(1_000)
    _run(profiler, clock, (1, 0))
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    assert view.warm_up is not None
    assert view.warm_up.unsettled == ("decode",)
    assert "(decode did not settle: the last steps still became faster), in no" in REPORTS["text"]([view], [], None)
