"""Report steps of the new run that no threshold and no rule judges, if they take much of its time."""

from __future__ import annotations

from collections.abc import Iterable

from cbtop.comparison.batches import batch_text, key_of
from cbtop.comparison.judged import BLIND_PERCENT, Judged, Outcome
from cbtop.comparison.run_diff import RunDiff, lacking_text
from cbtop.comparison.short_steps import ShortSteps, short_steps
from cbtop.comparison.threshold_grammar import RATES, Threshold
from cbtop.units import percent

_Left = tuple[str, str, float]  # steps that are not judged: (phase, reason, time in µs)


def left_out_of_gate(found: RunDiff) -> list[Judged]:
    """Return results about groups of steps in the new run that the default gate does not compare."""
    judged = _judged(found, [*_not_in_baseline(found), *_short(found, found.alone_short)])
    return [Judged(f"{phase}: is compared", phase, Outcome.UNKNOWN, text) for phase, text in judged]


def left_out_of_threshold(threshold: Threshold, phase: str, found: RunDiff) -> list[Judged]:
    """Return results about groups of steps in the new run that `threshold` should judge and does not.

    `phase` is the threshold's phase, or "" for all. [] for a threshold on one batch.
    """
    if threshold.batch is not None:
        return []
    left: list[_Left] = []
    if threshold.is_relative:
        left += _not_in_baseline(found)
    # A rate is over all steps of its phase. Any other threshold leaves out batches with too few steps.
    if threshold.names[-1] not in RATES:
        left += _short(found, found.alone_short if threshold.is_relative else short_steps(found.now, phase or None))
    judged = _judged(found, [one for one in left if phase in ("", one[0])])
    return [Judged(threshold.text, about, Outcome.UNKNOWN, text, where=threshold.where) for about, text in judged]


def _not_in_baseline(found: RunDiff) -> list[_Left]:
    words = ("the new run", "the baseline")
    return [
        (
            part.phase,
            found.why_apart.get(key_of(part.now)) or lacking_text(part.now, found.base, *words),
            part.now.time_us,
        )
        for part in found.alone
    ]


def _short(found: RunDiff, short: Iterable[ShortSteps]) -> list[_Left]:
    left = []
    for one in short:
        batches = [batch_text(part.now) for part in found.parts + found.alone if part.phase == one.phase]
        named = next((batch for batch in batches if batch.isdecimal()), "")
        other = next((part.phase for part in found.parts if part.phase != one.phase), "")
        way = f", or judge one batch, as {one.phase}[batch={named}]" if named else ""
        way = way or (f", or judge one phase, as {other}" if other and not batches else "")
        left.append((one.phase, f"too few {one.phase} steps: {one.text}; use longer runs{way}", one.time_us))
    return left


def _judged(found: RunDiff, left: list[_Left]) -> list[tuple[str, str]]:
    """Return (phase, reason) for each group of steps that is not judged. [] if together they take little of the run's
    time.
    """
    whole_us = found.now.time_us
    share = 100 * sum(us for _, _, us in left) / whole_us if whole_us else 0.0
    if share <= BLIND_PERCENT:
        return []
    said = f"not judged: {percent(share)} of the new run's time"
    return [(phase, f"{said}: {text}") for phase, text, us in left if us]
