"""How far chance may have moved a mean of steps, where steps are not independent; derived."""

# Steps that follow each other are alike: caches, clocks and neighbours change slowly. A spread of single steps would
# promise far more than is known. So what is looked at is how whole blocks of steps, of about a second, differ, and
# where blocks that follow each other are alike, too, they count as fewer. Ten blocks say little of how they scatter:
# figures that are looked at together say it for each other, and none of so few passes for steadier than half are.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import expm1, pi, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS = 5  # fewer tell nothing of how they scatter
ENOUGH_BLOCKS = 20  # tell by themselves how they scatter, where they are not alike
LEAST_PERCENT = 3.0  # a change: two runs on one machine differ by about that much without a cause
LEAST_LEARNED_PERCENT = 1.0  # where it is known by how much: what a median of a histogram may be off by
CONFIDENCE = 0.99  # that chance has moved none of the figures that are compared at the same time
MAX_ALIKE = 0.9  # correlation of neighbours: of blocks alike more than that one cannot tell how many they count as
_KINDS = 2  # bricks, and bricks in a layer, are each as likely to be called changed by how runs scatter
_LEAST_LONGER = 10  # blocks, where two are taken as one
_LEAST_WORTH = 2.0  # blocks that any number of them is worth


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean, its standard error, and of how many blocks.

    `slope`: how it grows with what it is `along`, where that was asked for, and the standard error of that.
    `scatter`: the standard deviation from run to run, where it was learned from so many `runs`.
    """

    mean: float
    error: float
    blocks: int
    median_us: float | None = None  # of one call; None where that is not known, or nothing is called
    slope: float = 0.0
    slope_error: float = 0.0
    scatter: float = 0.0
    runs: int = 1
    # The same without what moves all places alike, such as a clock that drifts; None where that is not told apart.
    own_error: float | None = None
    own_scatter: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """How a figure has changed; by chance alone not by more than `half` either way.

    `own`: how it has beside all others, as if these took as long as they did: what a clock does to all of them alike
    is no part of it. None where that is not told apart.
    """

    before: float
    now: float
    half: float
    medians_us: tuple[float, float] | None = None  # of one call, then and now
    least_percent: float = LEAST_PERCENT  # what two runs differ by without a cause
    error: float = 0.0  # its standard error, of which `half` is a multiple
    own: Change | None = None

    @property
    def delta(self) -> float:
        return self.now - self.before

    @property
    def percent(self) -> float | None:
        """Of what it was before; None where that was nothing."""
        return 100 * self.delta / self.before if self.before > 0 else None

    @property
    def half_percent(self) -> float | None:
        """`half`, as the percent are."""
        return 100 * self.half / self.before if self.before > 0 else None

    @property
    def noise_percent(self) -> float | None:
        """What is no change: what chance explains, or what two runs on one machine differ by."""
        return None if self.half_percent is None else max(self.half_percent, self.least_percent)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether it is more than noise, as it is or beside all others, and the median call has changed like it: what
        other programs on a processor do to a few calls is theirs, however often it hits the same place."""
        return (
            self.noise_percent is not None
            and (self._is_beyond_interval or self.is_beyond_others)
            and (self.medians_us is None or _is_like(self.delta, *self.medians_us, self.least_percent))
        )

    @property
    def is_told_by_others(self) -> bool:
        """Whether it is beyond noise beside all others alone."""
        return self.is_beyond_others and not self._is_beyond_interval

    @property
    def _is_beyond_interval(self) -> bool:
        return self.noise_percent is not None and abs(self.percent or 0.0) > self.noise_percent

    @property
    def is_beyond_others(self) -> bool:
        """Whether it is more than noise beside all others, and as it is no less than what is called a change: where
        most become faster, what stays as it was is no slower."""
        return (
            self.own is not None
            and self.own.is_beyond_noise
            and self.own.delta * self.delta > 0
            and abs(self.percent or 0.0) > self.least_percent
        )


def _is_like(delta: float, before_us: float, now_us: float, least_percent: float) -> bool:
    """Whether a median has moved by that or more to the side of `delta`."""
    moved = (now_us - before_us) if delta > 0 else (before_us - now_us)
    return moved >= least_percent / 100 * before_us


