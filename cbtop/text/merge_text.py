"""Write the names of ranks, and of the processes that are merged into one view."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.units import NONE_THERE, duration, percent, with_article
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView
from cbtop.viewmodels.sources import SourceRow
from cbtop.viewmodels.straggler import StragglerView


def rank(number: int | None, of: int | None) -> str:
    """Format a rank: `rank 3 of 8`. Return "" for a process without a rank."""
    if number is None:
        return ""
    return f"rank {number}" if of is None else f"rank {number} of {of}"


def placed_rank(row: SourceRow) -> str:
    """Format a rank for a table column: `3/8`, or `3/?` if the number of ranks is unknown. Without a rank, return a
    dash.
    """
    return NONE_THERE if row.rank is None else f"{row.rank}/{'?' if row.world_size is None else row.world_size}"


def straggler(found: StragglerView) -> str:
    """Format a straggler (slowest rank), the most important fact first: `rank 3 is 15.0 % slower, most of
    it in …`.
    """
    others = "the other's is" if found.ranks == 2 else f"the median of the other {found.ranks - 1} is"
    return (
        f"rank {found.rank} is {percent(found.percent)} slower, most of it in {found.brick} "
        f"(+{duration(found.brick_excess_us)}): busy {duration(found.busy_us)} "
        f"{with_article(f'{found.phase} step')}, "
        f"{others} {duration(found.others_us)} (pid {found.pid} on {found.host})"
        f"{'' if found.others_wait else '; in their steps the others do not wait for it'}"
    )


def merged(found: MergedView) -> str:
    """Format the name of a merge with its processes: `sum of 4: rank 0–2, rank 7`."""
    what = {MergeMode.SUM: "sum", MergeMode.MAX: "slowest", MergeMode.RANKS: "side by side"}[found.mode]
    names = _spans(found.members)
    if len(names) > 4:
        names = [*names[:3], "…", names[-1]]
    left_out = f" ({found.left_out} left out)" if found.left_out else ""
    return f"{what} of {len(found.members)}: {', '.join(names)}{left_out}"


def _spans(names: Sequence[str]) -> list[str]:
    """Replace the names of consecutive ranks, such as `rank 0`, `rank 1` and `rank 2`, by `rank 0–2`. Keep other
    names.
    """
    # consecutive ranks: (name of the first rank, its number, number of the last rank)
    found: list[tuple[str, int, int]] = []
    for name in names:
        kind, _, number = name.partition(" ")
        at = int(number) if kind == "rank" else -2
        if found and at >= 0 and found[-1][2] == at - 1:
            found[-1] = (*found[-1][:2], at)
        else:
            found.append((name, at, at))
    return [name if first == last else f"{name}–{last}" for name, first, last in found]


_MERGED_MEANS = {
    MergeMode.SUM: "counts, times, tokens and tokens/s are added up; the rest is of the time added up",
    MergeMode.MAX: "each brick is that of the rank it takes longest a step, its share one of that rank's own steps",
    MergeMode.RANKS: "of each brick its exclusive time in every rank; everything else is the sum of all",
}


def merged_means(merged: MergedView) -> str:
    """Return a text that explains how the figures of merged processes were computed."""
    means = _MERGED_MEANS[merged.mode]
    # In this mode, all steps are of one rank, so the figures of tokens need no explanation.
    if merged.mode is MergeMode.MAX:
        return means
    if merged.together > 1:
        return f"tokens/s counts once what {merged.together} ranks compute together; {means}"
    return (
        f"tokens/s is a sum, even where ranks compute the same tokens; {means}" if merged.may_share_tokens else means
    )
