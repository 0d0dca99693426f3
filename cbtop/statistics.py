"""The statistics of bricks, categories and graph nodes: one table, and where each of them is shown.

The screen's columns, the panel of one brick, the text report, the JSON and the help are all made from this file. A
new statistic is a row in STATISTICS, its key in the lists at the end and, where it is new data, a field of what it is
of (viewmodels/bricks.py, categories.py, model.py). The JSON takes every row.
"""

# Rules
# - A statistic is read from the attribute of the row that is called like its key in the JSON.
# - Its origin belongs to it: the words `derived` and `static` in the help, the panel and the JSON come from there.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cbtop import formatting
from cbtop.protocol.vocabulary import Provenance

Value = float | str | bool | None


class Of(StrEnum):
    """What a statistic is of: a BrickRow, a CategoryRow or a GraphRow."""

    BRICK = "brick"
    CATEGORY = "category"
    NODE = "node"


class Origin(StrEnum):
    """Where a number comes from, as the JSON says it."""

    MEASURED = "measured"
    SHAPES = "derived from shapes"
    MEASUREMENTS = "derived from measured"
    DECLARED = "static"

    @property
    def provenance(self) -> Provenance:
        """The one word for it."""
        if self in (Origin.SHAPES, Origin.MEASUREMENTS):
            return Provenance.DERIVED
        return Provenance.STATIC if self is Origin.DECLARED else Provenance.MEASURED


@dataclass(frozen=True, slots=True)
class Format:
    """How a value is written: bare, where a column's head carries the unit, and in full."""

    bare: Callable[[Any], str]
    in_full: Callable[[Any], str]


def _word(value: str | None) -> str:
    return formatting.NOT_MEASURED if value is None else value


def _yes_or_no(value: bool | None) -> str:
    return formatting.NOT_MEASURED if value is None else "yes" if value else "NO"


def _flop(value: float | None) -> str:
    return formatting.si(value, "FLOP")


def _flop_per_byte(value: float | None) -> str:
    return formatting.number(value) + ("" if value is None else " FLOP/B")


# Every unit a statistic may have.
FORMATS = {
    "µs": Format(formatting.number, formatting.duration),
    "µs/token": Format(formatting.number, formatting.number),
    "%": Format(formatting.percent_number, formatting.percent),
    "FLOP": Format(_flop, _flop),
    "B": Format(formatting.size_bytes, formatting.size_bytes),
    "FLOP/B": Format(formatting.number, _flop_per_byte),
    "GFLOP/s": Format(formatting.number, formatting.number),
    "GB/s": Format(formatting.number, formatting.number),
    "ratio": Format(formatting.number, formatting.number),
    "count": Format(formatting.count, formatting.count),
    "word": Format(_word, _word),
    "yes or no": Format(_yes_or_no, _yes_or_no),
}


@dataclass(frozen=True, slots=True)
class Statistic:
    """One row of the table."""

    key: str
    title: str  # heads its column on the screen
    unit: str
    origin: Origin
    doc: str
    of: tuple[Of, ...] = (Of.BRICK,)
    report_title: str = ""  # heads its column in the text report, where that is another
    word: str = ""  # stands before it in the panel of a brick, where that is another
    sort_key: str = ""  # the key of the statistic it is sorted by, where that is another
    derived_in_window: bool = False  # measured over a whole life, not over the last seconds

    def value(self, row: object) -> Value:
        """Its value in `row`, None where nobody measured it."""
        found: Value = getattr(row, self.key)
        return found

    def bare(self, row: object) -> str:
        return FORMATS[self.unit].bare(self.value(row))

    def in_full(self, row: object) -> str:
        return FORMATS[self.unit].in_full(self.value(row))

    def sort_value(self, row: object) -> float:
        """What a table is sorted by: what nobody measured comes last."""
        found = getattr(row, self.sort_key or self.key)
        return -1.0 if found is None else float(found)

    @property
    def help(self) -> str:
        """What it says, and a word for where it comes from unless it was simply measured."""
        is_measured = self.origin is Origin.MEASURED
        return self.doc if is_measured else f"{self.doc} ({self.origin.provenance.value})"


_BRICK_AND_CATEGORY = (Of.BRICK, Of.CATEGORY)
_ALL = (Of.BRICK, Of.CATEGORY, Of.NODE)
_BRICK_AND_NODE = (Of.BRICK, Of.NODE)

