"""Makes runs of a simulated process. Their steps are noisy, and the noise of neighbouring steps is correlated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.baseline import Surroundings
from cbtop.comparison.part_diff import PartDiff, PlaceDiff
from cbtop.comparison.phase_rates import phase_rates
from cbtop.comparison.run_diff import RunDiff, diff
from cbtop.comparison.runs import Run, part_of
from cbtop.comparison.step_blocks import StepBlocks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

BRICKS = {  # µs per call
    "RmsNorm": (BrickCategory.NORM, 20.0),
    "QkvProjection": (BrickCategory.ATTENTION, 160.0),
    "Attention": (BrickCategory.ATTENTION, 100.0),
    "DownProjection": (BrickCategory.FFN, 240.0),
}
BETWEEN_US, BETWEEN_STEPS_US = 2.0, 30.0
AT = Surroundings("made.py", 1, None, "made", "llama", "Q4_K", 6, "made", 4, "here", (), 1)


@dataclass(frozen=True)
class Noise:
    """Relative noise of the times of a process. `memory` is the correlation of neighbouring steps."""

    memory: float = 0.9
    machine: float = 0.01  # common to all bricks
    brick: float = 0.01  # noise of each brick in each layer
    call: float = 0.03  # of each call, without correlation
    pauses: float = 1e-4  # probability that a call takes 20 ms more
    drift: float = 0.0  # drift: relative change of all times from the first to the last step, with a random sign
    neighbour: float = 0.0  # noise added in bursts of 12 steps, in a tenth of all steps
    warm_up: float = 0.0  # time added to step 1; step 20 gets about a tenth of it
    bimodal: float = 0.0  # time added to 40 % of the calls of Attention in Layer 2
    late: float = 0.0  # time added to the last 40 % of the steps
    tail: float = 0.0  # time added to DownProjection of all layers in 4 % of the steps
    # Noise between runs: a part that all bricks share, and for each brick a part of its own that is a third as large.
    run: float = 0.0


STEADY = Noise(pauses=0)


@cache
def made_table(layers: int = 6, rename: str = "") -> NodeTable:
    """Return the node table of a step that has layers with bricks.

    If `rename` is given, the last brick gets this name.
    """
    table = NodeTable()
    table.add(Node(1, None, NodeKind.STEP, "decode"))
    for layer in range(layers):
        above = len(table) + 1
        table.add(Node(above, 1, NodeKind.LAYER, str(layer)))
        for name, (category, _) in BRICKS.items():
            called = rename if rename and name == "DownProjection" else name
            table.add(Node(len(table) + 1, above, NodeKind.BRICK, called, category=category))
    return table


def made_batch(
    seed: int,
    noise: Noise,
    steps: int,
    *,
    layers: int = 6,
    slower: float = 1.0,
    in_layer: int | None = 4,
    cached_from: int | None = None,
    us_a_position: float = 0.0,
    all_longer: float = 1.0,
    unnamed_us: float = 0.0,
    between_steps_us: float = BETWEEN_STEPS_US,
) -> Batch:
    """Return the records of `steps` simulated steps.

    DownProjection takes `slower` times as long in layer `in_layer` (None: in all layers). Every brick takes
    `all_longer` times as long. Attention takes `us_a_position` more for each cached position. In the last
    `unnamed_us` µs of each step, no brick runs.
    """
    rng = np.random.default_rng(seed)
    usual = np.tile([us for _, us in BRICKS.values()], layers)
    places = len(usual)
    moved = noise.machine * wander(rng, steps, 1, noise.memory) + noise.brick * wander(
        rng, steps, places, noise.memory
    )
    moved += noise.call * rng.standard_normal((steps, places))
    moved += noise.run * (rng.standard_normal() + rng.standard_normal(places) / 3)
    moved += rng.choice([-1, 1]) * noise.drift * np.linspace(0, 1, steps)[:, None]
    us = usual * np.exp(moved) * all_longer
    if noise.neighbour:
        begins = np.flatnonzero(rng.random(steps) < 0.1 / 12)
        for begin in begins.tolist():
            us[begin : begin + 12] *= 1 + noise.neighbour
    us[int(0.6 * steps) :] *= 1 + noise.late
    if noise.tail:
        us[np.ix_(rng.random(steps) < 0.04, np.arange(3, places, len(BRICKS)))] *= 1 + noise.tail
    us *= 1 + noise.warm_up * np.exp(-np.arange(steps) / 8.7)[:, None]
    if noise.bimodal:
        us[rng.random(steps) < 0.4, 2 * len(BRICKS) + 2] *= 1 + noise.bimodal
    attention = np.arange(2, places, len(BRICKS))
    if cached_from is not None:
        us[:, attention] += us_a_position * (cached_from + np.arange(steps))[:, None]
    down = np.arange(3, places, len(BRICKS))
    us[:, down if in_layer is None else down[in_layer]] *= slower
    us[rng.random(us.shape) < noise.pauses] += 20_000
    return _records(us, layers, cached_from, unnamed_us, between_steps_us)


@cache
def made_run(seed: int, noise: Noise = Noise(), steps: int = 240, *, rename: str = "", **changed: object) -> Run:  # noqa: B008
    """Make a run as `made_batch` does, read its records, and return the result."""
    batch = made_batch(seed, noise, steps, **changed)  # type: ignore[arg-type]
    table = made_table(6, rename)
    blocks = StepBlocks(table)
    # Read the records in portions of 4,096. The border of a portion can be inside a step.
    for part in range(0, len(batch.node), 4096):
        chosen = np.zeros(len(batch.node), np.bool_)
        chosen[part : part + 4096] = True
        blocks.take(batch.only(chosen))
    parts = [part_of(table, work, found) for work, found in blocks.blocks().items()]
    return Run(
        name=f"run {seed}",
        key=f"here:{seed}:1:0",
        surroundings=AT,
        clock_resolution_us=0.03,
        covers_s=1.0,
        parts=tuple(part for part in parts if part),
        too_short=(),
        kernels={},
        lost=0,
        seen=len(batch.node),
        rates=phase_rates(blocks.rates, table, {}, is_shown_whole=False),
    )


def _records(
    us: NDArray[np.float64], layers: int, cached_from: int | None, unnamed_us: float, between_steps_us: float
) -> Batch:
    """Return records of nested nodes in the order of their ends: bricks, then their layer, and last the step."""
    steps, each = len(us), len(BRICKS)
    ns = np.round(us.reshape(steps, layers, each) * 1e3).astype(np.int64)
    gap_ns, rest_ns = round(BETWEEN_US * 1e3), round(between_steps_us * 1e3)
    end = np.cumsum(ns + gap_ns, axis=2)
    layer_ns = end[:, :, -1] + gap_ns
    layer_end = np.cumsum(layer_ns, axis=1)
    step_ns = layer_end[:, -1] + round(unnamed_us * 1e3)
    step_end = np.cumsum(step_ns + rest_ns)
    begin = (step_end - step_ns)[:, None] + layer_end - layer_ns
    width = layers * (each + 1) + 1 + (cached_from is not None)
    node, start, stop, elements, flags = (np.zeros((steps, width), np.int64) for _ in range(5))
    for layer in range(layers):
        at, first = layer * (each + 1), 2 + layer * (each + 1)
        node[:, at : at + each] = np.arange(first + 1, first + 1 + each)
        stop[:, at : at + each] = begin[:, layer, None] + end[:, layer]
        start[:, at : at + each] = stop[:, at : at + each] - ns[:, layer]
        node[:, at + each] = first
        start[:, at + each], stop[:, at + each] = begin[:, layer], begin[:, layer] + layer_ns[:, layer]
    last = layers * (each + 1)
    node[:, last:] = 1
    start[:, last], stop[:, last], elements[:, last] = step_end - step_ns, step_end, 1
    if cached_from is not None:
        start[:, -1], stop[:, -1] = 1, cached_from + np.arange(steps)
        flags[:, -1], elements[:, -1] = FLAG_AMOUNTS, 0
    columns = (column.reshape(-1) for column in (node, flags, start, stop, elements))
    return Batch(*columns, overwritten=0)


def wander(rng: np.random.Generator, steps: int, figures: int, memory: float) -> NDArray[np.float64]:
    """Return random series of variance 1 with the shape (steps, figures).

    `memory` is the correlation of neighbouring steps.
    """
    chance = rng.standard_normal((steps, figures)) * np.sqrt(1 - memory**2)
    found = np.empty((steps, figures))
    found[0] = rng.standard_normal(figures)
    for at in range(1, steps):
        found[at] = memory * found[at - 1] + chance[at]
    return found


@cache
def steady() -> RunDiff:
    """Return the comparison of two runs of the same program with little noise."""
    return diff(made_run(1, STEADY), made_run(2, STEADY))


def place_of(part: PartDiff, name: str) -> PlaceDiff:
    return next(one for one in part.places if one.name == name)
