"""Compare measured shares of bricks and verdicts with the expected ones, and write the table.

This module works on plain data and starts no processes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.base import Ratio
from benchmarks.real.names import (
    ATTENTION_REST,
    BETWEEN_MODULES,
    FEED_FORWARD_REST,
    INSIDE,
    NO_FORWARD,
    OF_TRAINING,
)

MAX_RATIO = 1.03  # the default limit of `cbtop run --overhead`
MAX_POINTS = 3.0
LEAST_SHARE = 3.0  # percent of the time; bricks with smaller shares are not compared
OTHER_KERNELS = ("Other kernels", "Other")  # on a GPU: names for kernels that no brick launched
# Bricks of the category Other that are no module's own operations
NOT_OWN = frozenset({OTHER_KERNELS[0], "LmHead", "Linear", "Embedding"})
Times = dict[tuple[str, str], float]  # microseconds by (brick, category)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a brick or category in the time of all bricks, in percent, as measured by cbtop and by the oracle.

    The oracle times the same program without cbtop.
    """

    name: str
    ours: float
    oracle: float  # the share by the oracle, as the mean of its two runs
    spread: float  # difference between the two runs of the oracle, in percentage points

    @property
    def difference(self) -> float:
        """How far the share by cbtop is above the share by the oracle, in percentage points."""
        return self.ours - self.oracle


@dataclass(frozen=True, slots=True)
class Comparison:
    """The shares of the categories, and of those bricks that have a share of 3 % or more. The largest share comes
    first.
    """

    phase: str  # name of the compared phase in cbtop
    kind: str  # kind of the compared calls of the root module in the oracle
    categories: Sequence[Share]
    bricks: Sequence[Share]


@dataclass(frozen=True, slots=True)
class Overhead:
    """The time of a bare step (ms), and the ratios of the time with cbtop to the bare time.

    Each ratio is the median of the pairs of processes, with the lowest and the highest pair as its bounds.
    """

    bare_ms: float
    ratio: Ratio
    control: Ratio  # Time of a bare turn, divided by the time of the bare turn before it. This is the noise.
    processor: Ratio  # processor time with cbtop, divided by the processor time without


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a program. If a part could not be measured, its value is a sentence with the reason."""

    name: str
    overhead: Overhead | str
    compared: Comparison | str
    verdicts: Collection[str] | str
    expected: Collection[str]


def comparison(snapshot: Mapping[str, Any], kinds: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare a phase in cbtop's JSON with the same kind of root call in both runs of the oracle."""
    ours: Times = defaultdict(float)
    named = {row["name"] for kind in kinds for row in kind["bricks"]}
    for row in snapshot["bricks"]:
        if row["name"].endswith(NO_FORWARD) or row["name"] in BETWEEN_MODULES | OF_TRAINING:
            continue
        if row["category"] == OTHER_KERNELS[1] and INSIDE.get(row["name"], row["name"]) not in named | NOT_OWN:
            # A module's own operations, which the oracle has between bricks. On a CPU small ones are no rows.
            if "cuda" in row.get("backend", ""):
                ours[OTHER_KERNELS] += row["total_exclusive_us"]
        else:
            ours[INSIDE.get(row["name"], row["name"]), row["category"]] += row["total_exclusive_us"]
    timed = {name for name, _ in ours}
    oracles = []
    for kind in kinds:
        oracle: Times = defaultdict(float)
        for row in kind["bricks"]:
            if row["name"] in timed or row["name"] not in (ATTENTION_REST, FEED_FORWARD_REST):
                oracle[row["name"], row["category"]] += row["us"]
        if OTHER_KERNELS in ours:
            oracle[OTHER_KERNELS] += kind["between_us"]
        oracles.append(oracle)
    categories, bricks = _shares(ours, oracles, 1), _shares(ours, oracles, 0)
    large = [share for share in bricks if max(share.ours, share.oracle) >= LEAST_SHARE]
    return Comparison(snapshot["phase"], kinds[0]["kind"], categories, large)


def _shares(ours: Times, oracles: Sequence[Times], part: int) -> list[Share]:
    mine, *others = (_percents(times, part) for times in (ours, *oracles))
    found = []
    for name in dict.fromkeys(name for side in (mine, *others) for name in side):
        values = [side.get(name, 0.0) for side in others]
        found.append(Share(name, mine.get(name, 0.0), statistics.mean(values), max(values) - min(values)))
    return sorted(found, key=lambda share: -share.oracle)


