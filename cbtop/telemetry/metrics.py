"""The table of exported metrics, and the type of their points. Every service uses this table.

Names and labels are stable. OpenMetrics appends the unit to names, and `_total`, `_info`, `_bucket`, `_sum` or
`_count`. OTLP uses dots in place of underscores, and has a separate field for the unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_SERIES = 10_000  # One export has at most this many series. A brick has 34, so about 20 models of 15 bricks fit.


class MetricType(StrEnum):
    """The type of an exported metric in the OpenMetrics standard."""

    INFO = "info"  # An info metric always has the value 1. Its labels carry the information.
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric: its name, the labels of its points, and its unit ("" for a plain number)."""

    name: str
    kind: MetricType
    labels: tuple[str, ...]
    about: str
    unit: str = ""


_PHASE = ("source", "phase")
_BRICK = ("source", "phase", "brick", "category", "backend")

DAEMON = Metric("cbtop_daemon", MetricType.INFO, ("version", "host"), "The daemon that exports.")
LEFT_OUT = Metric(
    "cbtop_left_out",
    MetricType.GAUGE,
    ("of",),
    f"What was left out of this export, to keep it below {MAX_SERIES} series.",
)
SOURCE = Metric(
    "cbtop_source",
    MetricType.INFO,
    ("source", "pid", "host", "program", "rank", "sample_every", "model", "architecture", "quantization", "backend"),
    "A profiled process; rank and what follows are as it said (static), empty where it did not. What lies in "
    "steps is recorded of one in sample_every: what is said of bricks is of those, and nothing is multiplied.",
)
STATE = Metric(
    "cbtop_source_state",
    MetricType.GAUGE,
    ("source", "state"),
    "1 for the state it is in: live, stalled, suspended, idle, quiet, ended, gone or faulty.",
)
QUIET = Metric(
    "cbtop_source_quiet",
    MetricType.GAUGE,
    ("source", "phase", "layer", "brick"),
    "Time for which a process that is stalled, suspended, idle or quiet has not gone on, and what it is in.",
    "seconds",
)
WEIGHTS = Metric("cbtop_source_weights", MetricType.GAUGE, ("source",), "The model's weights (static).", "bytes")
REQUESTS_RUNNING = Metric(
    "cbtop_engine_requests_running", MetricType.GAUGE, ("source",), "Requests that an engine runs."
)
REQUESTS_WAITING = Metric(
    "cbtop_engine_requests_waiting", MetricType.GAUGE, ("source",), "Requests that wait in an engine."
)
CACHE_USAGE = Metric(
    "cbtop_engine_cache_usage", MetricType.GAUGE, ("source",), "Share of an engine's KV cache in use.", "ratio"
)
REQUESTS_ENDED = Metric(
    "cbtop_engine_requests_ended", MetricType.COUNTER, ("source",), "Requests of an engine that have ended."
)
PREEMPTIONS = Metric(
    "cbtop_engine_preemptions",
    MetricType.COUNTER,
    ("source",),
    "How often an engine stopped a request to free its KV cache.",
)
ENGINE_LATENCY = Metric(
    "cbtop_engine_latency",
    MetricType.GAUGE,
    ("source", "of", "quantile"),
    "Quantiles of the latest 4,096 times to the first token, or between two outputs of a request.",
    "seconds",
)
PRODUCED = Metric(
    "cbtop_records_produced", MetricType.COUNTER, ("source",), "Records read or lost: received + dropped, always."
)
RECEIVED = Metric("cbtop_records_received", MetricType.COUNTER, ("source",), "Records that are in the statistics.")
DROPPED = Metric(
    "cbtop_records_dropped",
    MetricType.COUNTER,
    ("source", "reason"),
    "Records overwritten, overwritten before the daemon first looked, or rejected.",
)
UNREAD = Metric("cbtop_records_unread", MetricType.GAUGE, ("source",), "Records written and not read yet.")
CHECK = Metric(
    "cbtop_check_passed",
    MetricType.GAUGE,
    ("source", "brick", "assertion"),
    "1 where a brick's assertion holds, else 0.",
)
TOKENS = Metric("cbtop_tokens", MetricType.COUNTER, _PHASE, "Tokens of all steps, counted once a step.")
STEP_DURATION = Metric("cbtop_step_duration", MetricType.HISTOGRAM, _PHASE, "Wall time of all steps.", "seconds")
RECORDED_STEPS = Metric(
    "cbtop_recorded_steps", MetricType.COUNTER, _PHASE, "Steps whose inside was recorded: bricks are of these."
)
RECORDED_TOKENS = Metric("cbtop_recorded_tokens", MetricType.COUNTER, _PHASE, "Tokens of these steps.")
BRICK_DURATION = Metric(
    "cbtop_brick_duration", MetricType.HISTOGRAM, _BRICK, "Time of each call, with what runs inside it.", "seconds"
)
BRICK_EXCLUSIVE = Metric(
    "cbtop_brick_exclusive",
    MetricType.COUNTER,
    _BRICK,
    "Time without the bricks that run inside it, over ended steps (derived).",
    "seconds",
)
BRICK_FAILED = Metric("cbtop_brick_failed", MetricType.COUNTER, _BRICK, "Calls that ended in an exception.")
BRICK_ELEMENTS = Metric("cbtop_brick_elements", MetricType.COUNTER, _BRICK, "Elements, as the caller counts them.")
BRICK_FLOPS = Metric(
    "cbtop_brick_flops", MetricType.COUNTER, _BRICK, "Floating-point operations (derived from shapes)."
)
BRICK_TRAFFIC = Metric(
    "cbtop_brick_traffic", MetricType.COUNTER, _BRICK, "Bytes moved (derived from shapes).", "bytes"
)
BRICK_BUDGET = Metric(
    "cbtop_brick_budget",
    MetricType.GAUGE,
    _BRICK,
    "The time a token it may take (static: somebody set it).",
    "seconds",
)

