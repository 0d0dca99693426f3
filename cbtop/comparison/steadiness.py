"""Judge the drift inside a run and its long calls for the default gate. Neither changes a median."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median

from cbtop.comparison.drift import LEAST_PERCENT, Drift
from cbtop.comparison.judged import Judged, Outcome, about_place, ratio_text
from cbtop.comparison.part_diff import PartDiff, findable_percent
from cbtop.comparison.tails import Tail, tails_of
from cbtop.units import duration

# A larger drift in percent does not pass, even if chance may explain it.
FAR_PERCENT = 25.0
MAX_BLIND_PERCENT = 100.0  # The result is unsure if only changes above this percentage can be detected.


def steadiness(part: PartDiff) -> list[tuple[Judged, int]]:
    """Judge whether a run drifts, and whether it has longer calls than the baseline.

    A figure that one side lacks is not judged. Each result comes with its number of base runs.
    """
    found = []
    if part.drift is not None:
        found.append((_drifts_no_more(part, part.drift), part.drift.base_runs))
    if tails := tails_of(part):
        found += _tails_are_no_longer(part, tails)
    return found


def drift_text(part: PartDiff, drift: Drift) -> str:
    """Return a text about the drift inside a run, such as `the last third of decode steps takes 1.30 times the first
    third; in the baseline 1.00–1.02`.
    """
    least, most = (f"{pick(drift.base_ratios):.2f}" for pick in (min, max))
    before = least if least == most else f"{least}–{most}"
    times = f"{drift.change.now:.2f} ± {drift.change.half:.2f} times the first third"
    return f"the last third of {part.phase} steps takes {times}; in the baseline {before}"


def tail_text(tail: Tail) -> str:
    """Return a text about a long call, such as `p99 3.30 ms → 33.0 ms, 10.000× ± 0.500; its median call 1.000×`."""
    change = tail.change
    sides = f"p99 {duration(change.before)} → {duration(change.now)}, {ratio_text(change)}"
    return f"{sides}, while its median call takes {tail.median_ratio:.3f}×"


def _drifts_no_more(part: PartDiff, drift: Drift) -> Judged:
    rule, said = f"{part.phase}: no more drift beyond noise", drift_text(part, drift)
    if drift.is_slower:
        return Judged(rule, part.name, Outcome.BROKEN, said, "drift inside the run")
    if drift.percent > FAR_PERCENT:
        return Judged(
            rule, part.name, Outcome.UNKNOWN, f"{said}; the interval is too wide to tell whether this is chance"
        )
    findable = findable_percent(drift.change)
    is_unsure = drift.percent > LEAST_PERCENT or (drift.percent > 0 and drift.change.delta > drift.change.half)
    is_blind = findable is None or findable > MAX_BLIND_PERCENT
    return Judged(rule, part.name, Outcome.UNSURE if is_unsure or is_blind else Outcome.HOLDS, said)


def _tails_are_no_longer(part: PartDiff, tails: Sequence[Tail]) -> list[tuple[Judged, int]]:
    rule = f"{part.phase}: no longer p99 beyond noise"
    if longer := [tail for tail in tails if tail.is_longer]:
        return [(_longer(rule, part, tail), tail.base_runs) for tail in longer]
    said, outcome = f"none of {len(tails)} is", Outcome.HOLDS
    if median(findable_percent(tail.change) or inf for tail in tails) > MAX_BLIND_PERCENT:
        said, outcome = f"{said}; but in most not even one twice as long would have been found", Outcome.UNSURE
    return [(Judged(rule, part.name, outcome, said), tails[0].base_runs)]


def _longer(rule: str, part: PartDiff, tail: Tail) -> Judged:
    place = tail.place
    brick = place.brick[0] if place.brick else ""
    return Judged(rule, about_place(part, place), Outcome.BROKEN, tail_text(tail), place.name, brick=brick)
