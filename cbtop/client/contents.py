"""What is the same in every repetition of a run: announcements about its steps, compiled code and conditions."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbtop.protocol.structure_messages import (
    CompiledCode,
    Conditions,
    StepAllocations,
    StepOperations,
    StructureMessage,
)

Phase = tuple[str, str]  # key of an announcement: (phase without a warm-up suffix, model)


@dataclass(slots=True)
class AnnouncedContents:
    """The newest announcement of each kind from one process. A kind without an announcement is None or has no
    entry.
    """

    conditions: dict[str, str] = field(default_factory=dict)
    operations: dict[Phase, StepOperations] = field(default_factory=dict)
    allocations: dict[Phase, StepAllocations] = field(default_factory=dict)
    compiled: CompiledCode | None = None

    def take(self, message: StructureMessage) -> None:
        """Store an announcement. It replaces the previous announcement of the same kind and phase."""
        match message:
            case Conditions():
                self.conditions = {one.name: one.value for one in message.conditions}
            case StepOperations():
                self.operations[message.phase, message.model] = message
            case StepAllocations():
                self.allocations[message.phase, message.model] = message
            case CompiledCode():
                self.compiled = message

    def __len__(self) -> int:
        """Return the total number of entries in all stored announcements."""
        operations = sum(1 + len(one.operations) for one in self.operations.values())
        breaks = 1 + len(self.compiled.breaks) if self.compiled else 0
        return len(self.conditions) + operations + len(self.allocations) + breaks