# fmt: off
STATISTICS = (
    Statistic("count", "count", "count", Origin.MEASURED, "calls recorded", _ALL, word="calls"),
    Statistic("failed", "failed", "count", Origin.MEASURED, "calls that raised an error, or were said to fail"),
    Statistic("total_inclusive_us", "incl µs", "µs", Origin.MEASURED,
              "time of all calls added up, each with what ran inside it", _BRICK_AND_NODE, word="inclusive"),
    Statistic("avg_inclusive_us", "incl avg µs", "µs", Origin.MEASURED,
              "mean µs of one call, with what ran inside it: times calls it is incl µs", _BRICK_AND_NODE,
              word="incl avg"),
    Statistic("total_exclusive_us", "excl µs", "µs", Origin.MEASUREMENTS,
              "time of all calls, without bricks inside them", _BRICK_AND_CATEGORY, word="exclusive"),
    Statistic("avg_exclusive_us", "excl avg µs", "µs", Origin.MEASUREMENTS,
              "mean µs of one call, without bricks inside it: times calls it is excl µs", _BRICK_AND_CATEGORY,
              word="excl avg"),
    Statistic("percent", "wall %", "%", Origin.MEASUREMENTS, "exclusive time as a part of the step's wall time",
              _BRICK_AND_CATEGORY, report_title="%", word="of the step", sort_key="total_exclusive_us"),
    Statistic("percent", "wall %", "%", Origin.MEASUREMENTS, "of the step's wall time", (Of.NODE,)),
    Statistic("us_per_token", "µs/tok", "µs", Origin.MEASUREMENTS,
              "µs for one token, all layers together, with what ran inside it (of its own name once)",
              report_title="µs/token", word="per token"),
    Statistic("exclusive_us_per_token", "excl µs/tok", "µs", Origin.MEASUREMENTS, "exclusive µs for one token",
              (Of.CATEGORY,), report_title="excl µs/token"),
    Statistic("p50_us", "p50 µs", "µs", Origin.MEASURED, "half of the calls took at most this", _BRICK_AND_NODE,
              word="p50"),
    Statistic("p95_us", "p95 µs", "µs", Origin.MEASURED, "95 of 100 calls took at most this", word="p95"),
    Statistic("p99_us", "p99 µs", "µs", Origin.MEASURED, "99 of 100 calls took at most this", _BRICK_AND_NODE,
              word="p99"),
    Statistic("p999_us", "p99.9 µs", "µs", Origin.MEASURED, "999 of 1,000 calls took at most this", word="p99.9"),
    Statistic("min_us", "min µs", "µs", Origin.MEASURED, "the shortest call", word="min", derived_in_window=True),
    Statistic("max_us", "max µs", "µs", Origin.MEASURED, "the longest call", word="max", derived_in_window=True),
    Statistic("cv", "CV", "ratio", Origin.MEASUREMENTS, "standard deviation of the calls over their mean"),
    Statistic("elements", "elements", "count", Origin.MEASURED,
              "what the caller counted; of a node, in the mean call", _BRICK_AND_NODE),
    Statistic("uncounted", "uncounted", "count", Origin.MEASURED, "calls that gave no count of elements"),
    Statistic("flops", "flops", "FLOP", Origin.SHAPES, "the work of all calls, of their shapes"),
    Statistic("bytes", "bytes", "B", Origin.SHAPES, "bytes that all calls moved, of their shapes"),
    Statistic("gb_per_sec", "GB/s", "GB/s", Origin.MEASUREMENTS, "bytes of its shapes over measured time"),
    Statistic("gflops", "GFLOP/s", "GFLOP/s", Origin.MEASUREMENTS, "flops of its shapes over measured time"),
    Statistic("intensity", "FLOP/B", "FLOP/B", Origin.SHAPES, "arithmetic intensity: flops for each byte moved",
              report_title="FLOP/byte", word="intensity"),
    Statistic("attainable_gflops", "roof", "GFLOP/s", Origin.MEASUREMENTS, "what the roof allows at this intensity"),
    Statistic("percent_of_roof", "% roof", "%", Origin.MEASUREMENTS,
              "of what the roof allows at this intensity; ⚠ above it: look at the flops, the bytes or the caches",
              report_title="% of roof", word="of the roof"),
    Statistic("bound", "bound", "word", Origin.MEASUREMENTS, "which ceiling limits it", word="bound by"),
    Statistic("above_roof", "above", "yes or no", Origin.MEASUREMENTS, "faster than its roof allows"),
    Statistic("budget_us_per_token", "set", "µs/token", Origin.DECLARED, "the µs/token set for it",
              report_title="budget", word="µs/token"),
    Statistic("budget_gb_per_sec", "GB/s set", "GB/s", Origin.DECLARED, "the GB/s set, of which µs/token follow",
              word="GB/s"),
    Statistic("budget_used_percent", "budget", "%", Origin.MEASUREMENTS, "µs/token used of the budget set for it",
              report_title="used %", word="used"),
    Statistic("budget_met", "met", "yes or no", Origin.MEASUREMENTS, "whether it keeps within its budget"),
    Statistic("checks_passed", "passed", "count", Origin.MEASURED, "checks against the reference that passed"),
    Statistic("checks_failed", "checks", "count", Origin.MEASURED, "✓ checks against the reference passed, ✗ failed"),
    Statistic("on_critical_path", "path", "yes or no", Origin.MEASUREMENTS,
              "whether it lies on the critical path: the chain of work that decides how long all of it takes",
              (Of.NODE,)),
    Statistic("slack_us", "slack µs", "µs", Origin.MEASUREMENTS,
              "how much later it could have started without anything ending later", (Of.NODE,)),
)
# fmt: on

