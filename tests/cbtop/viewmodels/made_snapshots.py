"""Makes snapshots of a simulated process. Its steps are noisy, and neighbouring steps are correlated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.baseline import PhaseFigures, PhaseTimes, Snapshot, Surroundings
from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure, figures
from cbtop.protocol.vocabulary import BrickCategory

BRICKS: dict[Brick, float] = {  # µs per call
    ("RmsNorm", BrickCategory.NORM): 100.0,
    ("QkvProjection", BrickCategory.ATTENTION): 800.0,
    ("AttentionScore", BrickCategory.ATTENTION): 500.0,
    ("DownProjection", BrickCategory.FFN): 1_200.0,
}
DOWN: Brick = ("DownProjection", BrickCategory.FFN)
AT = Surroundings("made.py", 1, None, "made 8L", "llama", "Q4_K", 8, "made", 4, "here", (), 1)


@dataclass(frozen=True)
class Noise:
    """Relative noise of the times of a process that does not drift.

    `memory` is the correlation of neighbouring steps.
    """

    memory: float = 0.9
    machine: float = 0.01  # common to all bricks
    brick: float = 0.03  # noise of each brick in each layer
    call: float = 0.03  # of each call, without correlation
    pauses: float = 2e-5  # probability that a call takes 20 ms more


NOISY = Noise()


def made(
    seed: int,
    noise: Noise = NOISY,
    *,
    slower: float = 1.0,
    layers: int = 8,
    blocks: int = 10,
    steps: int = 40,
    key: str = "",
) -> Snapshot:
    """Return a snapshot of ten seconds. DownProjection of Layer 5 takes `slower` times as long."""
    rng = np.random.default_rng(seed)
    count, places = blocks * steps, layers * len(BRICKS)
    usual = np.tile(list(BRICKS.values()), layers)
    moved = _wander(rng, count, 1, noise.memory) * noise.machine
    moved = moved + _wander(rng, count, places, noise.memory) * noise.brick
    us = usual * np.exp(moved + rng.standard_normal((count, places)) * noise.call)
    us[:, 5 * len(BRICKS) + list(BRICKS).index(DOWN)] *= slower
    us[rng.random(us.shape) < noise.pauses] += 20_000
    # Blocks have different numbers of steps, because they stand for whole seconds.
    edges = np.sort(rng.choice(np.arange(2, count - 2, 2), blocks - 1, replace=False))
    edges = (edges + np.arange(steps, count, steps)) // 2
    inside = np.split(us, edges)
    weight = np.array([len(part) for part in inside], float)
    cell = np.array([part.sum(axis=0) for part in inside])
    of_brick = cell.reshape(blocks, layers, len(BRICKS)).sum(axis=1)
    of_layer = cell.reshape(blocks, layers, len(BRICKS)).sum(axis=2)
    names = [f"Layer {at}" for at in range(layers)]
    wall_us = cell.sum(axis=1, keepdims=True)
    (step_us,), (rate,) = figures(wall_us, weight), figures(weight[:, None], wall_us[:, 0] / 1e6)
    parts: list[tuple[list[Place], NDArray[np.float64], int]] = [
        ([(brick, None) for brick in BRICKS], of_brick, layers),
        ([(brick, name) for name in names for brick in BRICKS], cell, 1),
        ([(None, name) for name in names], of_layer, 1),
    ]
    places = {
        place: PlaceTimes(figure, call, calls=Figure(float(calls), 0.0, blocks))
        for keys, amounts, calls in parts
        for place, figure, call in zip(keys, figures(amounts, weight), figures(amounts, weight * calls), strict=True)
    }
    times = PhaseTimes("token", step_us, rate, places)
    phase = PhaseFigures("decode", count, 1.0, 1.0, 1.0, 1_000.0, blocks, times)
    return Snapshot(key or f"here:{seed}:1:0", AT, (phase,), seed * 10**11, seed * 10**11 + 10**10, 1.7e9, 0.0)


def with_phase(snapshot: Snapshot, **changed: Any) -> Snapshot:
    """Return the snapshot after fields in its only phase were changed."""
    (phase,) = snapshot.phases
    return replace(snapshot, phases=(replace(phase, **changed),))


def _wander(rng: np.random.Generator, steps: int, figures: int, memory: float) -> NDArray[np.float64]:
    """Return random series of variance 1 with the shape (steps, figures).

    `memory` is the correlation of neighbouring steps.
    """
    chance = rng.standard_normal((steps, figures)) * np.sqrt(1 - memory**2)
    found = np.empty((steps, figures))
    found[0] = rng.standard_normal(figures)
    for at in range(1, steps):
        found[at] = memory * found[at - 1] + chance[at]
    return found
