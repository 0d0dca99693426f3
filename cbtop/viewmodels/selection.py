"""Select what a view shows of a source: one phase, and a time (the recent window, a chosen range, or all data)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import TimeRange
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind, SourceStatus, is_training, is_warm_up
from cbtop.viewmodels.steps import StepsView, steps_views
from cbtop.viewmodels.time_range import TimeRangeView, time_range_of, time_range_view

# Matches names of decode steps, also of draft models and with suffixes (`decode, a sample`).
_DECODES = re.compile(r"(.* )?decode(, .*)?|verify", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WindowView:
    """The time that a view is about: the recent window, or a chosen range.

    An ended process's window ends with the process.
    """

    asked_s: float
    covers_s: float  # actual length in seconds; shorter than `asked_s` if the process was watched for less time
    lost: int = 0  # lost records among the `seen` ones of this range; in a merge, both are 0
    seen: int = 0
    range_s: tuple[float, float] | None = None  # (begin, end) of the chosen range in Unix time, or None

    @property
    def is_short(self) -> bool:
        """Whether the window is more than a second shorter than requested.

        Up to a second is normal, because figures are updated about once a second.
        """
        return self.range_s is None and self.covers_s < self.asked_s - 1


@dataclass(frozen=True, slots=True)
class PhaseSelection:
    """What is shown of a source: its statistics, their time range, and the steps in it."""

    stats: NodeStats
    time_range: TimeRange | None  # time range of the statistics; None if no step was seen
    window: TimeRange | None  # the recent window; None: since the start
    phases: tuple[StepsView, ...]
    time_range_view: TimeRangeView | None


def shown(record: SourceRecord, *, window: bool) -> PhaseSelection:
    """Select all data of `record`, or with `window` only its recent window.

    A source has no window if it was watched for less than a second, or had already ended. Then all data is selected.
    """
    is_all = not (window and record.window.has_watched)
    stats, seconds = (record.stats, None) if is_all else record.window.statistics(record.stats)
    time_range = time_range_of(record, seconds)
    view = None if time_range is None else time_range_view(record, stats, time_range)
    phases = steps_views(record, stats, time_range)
    if view and any(steps.is_sample for steps in phases):
        # Steps without records would look like time between steps, so it is unknown how the time divides.
        view = replace(view, in_steps_us=None, between_us=None)
    return PhaseSelection(stats, time_range, seconds and (time_range or seconds), phases, view)


def shown_phase(record: SourceRecord, phase: str | None) -> str | None:
    """Return `phase` if the source has such steps, otherwise its most relevant phase. None without steps.

    The most relevant phase is found by these criteria, most important first: - It is not a warm-up. - It trains, and
    training took most of the time of all steps. - Its model ran for at least a tenth of the time of any other model.
    - It decodes. - The manifest names its model, and it decodes or its model ran for at least half of the time of any
    other. - It is called `decode`. - It took the most time.
    """
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    named = record.manifest.steps_of if record.manifest else ""
    total_ns = record.stats.column("total_ns")

    def steady_ns(step: Node) -> int:
        return int(total_ns[step.id]) if step.id < len(total_ns) and not is_warm_up(step.name) else 0

    of_models: Counter[str] = Counter()
    for step in steps:
        of_models[step.label] += steady_ns(step)
    longest_ns = max(of_models.values(), default=0)
    trains = 2 * sum(steady_ns(step) for step in steps if is_training(step.name)) > sum(of_models.values())

    def liking(step: Node) -> tuple[bool, bool, bool, bool, bool, bool, int]:
        taken_ns = steady_ns(step)
        ran_ns, decodes = of_models[step.label], bool(_DECODES.fullmatch(step.name))
        is_named = step.label == named and (decodes or 2 * ran_ns >= longest_ns)
        is_of_training = trains and is_training(step.name)
        is_long = 10 * ran_ns >= longest_ns
        return bool(taken_ns), is_of_training, is_long, decodes, is_named, step.name == "decode", taken_ns

    if any(display_name(step) == phase for step in steps):
        return phase
    return display_name(max(steps, key=liking)) if steps else None


def window_view(record: SourceRecord, window: TimeRange) -> WindowView:
    """Return the length of the window, and its numbers of lost and seen records."""
    losses, range_s = record.window.losses, None
    if record.window.is_range and (hello := record.hello) is not None:
        begin_s, end_s = (
            (hello.realtime_ns + at_ns - hello.monotonic_ns) / 1e9 for at_ns in (window.begin_ns, window.end_ns)
        )
        range_s = begin_s, end_s
    return WindowView(record.window.length_s, window.covers_s, losses.lost, losses.seen, range_s)


def state_of(record: SourceRecord) -> SourceStatus:
    """Return the last known state of the process."""
    return record.state.state if record.state else SourceStatus.LIVE


def is_live(record: SourceRecord) -> bool:
    """Return whether the process still runs. True if unknown."""
    return state_of(record) is SourceStatus.LIVE


def is_selected(record: SourceRecord, wanted: Sequence[str]) -> bool:
    """Return whether the user's list `wanted` contains the key, the pid or the `rank=N` of a source."""
    names = [record.key]
    if record.hello is not None:
        names += [str(record.hello.pid), f"rank={record.hello.rank}"]
    return any(name in wanted for name in names)


def has_data(record: SourceRecord, phase: str | None = None) -> bool:
    """Return whether a view of exactly this `phase` would have data, without making it."""
    shown, count = shown_phase(record, phase), record.stats.column("count")
    if phase is not None and shown != phase:
        return False
    if shown is None:
        return record.serving.is_engine or bool(
            count[: len(record.nodes) + 1][record.nodes.column("kind_of")[: len(count)] == NodeKind.BRICK].any()
        )
    steps = [
        node for node in record.nodes.children[None] if node.kind is NodeKind.STEP and display_name(node) == shown
    ]
    return any(step.id < len(count) and count[step.id] for step in steps)
