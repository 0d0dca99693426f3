"""Training steps: their parts, and the forward and backward time of each brick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord
from cbtop.profiler.analysis.brick_stats import BrickStats
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.messages import Node
from cbtop.protocol.training_messages import TrainingTimes
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, STEP_BRICKS, BrickCategory, TrainingPart, is_training
from cbtop.viewmodels.communication import CommunicationView, communication_view
from cbtop.viewmodels.gradients import GradientsView, gradients_view
from cbtop.viewmodels.layers import LayerRow, LayersView
from cbtop.viewmodels.training_memory import TrainingMemoryView, memory_view, of_step

_PART_ORDER = {part.value: at for at, part in enumerate(TrainingPart)}


@dataclass(frozen=True, slots=True)
class TrainingPartRow:
    """One part of a training step, such as `backward`."""

    name: str
    percent: float  # the part's share of the steps' time; all parts add up to 100 %
    mean_us: float  # mean time of this part per step
    p50_us: float  # median time of this part per step


@dataclass(frozen=True, slots=True)
class TrainingBrick:
    """The exclusive time of a brick in the passes of a recorded training step.

    None: the pass was not recorded. Data waits, clipping, the optimizer and communication are in no pass.
    """

    name: str
    us: float  # sum of the brick's time in all passes
    forward_us: float | None
    backward_us: float | None
    recompute_us: float | None  # time of forward passes that the backward repeats
    percent: float | None  # the brick's time in all passes, in percent of the recorded steps


@dataclass(frozen=True, slots=True)
class TrainingView:
    """The training steps of a phase. Parts are of the newest `steps` steps, bricks of recorded steps."""

    steps: int  # number of newest steps in the parts; 0 if the parts are unknown
    mean_us: float | None  # mean time of these steps; None if the parts are unknown
    parts: tuple[TrainingPartRow, ...]  # the parts of a step, in the order of a training loop
    bricks: tuple[TrainingBrick, ...]  # the longest first
    # communication of the steps; None without any
    communication: CommunicationView | None = None
    gradients: GradientsView | None = None  # gradients of the steps; None if not reported
    # number of recorded steps whose kernels gave the parts' times; 0 if the host's clock did, or if unknown
    by_kernels: int = 0
    memory: TrainingMemoryView | None = None  # memory of the steps; None if the process has not reported it
    # Mean time per step of cbtop's own work that is in no part. 0 if the parts are the times of kernels.
    own_us: float = 0.0

    def part(self, name: TrainingPart) -> TrainingPartRow | None:
        """Return the part called `name`. None if the process does not report it."""
        return next((part for part in self.parts if part.name == name), None)


def training_view(
    record: SourceRecord, totals: PhaseTotals, bricks: Callable[[], Sequence[BrickStats]]
) -> TrainingView | None:
    """Return the training steps of the phase in `totals`, or None for other steps.

    `bricks` returns the phase's bricks. It is called only for training steps.
    """
    step = totals.step
    if step is None:
        return None
    times = of_step(record.training_times, step)
    if times is None and not is_training(step.name):
        return None
    return TrainingView(
        steps=times.steps if times else 0,
        mean_us=times.wall_ns / times.steps / 1e3 if times else None,
        parts=_parts(times) if times else (),
        bricks=_bricks(bricks(), totals, step),
        communication=communication_view(times.communication, times.steps) if times else None,
        gradients=gradients_view(record, step),
        by_kernels=times.by_kernels if times else 0,
        memory=memory_view(record, step),
        own_us=times.own_ns / times.steps / 1e3 if times else 0.0,
    )


def pass_of(name: str) -> tuple[str, str]:
    """Split the name of a brick of a training step into the name in the forward and a suffix: BACKWARD, RECOMPUTE or
    "".
    """
    for suffix in (BACKWARD, RECOMPUTE):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def passes_of_layer(layers: LayersView, row: LayerRow) -> tuple[float, float]:
    """Return the exclusive time of a layer's bricks as (forward, backward) in µs.

    Forward passes that the backward repeats count as backward.
    """
    forward_us = backward_us = 0.0
    for brick, us in zip(layers.bricks, row.cells, strict=True):
        if pass_of(brick.name)[1]:
            backward_us += us or 0.0
        else:
            forward_us += us or 0.0
    return forward_us, backward_us


def _parts(times: TrainingTimes) -> tuple[TrainingPartRow, ...]:
    ordered = sorted(times.parts, key=lambda part: _PART_ORDER.get(part.name, len(_PART_ORDER)))
    return tuple(
        TrainingPartRow(
            part.name, 100 * part.sum_ns / times.wall_ns, part.sum_ns / times.steps / 1e3, part.p50_ns / 1e3
        )
        for part in ordered
    )


def _bricks(bricks: Sequence[BrickStats], totals: PhaseTotals, step: Node) -> tuple[TrainingBrick, ...]:
    steps = totals.count[step.id]
    if not steps:
        return ()
    passes: dict[str, dict[str, list[BrickStats]]] = {}
    for stats in bricks:
        name, suffix = pass_of(stats.name)
        passes.setdefault(name, {}).setdefault(suffix, []).append(stats)

    def us(found: list[BrickStats]) -> float:
        return sum(one.closed.exclusive_ns + one.adopted_ns for one in found) / steps / 1e3

    rows = []
    for name, found in passes.items():
        every = [one for stats in found.values() for one in stats]
        shares = [totals.percent(one.closed.exclusive_ns, one.adopted_ns) for one in every]
        known = [share for share in shares if share is not None]
        percent = sum(known) if known else None
        us_of = {suffix: us(stats) for suffix, stats in found.items()}
        is_of_both = all([stats.category is BrickCategory.COMMUNICATION for stats in every])
        forward_us = None if is_of_both or name in STEP_BRICKS else us_of.get("")
        rows.append(TrainingBrick(name, us(every), forward_us, us_of.get(BACKWARD), us_of.get(RECOMPUTE), percent))
    return tuple(sorted(rows, key=lambda row: -row.us))
