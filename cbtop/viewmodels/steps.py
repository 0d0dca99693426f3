"""Make the views of steps (forward passes) by phase: times, tokens and rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from cbtop.client.source_record import SourceRecord, StepSample
from cbtop.client.window import TimeRange
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import MAX_WARM_UP_STEPS, SAMPLE, WARM_UP, NodeKind, is_training, is_warm_up
from cbtop.viewmodels.durations import DurationBar, duration_bars
from cbtop.viewmodels.on_demand import Lazy, LazyValue
from cbtop.viewmodels.time_range import compiling_in_warm_up, of_model

UNEVEN = 1e-9  # Relative rounding error of a sum of squares that is sent as float64.
# Histogram buckets per bar. An octave has 16 bars, so a bar is 3 to 6 % of its value wide.
BUCKETS_A_BAR = 4


# Why the time of a token is unknown.
NO_STEP = "no step has ended"
NO_TOKENS = "no step reports tokens"
UNEVEN_TOKENS = "steps differ in tokens"
UNEVEN_SEQUENCES = "steps differ in sequences"
UNCOUNTED_STEPS = "not every step reports its tokens"

OVERLAP = 1.05  # Below this mean number of running steps, steps count as sequential.


@dataclass(frozen=True, slots=True)
class SpanView:
    """Statistics of a number that each step reports, such as its sequences. In a window, the extremes are unknown."""

    mean: float
    least: int | None
    most: int | None
    steps: int


@dataclass(frozen=True, slots=True)
class PaceView:
    """The steps of a phase that ended within about a second: an item of a history.

    The first item also has all earlier steps.
    """

    ago_s: float  # seconds from this item to the newest one
    steps: int
    us: float  # mean time of a step in this second
    tokens: int  # tokens of the steps in this second
    cached: float | None  # mean cached positions per sequence before a step; None if not reported


@dataclass(frozen=True)
class StepsView:
    """The steps of one phase (`decode`, `prefill`), with and without recorded bricks."""

    phase: str
    count: int
    tokens: int
    # Tokens per second of wall-clock time, over the shown time range. In training, as all rates here, per second of
    # training steps (`rates_us`), so evaluations and pauses between epochs do not count.
    tokens_per_sec: float | None
    recorded: int  # number of steps with recorded bricks
    failed: int = 0  # Number of steps that ended with an exception or were cancelled. Their tokens count, too.
    # Tokens per second in steps: tokens divided by `union_us`, or by the time range if it is shorter.
    tokens_per_sec_in_steps: float | None = None
    steps_per_sec: float | None = None  # steps per second of wall-clock time; also known without tokens
    # sequences (samples) per second; None if some steps do not report them
    samples_per_sec: float | None = None
    mean_us: float | None = None
    recorded_mean_us: float | None = None  # mean time of the steps with recorded bricks
    min_us: float | None = None
    max_us: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    us_per_token_p50: float | None = None
    us_per_token_p99: float | None = None
    us_per_token_max: float | None = None
    why_no_us_per_token: str = ""  # why the times of a token (median, p99 and maximum) are unknown, or ""
    # time when at least one step ran, with the part of a step before the range
    union_us: float | None = None
    at_once: float | None = None  # mean number of steps at once: the sum of their times, divided by `union_us`
    sequences: SpanView | None = None  # number of sequences per step of the phase
    cached: SpanView | None = None  # cached positions per sequence before a step
    # Wall-clock time of the rates, 0 if unknown. For several processes, the longest time of one process.
    wall_us: float = 0.0
    rates_us: float = 0.0  # time that the rates are divided by: `wall_us`, or in training the time in training steps
    is_training: bool = False
    is_sample: bool = False  # whether steps may be missing, because they left no record
    # Histogram of step times, as bars from short to long.
    durations: Lazy[tuple[DurationBar, ...]] = Lazy(())

    @property
    def known_tokens(self) -> int | None:
        """Number of tokens of all steps. None if no step reported tokens."""
        return self.tokens if self.tokens or not self.count else None

    @property
    def has_tokens(self) -> bool:
        """Whether the rate is in tokens/s. Also true if neither rate is known, unless steps ended without tokens."""
        return self.tokens_per_sec is not None or (self.steps_per_sec is None and (self.tokens > 0 or not self.count))

    @property
    def overlap(self) -> bool:
        """Whether steps overlapped for longer than the error of the clock."""
        return self.at_once is not None and self.at_once >= OVERLAP


@dataclass(frozen=True, slots=True)
class WarmUpView:
    """The warm-up steps of a process, which the figures of other steps leave out."""

    steps: int
    took_us: float
    has_ended: bool  # whether other steps have ended; until then, warm-up steps are shown
    # Number of recompilations in the warm-up, which the verdict "recompilation" leaves out.
    recompilations: int = 0
    recompiled_us: float = 0.0
    unsettled: tuple[str, ...] = ()  # the phases with steps that still became faster when their warm-up ended


def steps_views(record: SourceRecord, stats: NodeStats, time_range: TimeRange | None) -> tuple[StepsView, ...]:
    """Return one entry for each phase with an ended step, by the phase's first step. Warm-ups come last.

    The figures are from `stats`, over `time_range`.
    """
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    counts = record.stats.column("count")
    ended = [step for step in steps if step.id < len(counts) and counts[step.id]]
    ended.sort(key=lambda step: is_warm_up(step.name))
    in_others = _names_in_others(record.nodes) if record.leaves_steps_out else set()

    names = {display_name(step) for step in ended}

    def is_sample(step: Node) -> bool:
        """Return whether steps of this name may be missing, because they left no record.

        A step without recorded bricks normally leaves a plain record. If no step of this name has one, some may have
        left no record at all (as in llama.cpp), and steps inside a plain step leave none. If later steps of a name
        are known to be a sample, earlier ones count as a sample, too.
        """
        name = display_name(step)
        if name.endswith(SAMPLE) or name + SAMPLE in names:
            return True
        is_known = record.stats.rare("plain", (step.id,)) and name not in in_others
        return record.leaves_steps_out and not is_known

    tokens = record.stats.column("elements")
    of = {label: time_range and of_model(record, time_range, label) for label in {step.label for step in ended}}
    has_steady = not all(is_warm_up(step.name) for step in ended)
    # The shown time is not the time of the warm-up. If other steps have ended, the warm-up's rates are unknown.
    return tuple(
        _steps_view(
            stats, step, None if has_steady and is_warm_up(step.name) else of[step.label],
            partial(_training_ns, record, stats, ended), is_sample=is_sample(step), has_tokens=bool(tokens[step.id]),
        )
        for step in ended
    )  # fmt: skip


def _training_ns(record: SourceRecord, stats: NodeStats, ended: Sequence[Node], time_range: TimeRange) -> int:
    """Return how much of `time_range` training steps took. Steps of all optimizers count, as in a GAN, but only of
    models that trained in this time.
    """
    training = [step.id for step in ended if is_training(step.name)]
    steady = [step.id for step in ended if is_training(step.name) and not is_warm_up(step.name)] or training
    in_range = [
        step
        for step in steady
        if record.stats.rare("first_ns", (step,)) < time_range.end_ns
        and record.stats.rare("last_ns", (step,)) > time_range.begin_ns
    ]
    return min(stats.rare("union_ns", in_range), time_range.end_ns - time_range.begin_ns)


def warm_up_view(record: SourceRecord) -> WarmUpView | None:
    """Return how many warm-up steps there are, how long they took, and which never settled. None without any."""
    counts, times_ns = record.stats.column("count"), record.stats.column("total_ns")
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP and node.id < len(counts)]
    kinds = [step for step in steps if is_warm_up(step.name) and counts[step.id]]
    if not kinds:
        return None
    warm = [step.id for step in kinds]
    unsettled = tuple(
        display_name(step).removesuffix(WARM_UP) for step in kinds if counts[step.id] == MAX_WARM_UP_STEPS
    )
    has_ended = any(counts[step.id] for step in steps if not is_warm_up(step.name))
    count, took_us = int(sum(counts[warm])), int(sum(times_ns[warm])) / 1e3
    compiling = compiling_in_warm_up(record)
    again = (0, 0.0) if compiling is None else (compiling.again, compiling.again_us)
    return WarmUpView(count, took_us, has_ended, *again, unsettled)


def tokens_per_sec_history(record: SourceRecord, steps: StepsView | None) -> tuple[float, ...]:
    """Return the wall-clock tokens/s of each second, oldest first. () if unknown."""
    if steps is None or steps.tokens_per_sec is None:
        return ()
    samples = list(record.history.get(steps.phase, ()))
    return tuple(
        _rate(new.tokens - old.tokens, new.monotonic_ns - old.monotonic_ns) or 0.0 for old, new in pairwise(samples)
    )


def steps_per_sec_history(record: SourceRecord, steps: StepsView | None) -> tuple[float, ...]:
    """Return the wall-clock steps/s of each second, oldest first. () if unknown."""
    if steps is None or steps.steps_per_sec is None:
        return ()
    samples = list(record.history.get(steps.phase, ()))
    return tuple(
        _rate(new.count - old.count, new.monotonic_ns - old.monotonic_ns) or 0.0 for old, new in pairwise(samples)
    )


def step_us_history(record: SourceRecord, phase: str | None) -> tuple[float | None, ...]:
    """Return the mean step time (µs) in each second of `steps_per_sec_history`. None without an ended step."""
    samples = list(record.history.get(phase or "", ()))
    return tuple(
        (new.time_ns - old.time_ns) / (new.count - old.count) / 1e3 if new.count > old.count else None
        for old, new in pairwise(samples)
    )


def cached_by_second(record: SourceRecord, phase: str | None) -> dict[int, float]:
    """Return the mean cached positions per sequence before a step, by second of the daemon's clock."""
    return _mean_by_second(record, phase, lambda sample: (sample.cached, sample.cached_given))


