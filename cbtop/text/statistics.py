"""The table of all statistics, and lists of the outputs that show them.

It has statistics of bricks, categories, graph nodes, devices and processes. The screen's columns, a brick's panel,
the text report, the JSON and the help are made from it. To add one, add a row to STATISTICS, and its key to the lists
at the end. New data also needs a field in its view model (viewmodels/bricks.py, categories.py, graph.py, devices.py).
The JSON has every row.
"""

# Rules
# - The key of a statistic is its JSON key, and the attribute with its value.
# - Each statistic has an origin, which gives the words `derived` and `static` in the help, the panel and the JSON.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cbtop import units
from cbtop.protocol.device_messages import Device
from cbtop.protocol.vocabulary import DeviceKind, Provenance
from cbtop.text import source_text
from cbtop.viewmodels.devices import ProcessRow, WhyView

Value = float | str | bool | None


class Of(StrEnum):
    """The types of table rows: BrickRow, CategoryRow, GraphRow, Device (GPU or CPU) and ProcessRow.

    Each statistic belongs to one type.
    """

    BRICK = "brick"
    CATEGORY = "category"
    NODE = "node"
    GPU = "gpu"
    CPU = "cpu"
    PROCESS = "process"


class Origin(StrEnum):
    """The origin of a number: measured, derived, and so on. The values are the words in the JSON."""

    MEASURED = "measured"
    SHAPES = "derived from shapes"
    MEASUREMENTS = "derived from measured"
    DECLARED = "static"

    @property
    def provenance(self) -> Provenance:
        """the word for the origin of a number"""
        if self in (Origin.SHAPES, Origin.MEASUREMENTS):
            return Provenance.DERIVED
        return Provenance.STATIC if self is Origin.DECLARED else Provenance.MEASURED


@dataclass(frozen=True, slots=True)
class Format:
    """The functions that write a value. `bare` leaves out the unit, for columns with the unit in their title.
    `in_full` adds it.
    """

    bare: Callable[[Any], str]
    in_full: Callable[[Any], str]


def _word(value: str | None) -> str:
    return units.NOT_MEASURED if value is None else value


def _words_or_none(value: str | None) -> str:
    return units.NOT_MEASURED if value is None else value or "nothing"


def _yes_or_no(value: bool | None) -> str:
    return units.NOT_MEASURED if value is None else "yes" if value else "NO"


def _flop(value: float | None) -> str:
    return units.si(value, "FLOP")


def _flop_per_byte(value: float | None) -> str:
    return units.number(value) + ("" if value is None else " FLOP/B")


def _watts(value: float | None) -> str:
    return units.with_unit(units.whole(value), "W")


def _megahertz(value: float | None) -> str:
    return units.with_unit(units.whole(value), "MHz")


def _celsius(value: float | None) -> str:
    return units.with_unit(units.whole(value), "°C")