_BY_KEY = {(of, statistic.key): statistic for statistic in STATISTICS for of in statistic.of}


def statistic(key: str, of: Of = Of.BRICK) -> Statistic:
    """The row of the table. Raises KeyError where there is none."""
    return _BY_KEY[of, key]


def statistics_of(of: Of) -> tuple[Statistic, ...]:
    """All that is known of a brick, of a category or of a node, in the table's order."""
    return tuple(row for row in STATISTICS if of in row.of)


def keys_of(origin: Origin) -> list[str]:
    """The keys of that origin, in the table's order, each once."""
    return list(dict.fromkeys(row.key for row in STATISTICS if row.origin is origin))


# --- where they are shown, in the order a reader sees them --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A column on the screen: its least width, and its priority (the lowest stays longest where there is no room)."""

    statistic: Statistic
    width: int
    priority: int


def _places(of: Of, *columns: tuple[str, int, int]) -> tuple[Place, ...]:
    return tuple(Place(statistic(key, of), width, priority) for key, width, priority in columns)


def _rows(*keys: str, of: Of = Of.BRICK) -> tuple[Statistic, ...]:
    return tuple(statistic(key, of) for key in keys)


BRICK_COLUMNS = _places(
    Of.BRICK,
    ("percent", 7, 1),
    ("us_per_token", 8, 2),
    ("avg_inclusive_us", 12, 7),
    ("p50_us", 8, 4),
    ("p95_us", 8, 9),
    ("p99_us", 8, 5),
    ("count", 9, 11),
    ("gb_per_sec", 6, 6),
    ("gflops", 8, 10),
)
BUDGET_COLUMNS = _places(Of.BRICK, ("budget_used_percent", 7, 6))  # where a brick has a budget
CHECK_COLUMNS = _places(Of.BRICK, ("checks_failed", 7, 6))  # where a brick was checked
POINT_COLUMNS = _places(
    Of.BRICK,
    ("intensity", 7, 3),
    ("gflops", 8, 4),
    ("gb_per_sec", 6, 2),
    ("percent_of_roof", 8, 1),
    ("bound", 7, 5),
    ("percent", 7, 6),
)
CATEGORY_COLUMNS = _places(
    Of.CATEGORY, ("percent", 7, 1), ("exclusive_us_per_token", 11, 2), ("avg_exclusive_us", 11, 4), ("count", 10, 5)
)
NODE_COLUMNS = _places(Of.NODE, ("avg_inclusive_us", 11, 1), ("p50_us", 8, 4), ("p99_us", 8, 3), ("count", 8, 6))
NODE_SHARE_COLUMNS = _places(Of.NODE, ("percent", 8, 2))  # beside the bar
PATH_COLUMNS = _places(Of.NODE, ("slack_us", 8, 2))  # where anything lies beside the critical path

BRICK_PANEL = {
    "time": _rows(
        "total_exclusive_us", "total_inclusive_us", "percent", "us_per_token", "count", "failed", "avg_exclusive_us",
        "avg_inclusive_us", "p50_us", "min_us", "p95_us", "max_us", "p99_us",
    ),
    "work": _rows(
        "flops", "gflops", "bytes", "gb_per_sec", "intensity", "percent_of_roof", "elements", "bound",
    ),
    "budget": _rows("budget_us_per_token", "budget_used_percent"),
}  # fmt: skip

# Tables of the text report, each for 80 columns: where the time goes, how long a call takes and what it was for, how
# near that is to the roof.
OWN_REPORT = _rows("count", "total_exclusive_us", "avg_exclusive_us", "percent")
CALL_REPORT = _rows("count", "total_inclusive_us", "avg_inclusive_us", "p50_us", "p95_us", "p99_us")
WORK_REPORT = _rows("us_per_token", "budget_us_per_token", "budget_used_percent", "budget_met",
                      "gb_per_sec", "gflops", "checks_failed")  # fmt: skip
ROOF_REPORT = _rows("intensity", "percent_of_roof", "bound")
POINT_REPORT = _rows("bound", "intensity", "gflops", "gb_per_sec", "percent_of_roof")
CATEGORY_REPORT = _rows(
    "count", "total_exclusive_us", "avg_exclusive_us", "percent", "exclusive_us_per_token", of=Of.CATEGORY
)