def _percents(times: Times, part: int) -> dict[str, float]:
    total = sum(times.values())
    found: dict[str, float] = defaultdict(float)
    for key, us in times.items():
        found[key[part]] += 100 * us / total
    return found


def worst(of: Sequence[Share]) -> Share:
    return max(of, key=lambda share: abs(share.difference))


HEADER = (
    f"{'program':18}{'bare ms':>8}  {'with cbtop':24}{'bare again':24}{'processor time':24}"
    f"{'worst category':18}{'worst brick':26}verdicts"
)


def line(row: Row) -> str:
    """Return the line of a program in the table. The sign `!` marks figures beyond a limit."""
    if isinstance(row.overhead, str):
        cost = f"{'n/a':>8}  {'n/a':24}{'n/a':24}{'n/a':24}"
    else:
        mark = "!" if row.overhead.ratio.median > MAX_RATIO else ""
        cost = f"{row.overhead.bare_ms:8.2f}  {_ratio(row.overhead.ratio) + mark:24}"
        cost += "".join(f"{_ratio(one):24}" for one in (row.overhead.control, row.overhead.processor))
    if isinstance(row.compared, str):
        columns = f"{'n/a':18}{'n/a':26}"
    else:
        columns = f"{_worst(row.compared.categories):18}{_worst(row.compared.bricks):26}"
    return f"{row.name:18}{cost}{columns}{_verdicts(row)}".rstrip()


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _worst(of: Sequence[Share]) -> str:
    share = worst(of)
    return f"{share.name} {share.difference:+.1f}{'!' if abs(share.difference) > MAX_POINTS else ''}"


def _verdicts(row: Row) -> str:
    if isinstance(row.verdicts, str):
        return "n/a"
    found = ", ".join(sorted(row.verdicts)) or "none"
    if set(row.verdicts) == set(row.expected):
        return f"{found}, as expected"
    return f"{found}! expected: {', '.join(sorted(row.expected)) or 'none'}"


def details(row: Row) -> list[str]:
    """Return lines with each brick's share by cbtop and by the oracle, and the reason for each missing part."""
    missing = [part for part in (row.overhead, row.compared, row.verdicts) if isinstance(part, str)]
    lines = [f"  {part}" for part in dict.fromkeys(missing)]
    if not isinstance(row.compared, str):
        lines.append(f"  steps: {row.compared.phase}; the oracle's: {row.compared.kind}")
        for title, of in _sides(row.compared):
            lines.append(f"  {title:24}{'cbtop %':>9}{'oracle %':>10}{'points':>8}{'oracle again':>14}")
            lines += [
                f"  {one.name:24}{one.ours:9.1f}{one.oracle:10.1f}{one.difference:+8.1f}{one.spread:14.1f}"
                for one in of
            ]
    return lines


def _sides(compared: Comparison) -> tuple[tuple[str, Sequence[Share]], ...]:
    return ("category", compared.categories), ("brick", compared.bricks)


def beyond(row: Row) -> list[str]:
    """Return a sentence for each of the program's figures that is beyond its limit."""
    found = []
    if not isinstance(row.overhead, str) and row.overhead.ratio.median > MAX_RATIO:
        ratio = row.overhead.ratio
        sure = "" if ratio.low > MAX_RATIO else ", but not in each pair"
        processor = _ratio(row.overhead.processor)
        found.append(
            f"{row.name}: overhead {_ratio(ratio)}, at most {MAX_RATIO} expected{sure}; of processor time {processor}"
        )
    if not isinstance(row.compared, str):
        found += [
            f"{row.name}: {title} {one.name} is {one.ours:.1f} %, by the oracle {one.oracle:.1f} % "
            f"(its runs differ by {one.spread:.1f} points)"
            for title, of in _sides(row.compared)
            for one in of
            if abs(one.difference) > MAX_POINTS
        ]
    if not isinstance(row.verdicts, str) and set(row.verdicts) != set(row.expected):
        found.append(f"{row.name}: verdicts {_verdicts(row)}")
    return found