def batch_by_second(record: SourceRecord, phase: str | None) -> dict[int, float]:
    """Return the mean number of sequences per step, by second of the daemon's clock."""
    return _mean_by_second(record, phase, lambda sample: (sample.sequences, sample.sequences_given))


def _mean_by_second(
    record: SourceRecord, phase: str | None, totals: Callable[[StepSample], tuple[int, int]]
) -> dict[int, float]:
    """Return a mean for each second of a history that has steps.

    `totals` returns a running sum, and the number of its steps.
    """
    samples = [(sample.monotonic_ns, *totals(sample)) for sample in record.history.get(phase or "", ())]
    return {
        monotonic_ns // 1_000_000_000: (total - before) / (given - given_before)
        for (_, before, given_before), (monotonic_ns, total, given) in pairwise(samples)
        if given > given_before
    }


def pace(record: SourceRecord, phase: str | None) -> tuple[PaceView, ...]:
    """Return each second's mean step time and number of steps, oldest first."""
    samples = list(record.history.get(phase or "", ()))
    found = []
    # In a chosen range, the first sample is only the starting point: steps before the range do not count.
    seen_before = [] if record.window.is_range else [StepSample(0, 0)]
    for old, new in pairwise([*seen_before, *samples]):
        steps, given = new.count - old.count, new.cached_given - old.cached_given
        if steps > 0:
            ago_s = (samples[-1].monotonic_ns - new.monotonic_ns) / 1e9
            cached = (new.cached - old.cached) / given if given > 0 else None
            us = (new.time_ns - old.time_ns) / steps / 1e3
            found.append(PaceView(ago_s, steps, us, new.tokens - old.tokens, cached))
    return tuple(found)


