"""Count how often the interval of two equal runs contains their true ratio, for intervals by batch means and by
bootstrap.

    python -m benchmarks.intervals [--comparisons 400]

The runs are of a simulated machine with 24 bricks, and consecutive steps take similar times. The true ratio is 1, so
a 95 % interval should contain 1 in 95 of 100 cases. Both methods get the same blocks of steps, as `cbtop diff` makes
them. The bootstrap draws blocks, one by one or several in a row as its name says, and takes the middle 95 % of 1,000
ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import CONFIDENCE, change, figures
from cbtop.comparison.step_blocks import MAX_BLOCKS, STEPS_A_BLOCK

Floats = NDArray[np.float64]
# a function that returns, for each column, whether its interval contains 1
Interval = Callable[[Floats, Floats, np.random.Generator], NDArray[np.bool_]]

NOMINAL = 0.95
# The mean time of a brick varies slowly by 1 %, and each call varies by 3 %. These figures are from docs/gate.md.
PLACES, BRICK, CALL = 24, 0.01, 0.03
DRAWS = 1000
# Correlations of neighbouring steps. The correlation lasts for 0, 10, 33 and 100 steps.
MEMORIES = (0.0, 0.9, 0.97, 0.99)
STEPS = (60, 240, 480)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=400, help="default: 400, of 24 bricks each")
    options = parser.parse_args()
    ways: dict[str, Interval] = {"batch means": by_batch_means}
    ways |= {f"bootstrap, {name}": by_bootstrap(power) for name, power in DRAWN.items()}
    print(f"{'steps':>5} {'memory':>6}  " + "  ".join(f"{name:>22}" for name in ways))
    for steps in STEPS:
        for memory in MEMORIES:
            held = dict.fromkeys(ways, 0)
            for seed in range(options.comparisons):
                rng = np.random.default_rng([seed, steps])
                then, now = (blocks_of(steps, memory, rng) for _ in range(2))
                for name, way in ways.items():
                    held[name] += int(way(then, now, rng).sum())
            of = options.comparisons * PLACES
            print(f"{steps:>5} {memory:>6}  " + "  ".join(f"{100 * one / of:>20.1f} %" for one in held.values()))
    return 0


# How many consecutive blocks the bootstrap draws together: the number of blocks to this power.
DRAWN = {"one by one": 0.0, "cube root": 1 / 3, "square root": 1 / 2}


def blocks_of(steps: int, memory: float, rng: np.random.Generator) -> Floats:
    """Return the mean time of a step for each block and brick, shape (blocks, places), of a simulated run."""
    chance = rng.standard_normal((steps, PLACES)) * np.sqrt(1 - memory**2)
    wander = np.empty((steps, PLACES))
    wander[0] = rng.standard_normal(PLACES)
    for at in range(1, steps):
        wander[at] = memory * wander[at - 1] + chance[at]
    us = np.exp(BRICK * wander + CALL * rng.standard_normal((steps, PLACES)))
    each = STEPS_A_BLOCK
    while steps // each >= MAX_BLOCKS:
        each *= 2
    whole = steps // each * each
    return us[:whole].reshape(-1, each, PLACES).mean(axis=1)


def by_batch_means(then: Floats, now: Floats, rng: np.random.Generator) -> NDArray[np.bool_]:
    """For each figure, return whether the interval of `cbtop diff` contains the true ratio 1.

    Each figure has its own interval, without a correction for the number of figures.
    """
    sides = (figures(one, np.ones(len(one))) for one in (then, now))
    # CONFIDENCE is for all figures of a comparison together. With this number of figures, each interval has the
    # confidence NOMINAL.
    share = (1 - CONFIDENCE) / (1 - NOMINAL)
    changes = (change(was, one, share) for was, one in zip(*sides, strict=True))  # type: ignore[arg-type]
    return np.array([abs(one.delta) <= one.half for one in changes])


def by_bootstrap(power: float) -> Interval:
    """Return a function that computes intervals by bootstrap: the middle of the ratios of resampled means.

    It draws several consecutive blocks at a time, with replacement. After the last block comes the first.
    """

    def drawn(blocks: Floats, rng: np.random.Generator) -> Floats:
        count = len(blocks)
        each = max(1, round(count**power))
        first = rng.integers(0, count, (DRAWS, -(-count // each)))
        at = (first[:, :, None] + np.arange(each)).reshape(DRAWS, -1)[:, :count] % count
        found: Floats = blocks[at].mean(axis=1)
        return found

    def interval(then: Floats, now: Floats, rng: np.random.Generator) -> NDArray[np.bool_]:
        ratios = drawn(now, rng) / drawn(then, rng)
        low, high = np.quantile(ratios, [(1 - NOMINAL) / 2, (1 + NOMINAL) / 2], axis=0)
        found: NDArray[np.bool_] = (low <= 1) & (high >= 1)
        return found

    return interval


if __name__ == "__main__":
    sys.exit(main())