def figures(
    amount: NDArray[np.float64],
    weight: NDArray[np.float64],
    along: NDArray[np.float64] | None = None,
    pace: NDArray[np.float64] | None = None,
) -> list[Figure]:
    """Of each column of `amount` (a row a block) what it is for one of `weight`, over MIN_BLOCKS blocks or more.

    Where blocks lie `along` something that moves it, such as the positions cached, the mean is that at the mean of
    these, and what a straight line through the blocks explains is no noise. With the `pace`, how many times as long
    all places took in each block, it is known what the error is beside that, and the line is that beside it: caches
    grow while a clock drifts, and what the clock does is noise.

    The mean is the ratio of the sums, its error that of batch means, by the linearised ratio (W. G. Cochran,
    "Sampling Techniques", 1977, chapter 6). How alike neighbours are is the median of all columns, each less its bias
    (M. G. Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 41, 1954), and never below zero.
    """
    if not amount.shape[1]:
        return []
    beside = None if pace is None else figures(amount / pace[:, None], weight, along)
    mean = amount.sum(axis=0) / weight.sum()
    off = amount - np.outer(weight, mean)
    slope, fitted, of_slope = np.zeros_like(mean), 1, 0.0  # fitted: figures that were, to the blocks
    # Where all blocks lie at one place, what the mean of that is rounded by makes no line.
    if along is not None and np.ptp(along) > 0:
        along = along - np.average(along, weights=weight)
        spread = (weight * along**2).sum()
        slope, fitted = along @ amount / spread, 2
        # Blocks are off the line as they are off the mean.
        of_slope = weight.mean() * np.sqrt(len(weight) * (along**2).sum()) / spread
        if beside is not None:
            slope = np.array([one.slope for one in beside])
        off -= np.outer(weight * along, slope)
    error, blocks, worth = _errors(off, weight, fitted)
    known = mean > 0
    # What lasts longer than two blocks shows in longer ones alone: of all lengths the one counts that promises least.
    longer, its_weight = off, weight
    while len(its_weight) >= 2 * _LEAST_LONGER and known.any():
        longer, its_weight = _by_twos(longer), _by_twos(its_weight)
        found = _errors(longer, its_weight, fitted)
        if np.median(found[0][known] / mean[known]) > np.median(error[known] / mean[known]):
            error, blocks, worth = found
    if known.any() and worth < ENOUGH_BLOCKS:
        error[known] = np.maximum(error[known], np.median(error[known] / mean[known]) * mean[known])
    columns = (column.tolist() for column in (mean, error, slope, error * of_slope))
    each = [
        Figure(one, off_by, blocks + 1 - fitted, slope=grows, slope_error=by)
        for one, off_by, grows, by in zip(*columns, strict=True)
    ]
    if beside is None:
        return each
    pairs = zip(each, beside, strict=True)
    return [replace(one, slope_error=own.slope_error, own_error=own.error) for one, own in pairs]


def _errors(
    off: NDArray[np.float64], weight: NDArray[np.float64], fitted: int
) -> tuple[NDArray[np.float64], int, float]:
    """The standard error of each mean by what blocks are off it, of how many, and how many of blocks that are not
    alike they are worth."""
    blocks = len(weight)
    squares = (off**2).sum(axis=0)
    alike = np.divide((off[1:] * off[:-1]).sum(axis=0), squares, out=np.zeros_like(squares), where=squares > 0)
    usual = float(np.clip(np.median(alike + fitted * (1 + 4 * alike) / blocks), 0.0, MAX_ALIKE))
    worth = max(_LEAST_WORTH, blocks * (1 - usual) / (1 + usual))
    # Blocks that are alike scatter less about their own mean than about the true one.
    variance = squares / (blocks * max(1 - fitted / worth, 1 / _LEAST_WORTH))
    return np.sqrt(variance / worth) / weight.mean(), blocks, worth


