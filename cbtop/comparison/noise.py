"""Estimate how much chance affects a mean over steps, from blocks of steps, because consecutive steps depend on each
other.
"""

# Consecutive steps are similar, because caches, clocks and other programs change slowly. So errors from single steps
# would be too small, and come from blocks of about a second instead. If consecutive blocks are similar, too, they
# count as fewer blocks. A few blocks do not show their spread well. So each figure has at least the error of the
# median figure in the same analysis.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, expm1, inf, nan, pi, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]

MIN_LEARNED = 3  # The scatter between runs is learned from at least this many runs.
MIN_BLOCKS = 5  # The scatter between blocks of a run is learned from at least this many blocks.
# A call is at least this many times as long as the clock's resolution. So the clock's error is at most a fifth of it.
READINGS = 5.0
# A block above the median plus this many median absolute deviations is slow. By chance this happens once in 300.
WARM_UP_SPREADS = 4.0
ENOUGH_BLOCKS = 20  # This many uncorrelated blocks show their spread well enough.
LEAST_PERCENT = 3.0  # Two runs of the same program on one machine may differ by about this percentage.
# Used instead of LEAST_PERCENT if the scatter between runs is known. It is the error of a median from a histogram.
LEAST_LEARNED_PERCENT = 1.0
# Probability that all figures of a test are inside their intervals, if only chance changed them.
CONFIDENCE = 0.99
MAX_ALIKE = 0.9  # With a higher correlation of neighbouring blocks, the effective number of blocks is unknown.
# The scatter between runs is learned for two kinds of figures: bricks, and bricks in a layer.
_KINDS = 2
# Blocks are merged in pairs only if at least this many remain.
_LEAST_LONGER = 10
# Correlated blocks count as fewer independent ones, but never as fewer than this.
_LEAST_WORTH = 2.0
_LEAST_PACED = 2  # The scatter relative to the pace is learned from at least this many runs with a known pace.
_LEAST_RATIO = 3.0  # Two times are compared by their ratio only if one is at least this many times the other.
_MOST_EXPONENT = 700.0  # exp(x) is finite up to this value.


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean, its standard error, and its number of blocks.

    `slope` is its growth per unit of `along` (see `figures`). `scatter` is the standard deviation between `runs`
    runs.
    """

    mean: float
    error: float
    blocks: int
    # Median of one call in µs. None if unknown, or if the figure is not a time of calls.
    median_us: float | None = None
    slope: float = 0.0
    slope_error: float = 0.0
    scatter: float = 0.0
    runs: int = 1
    # Error of the mean, except for changes that all bricks share, such as a clock drift. None if these changes are
    # unknown.
    own_error: float | None = None
    own_scatter: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a figure between two runs. Chance alone changes it by at most `half`, in either direction.

    `own` is the change relative to all other bricks and layers, for example without a clock change. None if the
    common change is unknown.
    """

    before: float
    now: float
    half: float
    medians_us: tuple[float, float] | None = None  # median of one call in µs, before and now
    # Two runs of the same program may differ by this percentage.
    least_percent: float = LEAST_PERCENT
    error: float = 0.0  # standard error of the change; `half` is a multiple of it
    own: Change | None = None

    @property
    def delta(self) -> float:
        return self.now - self.before

    @property
    def percent(self) -> float | None:
        """The change in percent of `before`. None if `before` is 0."""
        return 100 * self.delta / self.before if self.before > 0 else None

    @property
    def half_percent(self) -> float | None:
        """The largest change by chance alone, in percent of `before`."""
        return 100 * self.half / self.before if self.before > 0 else None

    @property
    def noise_percent(self) -> float | None:
        """The limit of noise in percent: the interval or `least_percent`, whichever is larger."""
        return None if self.half_percent is None else max(self.half_percent, self.least_percent)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the change exceeds noise, by itself or relative to all other bricks and layers.

        The median call must have changed, too, because the delays of a few calls by other programs do not change it.
        """
        return (
            self.noise_percent is not None
            and (self._is_beyond_interval or self.is_beyond_others)
            and (self.medians_us is None or _is_like(self.delta, *self.medians_us, self.least_percent))
        )

    @property
    def is_told_by_others(self) -> bool:
        """Whether the change exceeds noise relative to all other bricks and layers, but not by itself."""
        return self.is_beyond_others and not self._is_beyond_interval

    @property
    def decisive(self) -> Change:
        """The change that decides `is_beyond_noise`: this one, or `own`, relative to others."""
        return self.own if self.own is not None and self.is_told_by_others else self

    @property
    def _is_beyond_interval(self) -> bool:
        return self.noise_percent is not None and abs(self.percent or 0.0) > self.noise_percent

    @property
    def is_beyond_others(self) -> bool:
        """Whether the change exceeds noise relative to all other bricks and layers, and is large enough by itself to
        be reported.

        If most bricks become faster, an unchanged one is slower relative to them. It must not be reported.
        """
        return (
            self.own is not None
            and self.own.is_beyond_noise
            and self.own.delta * self.delta > 0
            and abs(self.percent or 0.0) > self.least_percent
        )


def _is_like(delta: float, before_us: float, now_us: float, least_percent: float) -> bool:
    """Whether the median of a call changed by at least `least_percent` in the direction of `delta`."""
    moved = (now_us - before_us) if delta > 0 else (before_us - now_us)
    return moved >= least_percent / 100 * before_us


def figures(
    amount: NDArray[np.float64],
    weight: NDArray[np.float64],
    along: NDArray[np.float64] | None = None,
    pace: NDArray[np.float64] | None = None,
) -> list[Figure]:
    """Return the figure of each column of `amount`, (blocks, columns), per unit of `weight`. Needs at least
    MIN_BLOCKS blocks.

    `weight` has a number per block, or per block and column, such as the calls of each place. Uneven weights count as
    fewer blocks (L. Kish, "Survey Sampling", 1965). Without weight, a figure is 0.

    `along` is a quantity of each block, such as its cached positions. A straight line is then fitted through the
    blocks. The result is its value at the mean of `along`, and its slope is not noise. `pace` is the common factor of
    all places' times in each block. Errors and slopes are then also computed relative to it, because a clock may
    drift while a cache grows.

    The mean is the ratio of the sums. Its error is the error of batch means, by the linearised ratio (W. G. Cochran,
    "Sampling Techniques", 1977, chapter 6). The correlation of neighbouring blocks is the median over all columns,
    corrected for bias (M. G. Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 41, 1954), and
    at least zero.
    """
    if not amount.shape[1]:
        return []
    beside = None if pace is None else figures(amount / pace[:, None], weight, along)
    is_of_columns = weight.ndim == 2
    weight = weight if is_of_columns else weight[:, None]
    total = weight.sum(axis=0)
    mean = divided(amount.sum(axis=0), total)
    off = amount - weight * mean
    # `fitted` is the number of parameters of the fit: 1 for a mean, 2 for a line.
    slope, fitted, of_slope = np.zeros_like(mean), 1, np.zeros(1)
    # If all blocks have the same `along`, a line would only fit rounding errors.
    if along is not None and np.ptp(along) > 0:
        centred = along[:, None] - divided(along @ weight, total)
        slope, of_slope = _line(amount, weight, centred)
        fitted = 2
        if beside is not None:
            slope = np.array([one.slope for one in beside])
        off -= weight * centred * slope
    known = mean > 0
    error, weight, worth = _longest_errors(off, weight, fitted, known, mean)
    blocks = len(weight)
    if known.any() and worth < ENOUGH_BLOCKS:
        # Fewer calls mean a larger error. Scale all errors to the same weight, to compare columns.
        equal = np.broadcast_to(np.sqrt(total), mean.shape)[known]
        usual = np.median(error[known] / mean[known] * equal)
        error[known] = np.maximum(error[known], usual / equal * mean[known])
    even = np.full(mean.shape, blocks)
    if is_of_columns:
        even = np.minimum(blocks, np.rint(divided(total**2, (weight**2).sum(axis=0)))).astype(np.int64)
    columns = (mean, error, np.maximum(2, even + 1 - fitted), slope, error * of_slope)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    each = [Figure(one, by, of, slope=grows, slope_error=grows_by) for one, by, of, grows, grows_by in rows]
    if beside is None:
        return each
    pairs = zip(each, beside, strict=True)
    return [replace(one, slope_error=own.slope_error, own_error=own.error) for one, own in pairs]


def _line(
    amount: NDArray[np.float64], weight: NDArray[np.float64], along: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much each column (a figure) grows with `along`. Also return the error of this slope, as a multiple
    of the mean's error.

    Blocks are assumed to scatter as much around the line as around the mean.
    """
    spread = (weight * along**2).sum(axis=0)
    error = divided(weight.mean(axis=0) * np.sqrt(len(weight) * (along**2).sum(axis=0)), spread)
    return divided((along * amount).sum(axis=0), spread), error