_DEVICE = ("device", "kind")
_LINK = (*_DEVICE, "link")
_ON_DEVICE = ("source", "device")

DEVICE = Metric(
    "cbtop_device",
    MetricType.INFO,
    (*_DEVICE, "label", "name", "part_of", "host"),
    "A GPU or a MIG device by its uuid, or all processors of the host (cpu).",
)
DEVICE_UTILIZATION = Metric(
    "cbtop_device_utilization",
    MetricType.GAUGE,
    _DEVICE,
    "Of a GPU the share of time in which any kernel ran, however little of it that used; of the cpu, of all time.",
    "ratio",
)
DEVICE_MEMORY_UTILIZATION = Metric(
    "cbtop_device_memory_utilization",
    MetricType.GAUGE,
    _DEVICE,
    "Share of time in which its memory was read or written.",
    "ratio",
)
DEVICE_MEMORY_USED = Metric("cbtop_device_memory_used", MetricType.GAUGE, _DEVICE, "Memory in use.", "bytes")
DEVICE_MEMORY_SIZE = Metric("cbtop_device_memory_size", MetricType.GAUGE, _DEVICE, "Memory there is.", "bytes")
DEVICE_POWER = Metric(
    "cbtop_device_power",
    MetricType.GAUGE,
    _DEVICE,
    "Mean power of three seconds (derived from its energy counter; without one, as the driver says it).",
    "watts",
)
DEVICE_POWER_LIMIT = Metric(
    "cbtop_device_power_limit", MetricType.GAUGE, _DEVICE, "At which its driver holds it.", "watts"
)
DEVICE_CLOCK = Metric("cbtop_device_clock", MetricType.GAUGE, _DEVICE, "Clock: of a GPU that of its SMs.", "hertz")
DEVICE_MEMORY_CLOCK = Metric("cbtop_device_memory_clock", MetricType.GAUGE, _DEVICE, "Clock of its memory.", "hertz")
DEVICE_TEMPERATURE = Metric("cbtop_device_temperature", MetricType.GAUGE, _DEVICE, "Of its chip.", "celsius")
DEVICE_SLOWED = Metric(
    "cbtop_device_slowed", MetricType.GAUGE, (*_DEVICE, "by"), "1 for each thing that holds its clocks down."
)
DEVICE_SENT = Metric(
    "cbtop_device_sent",
    MetricType.GAUGE,
    _LINK,
    "Over PCIe or all its NVLinks, in the last interval.",
    "bytes_per_second",
)
DEVICE_RECEIVED = Metric(
    "cbtop_device_received",
    MetricType.GAUGE,
    _LINK,
    "Over PCIe or all its NVLinks, in the last interval.",
    "bytes_per_second",
)
SOURCE_DEVICE_MEMORY = Metric(
    "cbtop_source_device_memory", MetricType.GAUGE, _ON_DEVICE, "Memory of a GPU that the process has.", "bytes"
)
SOURCE_DEVICE_UTILIZATION = Metric(
    "cbtop_source_device_utilization",
    MetricType.GAUGE,
    _ON_DEVICE,
    "Share of the time in which the process ran on a GPU's SMs.",
    "ratio",
)
SOURCE_CPU = Metric(
    "cbtop_source_cpu",
    MetricType.GAUGE,
    ("source",),
    "Processor time of the process (derived); 1 is a processor.",
    "ratio",
)
SOURCE_RESIDENT = Metric(
    "cbtop_source_resident", MetricType.GAUGE, ("source",), "Memory of the host that the process has.", "bytes"
)

METRICS = (
    DAEMON,
    LEFT_OUT,
    SOURCE,
    STATE,
    QUIET,
    WEIGHTS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    CACHE_USAGE,
    REQUESTS_ENDED,
    PREEMPTIONS,
    ENGINE_LATENCY,
    PRODUCED,
    RECEIVED,
    DROPPED,
    UNREAD,
    CHECK,
    TOKENS,
    STEP_DURATION,
    RECORDED_STEPS,
    RECORDED_TOKENS,
    BRICK_DURATION,
    BRICK_EXCLUSIVE,
    BRICK_FAILED,
    BRICK_ELEMENTS,
    BRICK_FLOPS,
    BRICK_TRAFFIC,
    BRICK_BUDGET,
    DEVICE,
    DEVICE_UTILIZATION,
    DEVICE_MEMORY_UTILIZATION,
    DEVICE_MEMORY_USED,
    DEVICE_MEMORY_SIZE,
    DEVICE_POWER,
    DEVICE_POWER_LIMIT,
    DEVICE_CLOCK,
    DEVICE_MEMORY_CLOCK,
    DEVICE_TEMPERATURE,
    DEVICE_SLOWED,
    DEVICE_SENT,
    DEVICE_RECEIVED,
    SOURCE_DEVICE_MEMORY,
    SOURCE_DEVICE_UTILIZATION,
    SOURCE_CPU,
    SOURCE_RESIDENT,
)


@dataclass(frozen=True, slots=True)
class DurationHistogram:
    """A histogram of the durations of calls.

    `counts[i]` is the number of calls that took more than `bounds_ns[i - 1]` and at most `bounds_ns[i]`. The last
    count has no upper bound. If some durations are unknown, there is only one count and no bound.
    """

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    total_ns: int
    min_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class Point:
    """A value of an exported metric.

    `labels` has the values of its labels in order. Counting began at `since_ns` (Unix time).
    """

    labels: tuple[str, ...]
    value: float | DurationHistogram
    since_ns: int


Snapshot = dict[Metric, list[Point]]