def _by_twos(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of two blocks each; what is left over is added to the last."""
    even = len(blocks) // 2 * 2
    found: NDArray[np.float64] = blocks[0:even:2] + blocks[1:even:2]
    if even < len(blocks):
        found[-1] += blocks[-1]
    return found


def change(before: Figure, now: Figure, compared: int, shared: float | None = None) -> Change:
    """From `before` to `now`, one of so many figures that are `compared` at the same time; all of them together take
    `shared` times as long, where that is known.

    The interval is Welch's, shared out among them after Bonferroni. Where it was learned how runs scatter, a single
    run is no surer than that, and what moves all places of a run alike is known only as well as so few runs tell.
    """
    if shared is None or before.own_error is None or now.own_error is None:
        return _change(before, now, compared, 1)
    then = replace(before, error=before.own_error, scatter=before.own_scatter)
    beside = replace(now, mean=now.mean / shared, error=now.own_error / shared)
    found, own = _change(before, now, compared, 2), _change(then, beside, compared, 2)
    return replace(found, own=replace(own, medians_us=None)) if own.half < found.half else found


def _change(before: Figure, now: Figure, compared: int, looks: int) -> Change:
    """The same for a figure that is looked at so many times."""
    squares = before.error**2, max(now.error, before.scatter) ** 2
    variance = sum(squares)
    medians = None if before.median_us is None or now.median_us is None else (before.median_us, now.median_us)
    least = LEAST_LEARNED_PERCENT if before.runs > 1 else LEAST_PERCENT
    if variance == 0:
        return Change(before.mean, now.mean, 0.0, medians, least)
    freedom = variance**2 / (squares[0] ** 2 / (before.blocks - 1) + squares[1] ** 2 / (now.blocks - 1))
    # Rounded down, so that few quantiles are computed.
    errors = _student(int(freedom * 4) / 4, compared * looks)
    if before.runs > 1:
        errors = max(errors, _student(before.runs - 1, _KINDS * looks))
    error = sqrt(variance)
    return Change(before.mean, now.mean, error * errors, medians, least, error)


def learned(figures_of_runs: Sequence[Sequence[Figure]], paces: Sequence[float] | None = None) -> list[Figure]:
    """Of each row, a figure in each of several runs, their mean and how it scatters from run to run; no row passes
    for steadier than half of them are. `paces`: how many times as long as their mean all places take in each run."""
    means = np.array([[one.mean for one in row] for row in figures_of_runs])
    mean, scatter = means.mean(axis=1), _scatter(means)
    runs = means.shape[1]
    own_scatter = None if paces is None else _scatter(means / np.array(paces)).tolist()
    found = []
    for at, (row, one, by) in enumerate(zip(figures_of_runs, mean.tolist(), scatter.tolist(), strict=True)):
        medians = [figure.median_us for figure in row if figure.median_us is not None]
        own = [figure.own_error for figure in row if figure.own_error is not None]
        is_own_known = own_scatter is not None and len(own) == runs
        own_by = own_scatter[at] if own_scatter is not None else 0.0
        found.append(
            Figure(
                one,
                max(by / sqrt(runs), _error_of_mean([figure.error for figure in row])),
                sum(figure.blocks for figure in row),
                float(np.mean(medians)) if len(medians) == runs else None,
                slope=float(np.mean([figure.slope for figure in row])),
                slope_error=_error_of_mean([figure.slope_error for figure in row]),
                scatter=by,
                runs=runs,
                own_error=max(own_by / sqrt(runs), _error_of_mean(own)) if is_own_known else None,
                own_scatter=own_by,
            )
        )
    return found


def _scatter(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard deviation of each row from run to run."""
    mean, scatter = means.mean(axis=1), means.std(axis=1, ddof=1)
    known = mean > 0
    if known.any():
        scatter[known] = np.maximum(scatter[known], np.median(scatter[known] / mean[known]) * mean[known])
    found: NDArray[np.float64] = scatter
    return found


def _error_of_mean(errors: Sequence[float]) -> float:
    return sqrt(sum(error**2 for error in errors)) / len(errors)


@lru_cache(maxsize=4096)
def _student(freedom: float, compared: int) -> float:
    """How many standard errors a mean is off at most, either way (G. W. Hill, "Algorithm 396: Student's
    t-quantiles", Communications of the ACM 13, 1970), but for what it says of fewer than five degrees of freedom at a
    confidence below ours."""
    p, n = (1 - CONFIDENCE) / compared, freedom
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20_700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * sqrt(a * pi / 2) * n
    x = d * p
    y = x ** (2 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(p / 2)
        y = x * x
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = expm1(a * y * y)
    else:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
    return sqrt(n * y)