def divided(amount: NDArray[np.float64], by: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `amount / by`, or 0 if `by` is 0."""
    found: NDArray[np.float64] = np.divide(amount, by, out=np.zeros(np.broadcast(amount, by).shape), where=by > 0)
    return found


def _longest_errors(
    off: NDArray[np.float64], weight: NDArray[np.float64], fitted: int, known: Flags, mean: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return the errors, weights and effective number of blocks for the block length with the largest errors.

    A disturbance may last longer than two short blocks, so longer ones are tried, too.
    """
    error, worth = _errors(off, weight, fitted)
    chosen = weight
    while len(weight) >= 2 * _LEAST_LONGER and known.any():
        off, weight = _by_twos(off), _by_twos(weight)
        longer, its_worth = _errors(off, weight, fitted)
        if np.median(longer[known] / mean[known]) > np.median(error[known] / mean[known]):
            error, chosen, worth = longer, weight, its_worth
    return error, chosen, worth


def _errors(off: NDArray[np.float64], weight: NDArray[np.float64], fitted: int) -> tuple[NDArray[np.float64], float]:
    """Return the standard error of each column's mean, and how many independent blocks this error corresponds to."""
    blocks = len(weight)
    squares = (off**2).sum(axis=0)
    alike = np.divide((off[1:] * off[:-1]).sum(axis=0), squares, out=np.zeros_like(squares), where=squares > 0)
    usual = float(np.clip(np.median(alike + fitted * (1 + 4 * alike) / blocks), 0.0, MAX_ALIKE))
    worth = max(_LEAST_WORTH, blocks * (1 - usual) / (1 + usual))
    # Blocks scatter less around their own mean than around the true one, so correct the variance.
    variance = squares / (blocks * max(1 - fitted / worth, 1 / _LEAST_WORTH))
    return divided(np.sqrt(variance / worth), weight.mean(axis=0)), worth


def _by_twos(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of pairs of blocks. A last block without a partner is added to the last pair."""
    even = len(blocks) // 2 * 2
    found: NDArray[np.float64] = blocks[0:even:2] + blocks[1:even:2]
    if even < len(blocks):
        found[-1] += blocks[-1]
    return found


def change(before: Figure, now: Figure, compared: int, shared: float | None = None) -> Change:
    """Return the change of a figure from `before` to `now`. `compared` figures are tested together.

    `shared` is the factor by which all bricks together became slower (None: unknown). The interval is Welch's, with
    Bonferroni's correction. If the scatter between runs was learned, it is the least error of a single run. The
    number of runs then also limits how well the common factor is known.
    """
    if shared is None or before.own_error is None or now.own_error is None:
        return _change(before, now, compared, 1)
    then = replace(before, error=before.own_error, scatter=before.own_scatter)
    beside = replace(now, mean=now.mean / shared, error=now.own_error / shared)
    found, own = _change(before, now, compared, 2), _change(then, beside, compared, 2)
    return replace(found, own=replace(own, medians_us=None)) if own.half < found.half else found


def telling_blocks(off: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the effective number of blocks for each column's variance, from its kurtosis.

    It is small if a few blocks have most of the variance. It gives the degrees of freedom of Student's distribution.
    """
    blocks = len(off)
    kurtosis = blocks * divided((off**4).sum(axis=0), (off**2).sum(axis=0) ** 2)
    freedom = np.divide(2 * blocks, kurtosis - 1, out=np.full(off.shape[1], float(blocks)), where=kurtosis > 1)
    found: NDArray[np.int64] = np.clip(freedom + 1, 2, blocks).astype(np.int64)
    return found


def stretched(figure: Figure, by: float) -> Figure:
    """Return a copy of a figure with errors multiplied by `by`."""
    own_error = None if figure.own_error is None else figure.own_error * by
    return replace(figure, error=figure.error * by, own_error=own_error)


def change_between_runs(before: Figure, now: Figure, compared: int) -> Change:
    """Return the change of a figure with an error that is far from normal, such as a p99.

    There are two intervals: one from the learned scatter between runs, one from the errors inside the runs. The wider
    one is used. `change` would also multiply the error inside the new run by the quantile for few base runs. The
    error of the ratio would be too small if a p99 jumps to the length of a pause.
    """
    inside = _change(replace(before, runs=1, scatter=0.0), now, compared, 1, by_ratio=False)
    if before.runs == 1:
        return inside
    found = _change(before, replace(now, error=0.0), compared, 1, by_ratio=False)
    return found if found.half > inside.half else replace(inside, least_percent=found.least_percent)


def slow_start(us: NDArray[np.float64]) -> int:
    """Return how many blocks at the beginning are much slower than the median block (at most a fifth of all).

    `us` is the time of a step in each block.
    """
    usual = np.median(us)
    is_slow = us > usual + WARM_UP_SPREADS * np.median(np.abs(us - usual))
    return min(int(np.argmin(is_slow)), len(us) // 5, len(us) - MIN_BLOCKS)


def half_of(figure: Figure, compared: int = 1) -> float:
    """Return how far chance alone may change a figure, in either direction. `compared` figures are tested
    together.
    """
    return change(Figure(figure.mean, 0.0, figure.blocks), figure, compared).half


def _change(before: Figure, now: Figure, compared: int, looks: int, *, by_ratio: bool = True) -> Change:
    """Return the change of a figure from `before` to `now`, with an interval for `compared` figures that are each
    tested `looks` times.

    `by_ratio` allows to compare very different times by their ratio.
    """
    squares = before.error**2, max(now.error, before.scatter) ** 2
    variance = sum(squares)
    medians = None if before.median_us is None or now.median_us is None else (before.median_us, now.median_us)
    least = LEAST_LEARNED_PERCENT if before.runs > 1 else LEAST_PERCENT
    if variance == 0:
        return Change(before.mean, now.mean, 0.0, medians, least)
    freedom = variance**2 / (squares[0] ** 2 / (before.blocks - 1) + squares[1] ** 2 / (now.blocks - 1))
    # Round the degrees of freedom down, to need only a few quantiles.
    errors = _student(int(freedom * 4) / 4, compared * looks)
    if before.runs > 1:
        errors = max(errors, _student(before.runs - 1, _KINDS * looks))
    error = sqrt(variance)
    half = error * errors
    # The interval would include negative times. So compute the interval from the error of the ratio.
    if by_ratio and half >= before.mean:
        of_ratio = _half_of_ratio(before.mean, now.mean, squares, errors)
        half = of_ratio if abs(now.mean - before.mean) > of_ratio else half
    return Change(before.mean, now.mean, half, medians, least, error)


def _half_of_ratio(before: float, now: float, squares: tuple[float, float], errors: float) -> float:
    """Return how far chance alone may change `now` towards `before`, computed from their ratio.

    The noise of a brick grows with its time: a brick that takes 100 times as long varies about 100 times as much.
    With the usual error, no difference would exceed this noise. The error of the ratio is made of both relative
    errors. inf if the times differ by less than _LEAST_RATIO.
    """
    if min(before, now) <= 0:
        return inf
    if max(before, now) < _LEAST_RATIO * min(before, now):
        return inf
    factor = exp(min(errors * sqrt(squares[0] / before**2 + squares[1] / now**2), _MOST_EXPONENT))
    return now * (1 - 1 / factor) if now > before else now * (factor - 1)


def learned(
    figures_of_runs: Sequence[Sequence[Figure | None]], paces: Sequence[float | None] | None = None
) -> list[Figure]:
    """Return each row's mean, and its scatter between runs. A row is one figure in several runs.

    None means that a run lacks it, and each row needs two. The scatter relative to the mean is at least as large as
    in the median row. `paces` is the common factor of all places' times in each run (None: unknown).
    """
    means = np.array([[nan if one is None else one.mean for one in row] for row in figures_of_runs])
    mean, scatter = np.nanmean(means, axis=1), _scatter(means)
    beside = None if paces is None else means / np.array([nan if pace is None else pace for pace in paces])
    is_paced = np.zeros(len(means), np.bool_) if beside is None else np.isfinite(beside).sum(axis=1) >= _LEAST_PACED
    own_scatter = np.zeros(len(means))
    if beside is not None and is_paced.any():
        own_scatter[is_paced] = _scatter(beside[is_paced])
    found = []
    columns = (column.tolist() for column in (mean, scatter, own_scatter, is_paced))
    for row, one, by, own_by, is_own_known in zip(figures_of_runs, *columns, strict=True):
        known = [figure for figure in row if figure is not None]
        runs = len(known)
        medians = [figure.median_us for figure in known if figure.median_us is not None]
        own = [figure.own_error for figure in known if figure.own_error is not None]
        found.append(
            Figure(
                one,
                max(by / sqrt(runs), _error_of_mean([figure.error for figure in known])),
                sum(figure.blocks for figure in known),
                float(np.mean(medians)) if len(medians) == runs else None,
                slope=float(np.mean([figure.slope for figure in known])),
                slope_error=_error_of_mean([figure.slope_error for figure in known]),
                scatter=by,
                runs=runs,
                own_error=max(own_by / sqrt(runs), _error_of_mean(own))
                if is_own_known and len(own) == runs
                else None,
                own_scatter=own_by,
            )
        )
    return found


def _scatter(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation between runs of each row (a figure), without unknown values. It is at least the
    median row's, relative to the mean.
    """
    mean, scatter = np.nanmean(means, axis=1), np.nanstd(means, axis=1, ddof=1)
    known = mean > 0
    if known.any():
        scatter[known] = np.maximum(scatter[known], np.median(scatter[known] / mean[known]) * mean[known])
    found: NDArray[np.float64] = scatter
    return found


def _error_of_mean(errors: Sequence[float]) -> float:
    return sqrt(sum(error**2 for error in errors)) / len(errors)


@lru_cache(maxsize=4096)
def _student(freedom: float, compared: int) -> float:
    """Return the largest distance of a mean from the true value in standard errors (two-sided), for `compared` means
    tested together.

    From G. W. Hill, "Algorithm 396: Student's t-quantiles", Communications of the ACM 13, 1970. Its branch for fewer
    than five degrees of freedom is missing, because it matters only at a lower confidence.
    """
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