# Unit of a statistic -> the functions that write its values.
FORMATS = {
    "µs": Format(units.number, units.duration),
    "µs/token": Format(units.number, units.number),
    "%": Format(units.percent_number, units.percent),
    "FLOP": Format(_flop, _flop),
    "B": Format(units.size_bytes, units.size_bytes),
    "FLOP/B": Format(units.number, _flop_per_byte),
    "GFLOP/s": Format(units.number, units.number),
    "GB/s": Format(units.number, units.number),
    "W": Format(units.whole, _watts),
    "MHz": Format(units.whole, _megahertz),
    "°C": Format(units.whole, _celsius),
    "B/s": Format(units.bytes_per_second, units.bytes_per_second),
    "ratio": Format(units.number, units.number),
    "count": Format(units.count, units.count),
    "word": Format(_word, _word),
    "words or none": Format(_words_or_none, _words_or_none),
    "yes or no": Format(_yes_or_no, _yes_or_no),
}


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic, which is one row of the table."""

    key: str
    title: str  # title of the statistic's column on the screen
    unit: str
    origin: Origin
    doc: str
    of: tuple[Of, ...] = (Of.BRICK,)
    report_title: str = ""  # title of the statistic's column in the text report, if different
    word: str = ""  # label of the statistic in the panel of a brick, if different
    # key of the statistic to sort rows by; "" means this one
    sort_key: str = ""
    # Whether the value is derived in a recent window. Since the start, it is measured.
    derived_in_window: bool = False
    # Whether the value is of few calls, and so scatters. Rows sorted by it then swap less often.
    of_few_calls: bool = False

    def value(self, row: object) -> Value:
        """Return the value of the statistic in `row`, or None if it was not measured."""
        found: Value = getattr(row, self.key)
        return found

    def bare(self, row: object) -> str:
        return FORMATS[self.unit].bare(self.value(row))

    def in_full(self, row: object) -> str:
        return FORMATS[self.unit].in_full(self.value(row))

    def sort_value(self, row: object) -> float:
        """Return the sort key of `row`. A row without a measured value comes last."""
        found = getattr(row, self.sort_key or self.key)
        return -1.0 if found is None else float(found)

    @property
    def help(self) -> str:
        """The description of the statistic for the help. The word for its origin is added, unless it was measured."""
        is_measured = self.origin is Origin.MEASURED
        return self.doc if is_measured else f"{self.doc} ({self.origin.provenance.value})"


_BRICK_AND_CATEGORY = (Of.BRICK, Of.CATEGORY)
_ALL = (Of.BRICK, Of.CATEGORY, Of.NODE)
_BRICK_AND_NODE = (Of.BRICK, Of.NODE)
_GPU = (Of.GPU,)
_GPU_AND_CPU = (Of.GPU, Of.CPU)
_PROCESS = (Of.PROCESS,)

# fmt: off
STATISTICS = (
    Statistic("count", "count", "count", Origin.MEASURED, "calls recorded", _ALL, word="calls"),
    Statistic("failed", "failed", "count", Origin.MEASURED, "calls that raised an error or were reported as failed"),
    Statistic("total_inclusive_us", "incl µs", "µs", Origin.MEASURED,
              "time of all calls, with the bricks inside them", _BRICK_AND_NODE, word="inclusive"),
    Statistic("avg_inclusive_us", "incl avg µs", "µs", Origin.MEASURED,
              "mean time of one call, with the bricks inside it; times calls it is incl µs", _BRICK_AND_NODE,
              word="incl avg"),
    Statistic("total_exclusive_us", "excl µs", "µs", Origin.MEASUREMENTS,
              "time of all calls, without the bricks inside them; in a window, of the steps "
              "that ended in it, so it may exceed incl µs", _BRICK_AND_CATEGORY,
              word="exclusive"),
    Statistic("avg_exclusive_us", "excl avg µs", "µs", Origin.MEASUREMENTS,
              "mean time of one call, without the bricks inside it; in a window, incl avg µs times the exclusive "
              "share of the steps that ended in it", _BRICK_AND_CATEGORY,
              word="excl avg"),
    Statistic("percent", "wall %", "%", Origin.MEASUREMENTS, "exclusive time as a part of the step's wall time",
              _BRICK_AND_CATEGORY, report_title="%", word="of the step", sort_key="total_exclusive_us"),
    Statistic("percent", "wall %", "%", Origin.MEASUREMENTS, "of the step's wall time", (Of.NODE,)),
    Statistic("exclusive_us_per_token", "µs/tok", "µs", Origin.MEASUREMENTS,
              "exclusive time for one token in all layers, like wall %", report_title="µs/token", word="per token"),
    Statistic("us_per_token", "incl µs/tok", "µs", Origin.MEASUREMENTS,
              "time for one token in all layers, with the bricks inside; a call inside one of the same name counts "
              "once",
              report_title="incl µs/token", word="incl/token"),
    Statistic("exclusive_us_per_token", "excl µs/tok", "µs", Origin.MEASUREMENTS, "exclusive time for one token",
              (Of.CATEGORY,), report_title="excl µs/token"),
    Statistic("host_us", "host µs", "µs", Origin.MEASURED,
              "median µs of the host in a call of a brick on a GPU, without bricks inside: what launching it takes; "
              "of the newest steps with a timed host", word="host"),
    Statistic("launches", "launches", "count", Origin.MEASURED,
              "kernels that a step launches for it, all layers together; of the newest steps with recorded "
              "kernels"),
    Statistic("p50_us", "incl p50", "µs", Origin.MEASURED,
              "half of the calls took at most this many µs, with the bricks inside them", _BRICK_AND_NODE),
    Statistic("p95_us", "incl p95", "µs", Origin.MEASURED, "95 of 100 calls took at most this many µs"),
    Statistic("p99_us", "incl p99", "µs", Origin.MEASURED, "99 of 100 calls took at most this many µs",
              _BRICK_AND_NODE, of_few_calls=True),
    Statistic("p999_us", "incl p99.9", "µs", Origin.MEASURED, "999 of 1,000 calls took at most this many µs",
              of_few_calls=True),
    Statistic("min_us", "incl min", "µs", Origin.MEASURED, "µs of the shortest call", derived_in_window=True,
              of_few_calls=True),
    Statistic("max_us", "incl max", "µs", Origin.MEASURED, "µs of the longest call", derived_in_window=True,
              of_few_calls=True),
    Statistic("trend_last_us", "last s µs", "µs", Origin.MEASUREMENTS,
              "time for one token (without steps: of one call) in the newest of the last 60 seconds in which one "
              "ended",
              word="last second"),
    Statistic("trend_least_us", "least s µs", "µs", Origin.MEASUREMENTS,
              "the lowest of these times in the last 60 seconds", word="least"),
    Statistic("trend_most_us", "most s µs", "µs", Origin.MEASUREMENTS,
              "the highest of these times in the last 60 seconds", word="most"),
    Statistic("cv", "CV", "ratio", Origin.MEASUREMENTS, "standard deviation of the calls over their mean"),
    Statistic("elements", "elements", "count", Origin.MEASURED,
              "elements counted by the caller; for a node, in the mean call", _BRICK_AND_NODE),
    Statistic("uncounted", "uncounted", "count", Origin.MEASURED, "calls without a count of elements"),
    Statistic("flops", "flops", "FLOP", Origin.SHAPES, "FLOP of all calls, from their shapes"),
    Statistic("bytes", "bytes", "B", Origin.SHAPES, "bytes moved by all calls, from their shapes"),
    Statistic("size_bytes", "size", "B", Origin.SHAPES,
              "for collectives: size of the data that is reduced, gathered or sent, over all ranks; `bytes` is then"
              " the traffic of each link"),
    Statistic("gb_per_sec", "GB/s", "GB/s", Origin.MEASUREMENTS, "bytes from shapes over measured time"),
    Statistic("gflops", "GFLOP/s", "GFLOP/s", Origin.MEASUREMENTS, "FLOP from shapes over measured time"),
    Statistic("intensity", "FLOP/B", "FLOP/B", Origin.SHAPES, "arithmetic intensity: FLOP for each byte moved",
              report_title="FLOP/byte", word="intensity"),
    Statistic("attainable_gflops", "roof", "GFLOP/s", Origin.MEASUREMENTS, "what the roof allows at this intensity"),
    Statistic("percent_of_roof", "% roof", "%", Origin.MEASUREMENTS,
              "share of what the roof allows at this intensity; if it is above 100 % (⚠), check FLOP, bytes and "
              "caches",
              report_title="% of roof", word="of the roof"),
    Statistic("bound", "bound", "word", Origin.MEASUREMENTS,
              "its limit: memory or compute; latency or overhead if it is below 60 % of every roof; several at once"
              " if steps share the roofs",
              word="bound by"),
    Statistic("roof_unsure", "unsure", "yes or no", Origin.MEASUREMENTS,
              "whether half of the rounds that measured its roof are more than 10 % below the best"),
    Statistic("above_roof", "above", "yes or no", Origin.MEASUREMENTS, "whether it is faster than its roof allows"),
    Statistic("budget_us_per_token", "set", "µs/token", Origin.DECLARED, "the µs/token set for it",
              report_title="budget", word="µs/token"),
    Statistic("budget_gb_per_sec", "GB/s set", "GB/s", Origin.DECLARED,
              "the GB/s set for it; its µs/token follow from it",
              word="GB/s"),
    Statistic("budget_used_percent", "budget", "%", Origin.MEASUREMENTS,
              "share of its budget of µs/token that is used",
              report_title="used %", word="used"),
    Statistic("budget_over_us", "over", "µs", Origin.MEASUREMENTS, "µs/token above its budget"),
    Statistic("budget_met", "met", "yes or no", Origin.MEASUREMENTS, "whether it meets its budget"),
    Statistic("checks_passed", "passed", "count", Origin.MEASURED, "checks against the reference that passed"),
    Statistic("checks_failed", "checks", "count", Origin.MEASURED,
              "checks against the reference that failed; if none did, those that passed (`2 ok`)"),
    Statistic("on_critical_path", "path", "yes or no", Origin.MEASUREMENTS,
              "whether it is on the critical path, the chain of work that determines the total time",
              (Of.NODE,)),
    Statistic("slack_us", "slack µs", "µs", Origin.MEASUREMENTS,
              "how much later it could start without a later end of the whole", (Of.NODE,)),
    Statistic("utilization_percent", "busy %", "%", Origin.MEASURED,
              "GPU: share of the time with any kernel running, on however few SMs; CPU: share of all"
              " processors' time", _GPU_AND_CPU),
    Statistic("memory_utilization_percent", "mem busy %", "%", Origin.MEASURED,
              "share of the time with reads or writes of the GPU's memory", _GPU),
    Statistic("memory_used_bytes", "memory", "B", Origin.MEASURED,
              "memory in use: of a GPU without the part that its driver keeps, of the host all that is not available",
              _GPU_AND_CPU),
    Statistic("memory_total_bytes", "of memory", "B", Origin.MEASURED, "total memory", _GPU_AND_CPU),
    Statistic("power_watts", "power W", "W", Origin.MEASUREMENTS,
              "mean power of the last three seconds, from the GPU's energy counter", _GPU),
    Statistic("power_reading_watts", "W now", "W", Origin.MEASURED,
              "power as reported by the driver, shown if there is no energy counter", _GPU),
    Statistic("power_limit_watts", "limit W", "W", Origin.MEASURED, "power limit of the driver", _GPU),
    Statistic("clock_mhz", "MHz", "MHz", Origin.MEASURED, "clock; of a GPU the clock of its SMs", _GPU_AND_CPU),
    Statistic("clock_max_mhz", "max MHz", "MHz", Origin.DECLARED, "its highest clock", _GPU_AND_CPU),
    Statistic("memory_clock_mhz", "mem MHz", "MHz", Origin.MEASURED, "clock of the GPU's memory", _GPU),
    Statistic("memory_clock_max_mhz", "max mem MHz", "MHz", Origin.DECLARED,
              "the highest clock of the GPU's memory", _GPU),
    Statistic("temperature_celsius", "°C", "°C", Origin.MEASURED, "temperature of the GPU's chip", _GPU),
    Statistic("slowed_by", "slowed by", "words or none", Origin.MEASURED,
              "reason for reduced clocks: a power cap, heat, a setting", _GPU),
    Statistic("pcie_sent_bytes_per_sec", "PCIe out", "B/s", Origin.MEASURED,
              "bytes the GPU sent over PCIe, a second, in the driver's last 20 ms", _GPU),
    Statistic("pcie_received_bytes_per_sec", "PCIe in", "B/s", Origin.MEASURED,
              "bytes the GPU received over PCIe, a second, in the driver's last 20 ms", _GPU),
    Statistic("nvlink_sent_bytes_per_sec", "NVLink out", "B/s", Origin.MEASUREMENTS,
              "bytes the GPU sent over all its NVLinks, a second, since the sample before", _GPU),
    Statistic("nvlink_received_bytes_per_sec", "NVLink in", "B/s", Origin.MEASUREMENTS,
              "bytes the GPU received over all its NVLinks, a second, since the sample before", _GPU),
    Statistic("gpu_memory_bytes", "GPU memory", "B", Origin.MEASURED, "memory of that GPU in use by the process",
              _PROCESS),
    Statistic("gpu_utilization_percent", "GPU %", "%", Origin.MEASURED,
              "share of the time that the process ran on that GPU's SMs, since the sample before", _PROCESS),
    Statistic("cpu_percent", "CPU %", "%", Origin.MEASUREMENTS,
              "processor time since the sample before; 100 is one whole processor", _PROCESS),
    Statistic("waiting_percent", "wait %", "%", Origin.MEASUREMENTS,
              "share of the time that its busiest thread could run and had no processor", _PROCESS),
    Statistic("resident_bytes", "resident", "B", Origin.MEASURED, "memory of the host in use by the process",
              _PROCESS),
    Statistic("cpu_limit_percent", "CPU limit", "%", Origin.DECLARED,
              "processor time that its container may use; 100 is one whole processor; null without a limit",
              _PROCESS),
    Statistic("memory_limit_bytes", "memory limit", "B", Origin.DECLARED,
              "memory that its container may use; null without a limit", _PROCESS),
    Statistic("throttled_percent", "throttled %", "%", Origin.MEASUREMENTS,
              "share of the scheduler's periods without processor time left for its container", _PROCESS),
    Statistic("private_bytes", "private", "B", Origin.MEASURED,
              "the part of resident_bytes that is in no file and not shared", _PROCESS),
)
# fmt: on

_BY_KEY = {(of, statistic.key): statistic for statistic in STATISTICS for of in statistic.of}


def statistic(key: str, of: Of = Of.BRICK) -> Statistic:
    """Return the statistic with this key. Raises KeyError if it does not exist."""
    return _BY_KEY[of, key]


def statistics_of(of: Of) -> tuple[Statistic, ...]:
    """Return all statistics for one type of row, in the order of the table."""
    return tuple(row for row in STATISTICS if of in row.of)


def why_unknown(found: WhyView) -> str:
    """Format a reason for missing figures, with the figures and devices: `power W, MHz of 0:0, 0:1: Not
    Supported`.
    """
    titles = [next((row.title for row in STATISTICS if row.key == key), key) for key in found.figures]
    of = f" of {source_text.labels(found.devices)}" if found.devices else ""
    return f"{', '.join(titles)}{of}: {found.why}"


def keys_of(origin: Origin) -> list[str]:
    """Return the keys of all statistics with this origin, in the order of the table and without repetitions."""
    return list(dict.fromkeys(row.key for row in STATISTICS if row.origin is origin))


# --- lists of where statistics are shown; the order is the order on the screen
# ----------------------------------------


@dataclass(frozen=True, slots=True)
class ScreenColumn:
    """A column on the screen with its minimum width.

    If there is too little room, columns with a higher `priority` are dropped first.
    """

    statistic: Statistic
    width: int
    priority: int
    # The statistic that limits this value, or None. It is shown after the value, as in 412/700.
    limit: Statistic | None = None
    instead: Statistic | None = None  # shown if this statistic was not measured

    def bare(self, row: object) -> str:
        """Return the value of the column in `row` as text, with its limit if it is known."""
        shown = self.statistic
        if self.instead is not None and shown.value(row) is None:
            shown = self.instead
        text = shown.bare(row)
        if self.limit is None or units.NOT_MEASURED in (text, self.limit.bare(row)):
            return text
        return f"{text}/{self.limit.bare(row)}"


def _places(of: Of, *columns: tuple[str, int, int]) -> tuple[ScreenColumn, ...]:
    return tuple(ScreenColumn(statistic(key, of), width, priority) for key, width, priority in columns)


def _rows(*keys: str, of: Of = Of.BRICK) -> tuple[Statistic, ...]:
    return tuple(statistic(key, of) for key in keys)


BRICK_COLUMNS = _places(
    Of.BRICK,
    ("percent", 7, 1),
    # The time is exclusive, because `wall %` in the next column is also exclusive and users compare the two columns.
    ("exclusive_us_per_token", 8, 2),
    ("avg_inclusive_us", 12, 11),
    ("p50_us", 8, 4),
    ("p95_us", 8, 12),
    ("p99_us", 8, 5),
    ("max_us", 8, 6),
    ("min_us", 8, 15),
    ("count", 9, 14),
    ("gb_per_sec", 6, 9),
    ("gflops", 8, 13),
    ("us_per_token", 12, 16),
)
# The columns of a brick that are shown only if the host was timed while a GPU worked.
HOST_COLUMNS = _places(Of.BRICK, ("host_us", 8, 3), ("launches", 8, 7))
# The columns of a brick that are shown only if a brick has a budget.
BUDGET_COLUMNS = _places(Of.BRICK, ("budget_used_percent", 7, 6))
# The columns of a brick that are shown only if a brick was checked.
CHECK_COLUMNS = _places(Of.BRICK, ("checks_failed", 7, 6))
POINT_COLUMNS = _places(
    Of.BRICK,
    ("intensity", 7, 4),
    ("gflops", 8, 6),
    ("gb_per_sec", 6, 3),
    ("percent_of_roof", 8, 1),
    ("bound", 19, 2),
    ("percent", 7, 5),
)
CATEGORY_COLUMNS = _places(
    Of.CATEGORY, ("percent", 7, 1), ("exclusive_us_per_token", 11, 2), ("avg_exclusive_us", 11, 4), ("count", 10, 5)
)
NODE_COLUMNS = _places(Of.NODE, ("avg_inclusive_us", 11, 1), ("p50_us", 8, 4), ("p99_us", 8, 3), ("count", 8, 6))
NODE_SHARE_COLUMNS = _places(Of.NODE, ("percent", 8, 2))  # the column next to the bar of a graph node
# The columns of a graph node that are shown only if a node is off the critical path.
PATH_COLUMNS = _places(Of.NODE, ("slack_us", 8, 2))
# The figures of a device that the screen shows, with their limits.
DEVICE_COLUMNS = (
    ScreenColumn(statistic("utilization_percent", Of.GPU), 6, 1),
    ScreenColumn(statistic("memory_used_bytes", Of.GPU), 15, 2, limit=statistic("memory_total_bytes", Of.GPU)),
    ScreenColumn(
        statistic("power_watts", Of.GPU), 7, 3,
        limit=statistic("power_limit_watts", Of.GPU), instead=statistic("power_reading_watts", Of.GPU),
    ),
    ScreenColumn(statistic("clock_mhz", Of.GPU), 11, 4, limit=statistic("clock_max_mhz", Of.GPU)),
    ScreenColumn(statistic("temperature_celsius", Of.GPU), 3, 5),
    ScreenColumn(statistic("slowed_by", Of.GPU), 16, 6),
    ScreenColumn(statistic("pcie_received_bytes_per_sec", Of.GPU), 9, 8),
    ScreenColumn(statistic("pcie_sent_bytes_per_sec", Of.GPU), 9, 9),
    ScreenColumn(statistic("nvlink_received_bytes_per_sec", Of.GPU), 9, 10),
    ScreenColumn(statistic("nvlink_sent_bytes_per_sec", Of.GPU), 10, 11),
    ScreenColumn(statistic("memory_utilization_percent", Of.GPU), 10, 13),
    ScreenColumn(statistic("memory_clock_mhz", Of.GPU), 11, 14, limit=statistic("memory_clock_max_mhz", Of.GPU)),
)  # fmt: skip
PROCESS_COLUMNS = _places(
    Of.PROCESS, ("gpu_memory_bytes", 10, 3), ("gpu_utilization_percent", 6, 4), ("cpu_percent", 7, 5),
    ("waiting_percent", 7, 6), ("resident_bytes", 8, 7),
)  # fmt: skip


def device_text(place: ScreenColumn, device: Device) -> str:
    """Return a figure of a device as text, with its limit. Return a dash if devices of this kind do not have the
    figure.
    """
    return place.bare(device) if has_figure(place.statistic, device) else units.NONE_THERE


def has_figure(statistic: Statistic, device: Device) -> bool:
    """Whether this kind of device has the figure `key`."""
    return (Of.CPU if device.kind is DeviceKind.CPU else Of.GPU) in statistic.of


def process_text(statistic: Statistic, process: ProcessRow) -> str:
    """Return a figure of a process as text. Return a dash for a GPU figure if the process uses no GPU."""
    is_on_gpu = statistic.key in ("gpu_memory_bytes", "gpu_utilization_percent")
    return units.NONE_THERE if is_on_gpu and not process.device else statistic.bare(process)


def container_text(process: ProcessRow) -> str:
    """Return the limits of a process's container as text, or "" if it has none."""
    limits = []
    if process.cpu_limit_percent is not None:
        processors = process.cpu_limit_percent / 100
        limits.append(f"{processors:g} processor" if processors <= 1 else f"{processors:g} processors")
    if process.memory_limit_bytes is not None:
        limits.append(f"{units.size_bytes(process.memory_limit_bytes)} of memory")
    if not limits:
        return ""
    text = f"{process.name or units.NOT_MEASURED} {process.pid}: its container may use {' and '.join(limits)}"
    if process.throttled_percent is None:
        return text
    share = units.percent_number(process.throttled_percent)
    return f"{text}; it had none left in {share} % of the scheduler's periods (throttled)"