def _names_in_others(nodes: NodeTable) -> set[str]:
    """Return the names of steps that ran inside other steps."""
    step_of = nodes.column("step_of")
    is_inside = (nodes.column("kind_of") == NodeKind.STEP) & (step_of >= 0) & (step_of != np.arange(len(step_of)))
    return {display_name(nodes[node]) for node in np.flatnonzero(is_inside).tolist()}


def are_alike(tokens: int, steps: int, squared: int | None) -> bool:
    """Return whether all `steps` had the same number of tokens. `squared` is the sum of the squares of these
    numbers.
    """
    # Older daemons do not send `squared`. Without it, only a mean that is not whole proves that the numbers differ. A
    # whole mean proves nothing.
    if squared is None:
        return tokens % steps == 0
    # The difference is 0 only if all steps had the same number of tokens (Cauchy-Schwarz inequality).
    return abs(squared * steps - tokens**2) <= UNEVEN * tokens**2


def _steps_view(
    stats: NodeStats,
    step: Node,
    time_range: TimeRange | None,
    training_ns: Callable[[TimeRange], int],
    *,
    is_sample: bool,
    has_tokens: bool,
) -> StepsView:
    calls = stats.calls([step.id])
    # Whether every step of the phase has counted its tokens.
    is_counted = has_tokens and not stats.rare("uncounted", (step.id,)) and (calls is None or calls.elements > 0)
    wall_ns = time_range.end_ns - time_range.begin_ns if time_range and not is_sample else 0
    rates_ns = training_ns(time_range) if time_range and wall_ns and is_training(step.name) else wall_ns
    tokens_ns = rates_ns if is_counted else 0
    if calls is None:  # In the time range of the statistics, no step of this phase ended.
        return _without_steps(step, _rate(0, tokens_ns), _rate(0, rates_ns), is_sample=is_sample)
    count, tokens, total_ns = calls.count, calls.elements, calls.total_ns
    union_ns = stats.rare("union_ns", (step.id,))
    # All tokens of a step count, even if it began before the time range, so its whole time must count, too. The
    # length of the range is the limit. Otherwise the rate could be below the wall-clock rate.
    took_ns = min(union_ns, (time_range.end_ns - time_range.begin_ns if time_range else 0) or union_ns)
    p50, p95, p99, longest = (_us(value) for value in (calls.p50_ns, calls.p95_ns, calls.p99_ns, calls.max_ns))
    sequences = _span(stats, step.id, "sequences")
    why_unknown = "" if is_counted else UNCOUNTED_STEPS if has_tokens else NO_TOKENS
    why_unknown = why_unknown or _why_uneven(tokens, count, stats.sparse["squared_tokens"].get(step.id), sequences)
    tokens_a_step = 0 if why_unknown else tokens / count
    recorded = max(0, count - stats.rare("plain", (step.id,)))
    return StepsView(
        phase=display_name(step),
        count=count,
        recorded=recorded,
        failed=calls.failed,
        tokens=tokens,
        tokens_per_sec=_rate(tokens, tokens_ns),
        tokens_per_sec_in_steps=_rate(tokens, took_ns) if is_counted else None,
        steps_per_sec=_rate(count, rates_ns),
        wall_us=wall_ns / 1e3,
        rates_us=rates_ns / 1e3,
        is_training=is_training(step.name),
        samples_per_sec=_samples_per_sec(sequences, count, rates_ns),
        mean_us=total_ns / count / 1e3,
        recorded_mean_us=(total_ns - stats.rare("plain_ns", (step.id,))) / recorded / 1e3 if recorded else None,
        min_us=_us(calls.min_ns),
        max_us=longest,
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        us_per_token_p50=p50 / tokens_a_step if p50 and tokens_a_step else None,
        us_per_token_p99=p99 / tokens_a_step if p99 and tokens_a_step else None,
        us_per_token_max=longest / tokens_a_step if longest and tokens_a_step else None,
        why_no_us_per_token=why_unknown,
        union_us=union_ns / 1e3,
        at_once=total_ns / union_ns if union_ns and not is_sample else None,
        sequences=sequences,
        cached=_span(stats, step.id, "kept"),
        is_sample=is_sample,
        durations=LazyValue(lambda: duration_bars(stats.histogram((step.id,)), BUCKETS_A_BAR)),
    )


