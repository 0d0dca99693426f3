"""The memory of training steps: on a GPU its peak in each part and brick, on a CPU the outputs of bricks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cbtop.client.source_record import SourceRecord
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.memory_messages import BrickMemories
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind, TrainingPart
from cbtop.viewmodels.kernels import path_of

Message = TypeVar("Message")
_ORDER = {part.value: at for at, part in enumerate(TrainingPart)}


@dataclass(frozen=True, slots=True)
class PartMemoryRow:
    """The peak memory of one part of a training step, for example `backward`."""

    name: str
    allocated_bytes: int  # in tensors, at least
    reserved_bytes: int  # held by torch's allocator


@dataclass(frozen=True, slots=True)
class BrickMemoryRow:
    """The memory of one brick in the newest recorded training step. Measured sizes are None on a CPU."""

    path: tuple[str, ...]  # layer and brick
    output_bytes: int | None  # tensors that its calls returned, derived from shapes; None if not known
    allocated_bytes: int | None = None  # peak of the step while the brick ran
    reserved_bytes: int | None = None
    kept_bytes: int | None = None  # allocated by the brick and not freed by it; less than 0 if it freed more


@dataclass(frozen=True, slots=True)
class TrainingMemoryView:
    """The memory of recorded training steps on one GPU, by the counters of torch's allocator.

    Counters are read at the begin and end of calls, so peaks are lower bounds. `torch_peak_bytes` is an upper bound,
    unless the program has reset torch's peak within the step.
    """

    steps: int  # number of recorded steps; 0 if nothing is known
    parts: tuple[PartMemoryRow, ...]  # peak memory of each part, in the usual order of a training loop
    allocated_bytes: int | None  # peak of a step
    reserved_bytes: int | None  # peak of a step
    unused_bytes: int | None  # memory that was reserved but not allocated, at the peak of allocated memory
    place: tuple[str, ...]  # layer and brick at the peak; empty if unknown
    torch_peak_bytes: int | None  # torch's own peak, since the start or the program's last reset
    limit_bytes: int | None  # most memory that the process can reserve; None if unknown
    # how often torch emptied its cache for lack of memory, in `counted_steps` steps
    retries: int | None
    counted_steps: int | None
    why_unknown: str | None  # why nothing is measured; None if something is
    bricks: tuple[BrickMemoryRow, ...] = ()  # those with most memory first

    @property
    def unused_percent(self) -> float | None:
        """Upper limit of the unallocated share of reserved memory at the peak, in percent.

        The allocated memory is a lower bound.
        """
        if not self.allocated_bytes or self.unused_bytes is None:
            return None
        return 100 * self.unused_bytes / (self.allocated_bytes + self.unused_bytes)

    @property
    def least_unused_percent(self) -> float | None:
        """Lower limit of the unallocated share of reserved memory at the peak, by torch's own peak."""
        if not self.reserved_bytes or not self.allocated_bytes or not self.torch_peak_bytes:
            return None
        peak_bytes = max(self.allocated_bytes, self.torch_peak_bytes)
        return 100 * max(0, self.reserved_bytes - peak_bytes) / self.reserved_bytes


def memory_view(record: SourceRecord, step: Node) -> TrainingMemoryView | None:
    """Return the memory of the steps of the node `step`, or None if the process has not reported it."""
    found = of_step(record.training_memory, step)
    if found is None:
        return None
    bricks = _bricks(record, of_step(record.brick_memory, step))
    if not found.steps:
        why = found.why_unknown or None
        return TrainingMemoryView(0, (), None, None, None, (), None, None, None, None, why, bricks)
    rows = [PartMemoryRow(part.name, part.allocated_bytes, part.reserved_bytes) for part in found.parts]
    return TrainingMemoryView(
        steps=found.steps,
        parts=tuple(sorted(rows, key=lambda row: _ORDER.get(row.name, len(_ORDER)))),
        allocated_bytes=max(row.allocated_bytes for row in rows),
        reserved_bytes=max(row.reserved_bytes for row in rows),
        unused_bytes=found.unused_bytes,
        place=_path(record, found.node),
        torch_peak_bytes=found.torch_peak_bytes or None,
        limit_bytes=found.limit_bytes or None,
        retries=found.retries,
        counted_steps=found.counted_steps,
        why_unknown=None,
        bricks=bricks,
    )


def _bricks(record: SourceRecord, found: BrickMemories | None) -> tuple[BrickMemoryRow, ...]:
    rows = []
    for brick in found.bricks if found is not None else ():
        path = _path(record, brick.node)
        measured = (brick.allocated_bytes, brick.reserved_bytes, brick.kept_bytes)
        if path and found is not None:
            rows.append(BrickMemoryRow(path, brick.output_bytes or None, *(measured if found.is_measured else ())))
    return tuple(rows)


def of_step(said: Mapping[tuple[str, str], Message], step: Node) -> Message | None:
    """Return the message about the steps of the node `step`. The keys are (phase, model).

    Only with several models does a step node have a model's name.
    """
    of_phase = {model: message for (phase, model), message in said.items() if phase == step.name}
    exact = [message for model, message in of_phase.items() if model == step.label]
    found = exact or ([*of_phase.values()] if not step.label else [])
    return found[0] if len(found) == 1 else None


def _path(record: SourceRecord, place: int) -> tuple[str, ...]:
    path = path_of(record.nodes.nodes, place)
    return tuple(display_name(node) for node in path if node.kind in (NodeKind.LAYER, NodeKind.BRICK))