BRICK_PANEL = {
    "time": _rows(
        "total_exclusive_us", "total_inclusive_us", "percent", "exclusive_us_per_token", "us_per_token", "count",
        "failed", "avg_exclusive_us", "avg_inclusive_us", "p50_us", "min_us", "p95_us", "max_us", "p99_us", "host_us",
        "launches",
    ),
    "work": _rows(
        "flops", "gflops", "bytes", "gb_per_sec", "intensity", "percent_of_roof", "elements", "bound",
    ),
    "budget": _rows("budget_us_per_token", "budget_used_percent", "budget_over_us"),
}  # fmt: skip

# Tables of the text report, each 80 columns wide. They show the share of time, the durations of calls (own, total,
# spread, by second), the work, and how far bricks are below the roof.
OVERVIEW_REPORT = _rows("percent", "total_exclusive_us", "count", "p50_us", "p99_us")
HOST_REPORT = _rows("host_us", "launches")
OWN_REPORT = _rows("count", "total_exclusive_us", "avg_exclusive_us", "percent")
CALL_REPORT = _rows("count", "total_inclusive_us", "avg_inclusive_us")
SPREAD_REPORT = _rows("p50_us", "p95_us", "p99_us", "min_us", "max_us")
TREND_REPORT = _rows("trend_last_us", "trend_least_us", "trend_most_us")
WORK_REPORT = _rows("us_per_token", "budget_us_per_token", "budget_used_percent", "budget_met",
                      "gb_per_sec", "gflops", "checks_failed")  # fmt: skip
ROOF_REPORT = _rows("intensity", "percent_of_roof", "bound")
POINT_REPORT = _rows("bound", "intensity", "gflops", "gb_per_sec", "percent_of_roof")
CATEGORY_REPORT = _rows(
    "count", "total_exclusive_us", "avg_exclusive_us", "percent", "exclusive_us_per_token", of=Of.CATEGORY
)