def _without_steps(
    step: Node, tokens_per_sec: float | None, steps_per_sec: float | None, *, is_sample: bool
) -> StepsView:
    return StepsView(
        display_name(step), 0, 0, tokens_per_sec, recorded=0, is_sample=is_sample, steps_per_sec=steps_per_sec,
        why_no_us_per_token=NO_STEP, is_training=is_training(step.name),
    )  # fmt: skip


def _why_uneven(tokens: int, count: int, squared: int | None, sequences: SpanView | None) -> str:
    """Return why the time of a token is unknown: it is known only if all steps had the same number of tokens."""
    if not are_alike(tokens, count, squared):
        return UNEVEN_TOKENS
    return UNEVEN_SEQUENCES if sequences is not None and sequences.least != sequences.most else ""


def _span(stats: NodeStats, step: int, name: str) -> SpanView | None:
    given = stats.rare(f"{name}_given", (step,))
    if not given:
        return None
    least, most = (
        stats.rare(column, (step,)) if step in stats.sparse[column] else None
        for column in (f"{name}_least", f"{name}_most")
    )
    return SpanView(stats.rare(name, (step,)) / given, least, most, given)


def _samples_per_sec(sequences: SpanView | None, count: int, time_ns: int) -> float | None:
    # A window's border may separate a step from its number of sequences, so one number may be missing.
    is_known = sequences is not None and sequences.steps >= count - 1
    return _rate(round(sequences.mean * count), time_ns) if sequences and is_known else None


def _rate(count: int, time_ns: int) -> float | None:
    return count / time_ns * 1e9 if time_ns > 0 else None


def _us(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e3
