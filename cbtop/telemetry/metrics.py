"""What is exported: the table of metrics, and what a point of one is. Every service draws from here.

Names and labels are stable. They are written without what a format adds to them: OpenMetrics appends the unit and
`_total`, `_info`, `_bucket`, `_sum`, `_count`; OTLP writes dots for underscores and carries the unit beside the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_SERIES = 10_000  # an export; a brick has 34 of them, so that is some 20 models of 15 bricks


class Kind(StrEnum):
    """What may be done with a metric's values."""

    INFO = "info"  # always 1: the labels are the content
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, the labels each of its points has, its unit ("" is a plain number)."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    about: str
    unit: str = ""


_PHASE = ("source", "phase")
_BRICK = ("source", "phase", "brick", "category", "backend")

DAEMON = Metric("cbtop_daemon", Kind.INFO, ("version", "host"), "The daemon that exports.")
LEFT_OUT = Metric(
    "cbtop_left_out", Kind.GAUGE, ("of",), f"What was left out of this export, to keep it below {MAX_SERIES} series."
)
SOURCE = Metric(
    "cbtop_source",
    Kind.INFO,
    ("source", "pid", "host", "program", "rank", "sample_every", "model", "architecture", "quantization", "backend"),
    "A profiled process; rank and what follows are as it said (static), empty where it did not. Of its steps one in "
    "sample_every is recorded: every count and total is of those, and none is multiplied.",
)
STATE = Metric(
    "cbtop_source_state", Kind.GAUGE, ("source", "state"), "1 for the state it is in: live, ended, gone or faulty."
)
WEIGHTS = Metric("cbtop_source_weights", Kind.GAUGE, ("source",), "The model's weights (static).", "bytes")
PRODUCED = Metric(
    "cbtop_records_produced", Kind.COUNTER, ("source",), "Records read or lost: received + dropped, always."
)
RECEIVED = Metric("cbtop_records_received", Kind.COUNTER, ("source",), "Records that are in the statistics.")
DROPPED = Metric(
    "cbtop_records_dropped",
    Kind.COUNTER,
    ("source", "reason"),
    "Records overwritten, overwritten before the daemon first looked, or rejected.",
)
UNREAD = Metric("cbtop_records_unread", Kind.GAUGE, ("source",), "Records written and not read yet.")
CHECK = Metric(
    "cbtop_check_passed",
    Kind.GAUGE,
    ("source", "brick", "assertion"),
    "1 where a brick's assertion holds, else 0.",
)
TOKENS = Metric("cbtop_tokens", Kind.COUNTER, _PHASE, "Tokens of the recorded steps, counted once a step.")
STEP_DURATION = Metric("cbtop_step_duration", Kind.HISTOGRAM, _PHASE, "Wall time of whole recorded steps.", "seconds")
BRICK_DURATION = Metric(
    "cbtop_brick_duration", Kind.HISTOGRAM, _BRICK, "Time of each call, with what runs inside it.", "seconds"
)
BRICK_EXCLUSIVE = Metric(
    "cbtop_brick_exclusive",
    Kind.COUNTER,
    _BRICK,
    "Time without the bricks that run inside it, over ended steps (derived).",
    "seconds",
)
BRICK_FAILED = Metric("cbtop_brick_failed", Kind.COUNTER, _BRICK, "Calls that ended in an exception.")
BRICK_ELEMENTS = Metric("cbtop_brick_elements", Kind.COUNTER, _BRICK, "Elements, as the caller counts them.")
BRICK_FLOPS = Metric("cbtop_brick_flops", Kind.COUNTER, _BRICK, "Floating-point operations (derived from shapes).")
BRICK_TRAFFIC = Metric("cbtop_brick_traffic", Kind.COUNTER, _BRICK, "Bytes moved (derived from shapes).", "bytes")
BRICK_BUDGET = Metric(
    "cbtop_brick_budget", Kind.GAUGE, _BRICK, "The time a token it may take (static: somebody set it).", "seconds"
)

METRICS = (
    DAEMON,
    LEFT_OUT,
    SOURCE,
    STATE,
    WEIGHTS,
    PRODUCED,
    RECEIVED,
    DROPPED,
    UNREAD,
    CHECK,
    TOKENS,
    STEP_DURATION,
    BRICK_DURATION,
    BRICK_EXCLUSIVE,
    BRICK_FAILED,
    BRICK_ELEMENTS,
    BRICK_FLOPS,
    BRICK_TRAFFIC,
    BRICK_BUDGET,
)


@dataclass(frozen=True, slots=True)
class Durations:
    """A histogram: `counts[i]` calls took at most `bounds_ns[i]` and more than the bound before; the last, more.

    Without bounds it says only how many calls there were: not each of them is known by its duration.
    """

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    total_ns: int
    min_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric, the values of its labels in their order, and since when it counts (Unix time)."""

    labels: tuple[str, ...]
    value: float | Durations
    since_ns: int


Snapshot = dict[Metric, list[Point]]
