"""The memory of training steps on a GPU: its peak in each part, and the brick at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cbtop.client.source_record import SourceRecord
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.memory_messages import TrainingMemory
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
    why_unknown: str | None  # why nothing is known; None if something is

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
    if not found.steps:
        return TrainingMemoryView(0, (), None, None, None, (), None, None, None, None, found.why_unknown or None)
    rows = [PartMemoryRow(part.name, part.allocated_bytes, part.reserved_bytes) for part in found.parts]
    return TrainingMemoryView(
        steps=found.steps,
        parts=tuple(sorted(rows, key=lambda row: _ORDER.get(row.name, len(_ORDER)))),
        allocated_bytes=max(row.allocated_bytes for row in rows),
        reserved_bytes=max(row.reserved_bytes for row in rows),
        unused_bytes=found.unused_bytes,
        place=_place(record, found),
        torch_peak_bytes=found.torch_peak_bytes or None,
        limit_bytes=found.limit_bytes or None,
        retries=found.retries,
        counted_steps=found.counted_steps,
        why_unknown=None,
    )


def of_step(said: Mapping[tuple[str, str], Message], step: Node) -> Message | None:
    """Return the message about the steps of the node `step`. The keys are (phase, model).

    Only with several models does a step node have a model's name.
    """
    of_phase = {model: message for (phase, model), message in said.items() if phase == step.name}
    exact = [message for model, message in of_phase.items() if model == step.label]
    found = exact or ([*of_phase.values()] if not step.label else [])
    return found[0] if len(found) == 1 else None


def _place(record: SourceRecord, found: TrainingMemory) -> tuple[str, ...]:
    path = path_of(record.nodes.nodes, found.node)
    return tuple(display_name(node) for node in path if node.kind in (NodeKind.LAYER, NodeKind.BRICK))
