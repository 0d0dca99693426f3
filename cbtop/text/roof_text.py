"""Write roofs (speed limits of the hardware), and the distance of bricks from them."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.profiler.analysis.roofline import NO_ROOF, SHARED
from cbtop.protocol.messages import BUSY_PERCENT
from cbtop.protocol.vocabulary import LAUNCH_BOUND
from cbtop.units import NOT_MEASURED, counted, number, percent, whole, with_unit
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.roofline import CeilingRow


def limit(row: BrickRow) -> str:
    """Format what limits a brick, and the percentage of this limit that it reaches: `memory 79 %`.

    If the roof is uncertain: `latency ~12 %`.
    The bound of a brick is `launch` if the device waited for the host.
    """
    if row.roof is None:
        return "launch" if row.name.endswith(f", {LAUNCH_BOUND}") else NOT_MEASURED
    word = {NO_ROOF: "latency", SHARED: "shared"}.get(row.roof.bound, row.roof.bound)
    warning, about = "⚠ " if row.above_roof else "", "~" if row.roof_unsure and not row.above_roof else ""
    return f"{warning}{word} {about}{whole(row.percent_of_roof)} %"


def has_limits(rows: Sequence[BrickRow]) -> bool:
    """Return whether the limit of any brick is known."""
    return any(limit(row) != NOT_MEASURED for row in rows)


def ceiling_rounds(row: CeilingRow) -> str:
    """Format how a roof was measured: `best of 12 rounds, median 19.00, …, load 3 %`. A short measurement is marked
    as `short`.
    """
    of = "" if row.rounds is None else f"best of {counted(row.rounds, 'round')}, "
    unsure = ": unsure" if row.is_unsure else ""
    load = with_unit(whole(row.load_percent), "%")
    spread = f"spread {percent(row.spread_percent)}{unsure}"
    short = ", short" if row.is_short else ""
    return f"{of}median {number(row.median)}, lowest {number(row.lowest)}, {spread}, load {load}{short}"


def ceiling_doubts(ceilings: Sequence[CeilingRow]) -> list[str]:
    """Return reasons why roofs may be wrong: the rounds differ much, or other programs used the machine."""
    found = []
    if unsure := [row for row in ceilings if row.is_unsure]:
        named = ", ".join(f"{row.name} (spread {percent(row.spread_percent)})" for row in unsure)
        found.append(f"unsure: {named}")
    if busy := [row for row in ceilings if (row.load_percent or 0) >= BUSY_PERCENT]:
        most = max(row.load_percent or 0 for row in busy)
        found.append(f"may be low: others used up to {whole(most)} % of the machine meanwhile")
    return found


def without_work(names: Sequence[str]) -> str:
    """Return the bricks without a point on the roofline, grouped by reason.

    There are two such reasons: no work was declared, or the device waited for the host.
    """
    waited = f", {LAUNCH_BOUND}"
    silent = [name for name in names if not name.endswith(waited)]
    bound = [name.removesuffix(waited) for name in names if name.endswith(waited)]
    whys = (("no FLOP or no bytes declared", silent), (f"{LAUNCH_BOUND}, so without a rate", bound))
    return "; ".join(f"{why}: {', '.join(those)}" for why, those in whys if those)
