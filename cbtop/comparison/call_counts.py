"""The derived number of calls of a place in a step, and its change between two runs."""

# Rules
# - A place that every block calls equally often has no noise: any other number is a change of the program.
# - Otherwise chance decides how often a step calls. Blocks of steps show by how much. Most places together show
#   whether blocks are alike their neighbours, unless one place alone is called in bursts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose, sqrt

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import CONFIDENCE, LEAST_PERCENT, Figure, change, figures, telling_blocks
from cbtop.units import number

_SAME = 1e-9  # relative difference of two numbers that only differ by rounding
_LONG_BLOCKS = 15
_BURSTS = 2.25  # chance alone makes the variance between long blocks larger by less than this factor
_USUAL_OVER_MEDIAN = 1.4826  # of the absolute value of a normal variable: its standard deviation over its median


@dataclass(frozen=True, slots=True)
class CallsChange:
    """The change of the number of calls per step. Chance moves it by at most `half`.

    `is_exact`: in both runs, every block of steps calls equally often. `is_new`: only the new run calls the place, so
    often that it is not chance.
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
        """For example `1.30× ± 0.08 as many calls a step`, or "" if the change does not exceed noise."""
        if not self.is_beyond_noise:
            return ""
        if self.is_exact or not self.before:
            return f"{_whole(self.now)} calls a step instead of {_whole(self.before)}"
        return f"{self.now / self.before:.3f}× ± {self.half / self.before:.3f} as many calls a step"


def call_figures(calls: NDArray[np.float64], steps: NDArray[np.float64]) -> list[Figure]:
    """Return the calls per step of each column of `calls`, shape (blocks, columns). Block i has `steps[i]` steps.

    The error of a place with equally many calls in every block is 0.
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
    """Return whether each column scatters more between long blocks than independent short blocks would."""
    length = max(1, len(off) // _LONG_BLOCKS)
    longer = off[: len(off) // length * length].reshape(-1, length, off.shape[1]).sum(axis=1)
    found: NDArray[np.bool_] = (longer**2).mean(axis=0) > _BURSTS * length * (off**2).mean(axis=0)
    return found


def _whole(calls: float) -> str:
    return number(calls) if calls % 1 else f"{calls:,.0f}"


def calls_change(before: Figure | None, now: Figure | None, compared: int) -> CallsChange:
    """Return the change of the calls per step. None is a place that a run does not call.

    In total, `compared` figures are compared together.
    """
    known = before or now
    assert known is not None
    before, now = before or _none(known), now or _none(known)
    is_exact = not any((before.error, before.scatter, now.error, now.scatter))
    return CallsChange(before.mean, now.mean, change(before, now, compared).half, is_exact)


def new_calls(now: Figure, compared: int, steps: tuple[int, int]) -> CallsChange:
    """Return the change of a place that only the new run calls. `steps` are the steps of the baseline and of now.

    If chance decided which steps call it, each independent group of calls would fall into either run in proportion to
    its steps.
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
    """Return the mean of each row with its scatter between runs. A row has the calls of one place in several runs.

    Runs may scatter more than their blocks show, for example by other input. No row is assumed to exceed its blocks
    by less than the median row.
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
    """Return how many figures two runs compare together: a call of each place, and its calls a step if they vary."""
    return sum(
        1 + any(one and (one.error or one.scatter) for one in both) for both in zip(befores, nows, strict=True)
    )
