"""Count how often a step calls a brick or layer, and compare this between two runs.

A place is a brick, a layer, or a brick in a layer. All numbers are derived from records.
"""

# Rules
# - If all blocks of steps call a place equally often, the number has no noise. If it differs in the other run, the
#   program has changed.
# - Otherwise it varies by chance, and the variation between blocks shows how much.
# - Neighbouring blocks may be similar. They then count as fewer blocks. This is judged over most places together, but
#   for a place that is called only in some periods by itself.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose, sqrt

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import CONFIDENCE, LEAST_PERCENT, Figure, change, figures, telling_blocks
from cbtop.units import number

_SAME = 1e-9  # Smaller relative differences between numbers of calls are rounding errors.
_LONG_BLOCKS = 15
# By chance alone, the variance of long blocks stays below this multiple of the variance of short blocks.
_BURSTS = 2.25
# Standard deviation of a normal variable, divided by the median of its absolute value.
_USUAL_OVER_MEDIAN = 1.4826


@dataclass(frozen=True, slots=True)
class CallsChange:
    """The change of the calls per step. Chance alone changes them by at most `half`.

    `is_exact`: in both runs, all blocks have equally many calls per step. `is_new`: only the new run has calls, and
    not by chance.
    """

    before: float
    now: float
    half: float
    is_exact: bool = False
    is_new: bool = False

    @property
    def ratio(self) -> float | None:
        return self.now / self.before if self.before > 0 else None

    @property
    def ratio_half(self) -> float | None:
        return self.half / self.before if self.before > 0 else None

    @property
    def is_beyond_noise(self) -> bool:
        moved = abs(self.now - self.before)
        if self.is_new:
            return True
        if self.is_exact:
            return not isclose(self.now, self.before, rel_tol=_SAME)
        return moved > self.half and moved > LEAST_PERCENT / 100 * max(self.before, self.now)

    @property
    def text(self) -> str:
        """The change as text, such as `1.30× ± 0.08 as many calls a step`. "" within noise."""
        if not self.is_beyond_noise:
            return ""
        if self.is_exact or not self.before:
            return f"{_whole(self.now)} calls a step instead of {_whole(self.before)}"
        return f"{self.now / self.before:.3f}× ± {self.half / self.before:.3f} as many calls a step"


def call_figures(calls: NDArray[np.float64], steps: NDArray[np.float64]) -> list[Figure]:
    """Return the calls per step of each column (brick or layer) of `calls`, (blocks, columns).

    Block i has `steps[i]` steps. The error is 0 if all blocks have equally many calls per step.
    """
    mean = calls.sum(axis=0) / steps.sum()
    varies = np.ptp(calls / steps[:, None], axis=0) > _SAME * mean
    found = [Figure(one, 0.0, len(steps)) for one in mean.tolist()]
    off = calls - np.outer(steps, mean)
    blocks, comes_in_bursts = telling_blocks(off).tolist(), _bursts(off)
    places = np.flatnonzero(varies).tolist()
    for at, one in zip(places, figures(calls[:, places], steps), strict=True):
        kept = one
        if comes_in_bursts[at]:
            (alone,) = figures(calls[:, [at]], steps)
            kept = alone if alone.error > one.error else one
        found[at] = replace(kept, blocks=min(kept.blocks, blocks[at]))
    return found


def _bursts(off: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each column's (brick's or layer's) calls come in bursts: long blocks vary more than independent
    short ones explain.
    """
    length = max(1, len(off) // _LONG_BLOCKS)
    longer = off[: len(off) // length * length].reshape(-1, length, off.shape[1]).sum(axis=1)
    found: NDArray[np.bool_] = (longer**2).mean(axis=0) > _BURSTS * length * (off**2).mean(axis=0)
    return found


def _whole(calls: float) -> str:
    return number(calls) if calls % 1 else f"{calls:,.0f}"


def calls_change(before: Figure | None, now: Figure | None, compared: int) -> CallsChange:
    """Return the change of the calls per step of a brick or layer.

    `before` or `now` is None if the run does not call it. `compared` is how many figures are tested together.
    """
    known = before or now
    assert known is not None
    before, now = before or _none(known), now or _none(known)
    is_exact = not any((before.error, before.scatter, now.error, now.scatter))
    return CallsChange(before.mean, now.mean, change(before, now, compared).half, is_exact)


def new_calls(now: Figure, compared: int, steps: tuple[int, int]) -> CallsChange:
    """Return the change for a brick or layer that only the new run calls.

    `steps` is (steps of the baseline, steps of the new run). A test decides whether the calls are new. If chance
    decided which steps make calls, an independent group of calls would be in the baseline with a probability in
    proportion to its steps.
    """
    found = calls_change(None, now, compared)
    if found.is_exact:
        return found
    groups = now.blocks if not now.error else min(now.blocks, (now.mean / now.error) ** 2)
    chance = (steps[1] / sum(steps)) ** groups
    is_new = chance < (1 - CONFIDENCE) / compared
    return replace(found, half=found.half if is_new else max(found.half, found.now), is_new=is_new)


def _none(known: Figure) -> Figure:
    return Figure(0.0, 0.0, known.blocks)


def learned_calls(rows: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return each row's mean number of calls, and how much it varies between runs. A row is one brick or layer in
    several runs.

    Runs may differ by more than their blocks do, for example because of other input. The median row shows by how
    much, and every row gets at least this ratio.
    """
    means = np.array([[one.mean for one in row] for row in rows])
    within = np.sqrt([np.mean([one.error**2 for one in row]) for row in rows])
    scatter = means.std(axis=1, ddof=1)
    varies = (scatter > _SAME * means.mean(axis=1)) | (within > 0)
    known = within > 0
    if known.any():
        beyond = _USUAL_OVER_MEDIAN * np.median(
            np.abs(means - means.mean(axis=1)[:, None])[known] / within[known, None]
        )
        scatter = np.maximum(scatter, max(1.0, beyond) * within)
    runs = means.shape[1]
    return [
        Figure(
            mean,
            by / sqrt(runs) if moves else 0.0,
            sum(one.blocks for one in row),
            scatter=by if moves else 0.0,
            runs=runs,
        )
        for row, mean, by, moves in zip(
            rows, means.mean(axis=1).tolist(), scatter.tolist(), varies.tolist(), strict=True
        )
    ]


def looks(befores: Sequence[Figure | None], nows: Sequence[Figure | None]) -> int:
    """Return how many figures of two runs are tested together, to keep false alarms rare.

    A brick or layer counts once for the time of a call, and once more if its calls per step vary.
    """
    return sum(
        1 + any(one and (one.error or one.scatter) for one in both) for both in zip(befores, nows, strict=True)
    )
