"""Compare the peak memory of training steps between two runs."""

# Rules
# - A peak is the most memory that was seen in a recorded step. It is a lower bound, because memory is read at the
#   bounds of calls only. Torch's own peak is an upper bound of the allocated memory.
# - The peak of the largest step is compared. If the steps of a run differ, a longer run has a higher peak by chance.
#   So the peaks of two runs differ beyond chance only if no step of the one is within the range of the other's steps.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cbtop.protocol.memory_messages import TrainingMemory
from cbtop.units import number, size_bytes

MEMORY = "memory"
ALLOCATED, RESERVED = "memory.allocated", "memory.reserved"
LEAST_RATIO = 1.01  # Smaller changes are not reported, such as another choice of a workspace.


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The peaks of one kind of memory in the training steps that a run recorded."""

    most_bytes: int  # the peak of the largest step; a lower bound
    lowest_bytes: int  # the peak of the smallest step; a lower bound
    # Torch's own peak, or None if it is not known. It is an upper bound, unless the program resets it.
    bound_bytes: int | None = None

    @property
    def text(self) -> str:
        """The peak as the bound that it is: `≥42.0 GB`."""
        return f"≥{size_bytes(self.most_bytes)}"


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of the training steps of one phase. The keys of `peaks` are ALLOCATED and RESERVED."""

    phase: str
    peaks: Mapping[str, MemoryPeak]


@dataclass(frozen=True, slots=True)
class PeakChange:
    """The change in one kind of memory during the training steps of a phase."""

    phase: str
    name: str
    before: MemoryPeak
    now: MemoryPeak

    @property
    def ratio(self) -> float:
        return self.now.most_bytes / self.before.most_bytes

    @property
    def verdict(self) -> str:
        """`more`, `less`, or "" if the change is small or may be chance."""
        before, now = self.before, self.now
        if self.ratio >= LEAST_RATIO and now.lowest_bytes > before.most_bytes:
            return "more"
        return "less" if self.ratio <= 1 / LEAST_RATIO and now.most_bytes < before.lowest_bytes else ""

    @property
    def text(self) -> str:
        """The change as text: `≥42.0 GB → ≥45.0 GB, 1.071×: more`."""
        verdict = f": {self.verdict}" if self.verdict else ""
        return f"{self.before.text} → {self.now.text}, {number(self.ratio)}×{verdict}"


def peaks_of(said: TrainingMemory) -> Mapping[str, MemoryPeak]:
    """Return the memory in a report of a process. The result is empty if the report has none."""
    if not said.parts:
        return {}
    allocated = max(part.allocated_bytes for part in said.parts)
    reserved = max(part.reserved_bytes for part in said.parts)
    if not (allocated and reserved):
        return {}
    # A process with an older cbtop does not report the smallest peak.
    return {
        ALLOCATED: MemoryPeak(allocated, said.lowest_allocated_bytes or allocated, said.torch_peak_bytes or None),
        RESERVED: MemoryPeak(reserved, said.lowest_reserved_bytes or reserved),
    }


def peaks_together(each: Sequence[Mapping[str, MemoryPeak]]) -> Mapping[str, MemoryPeak]:
    """Return the memory of several reports or runs: the highest and the lowest peak of any step."""
    found = {}
    for name in (ALLOCATED, RESERVED):
        if known := [peaks[name] for peaks in each if name in peaks]:
            bounds = [one.bound_bytes for one in known if one.bound_bytes is not None]
            found[name] = MemoryPeak(
                max(one.most_bytes for one in known),
                min(one.lowest_bytes for one in known),
                max(bounds) if len(bounds) == len(known) else None,
            )
    return found


def memory_together(runs: Sequence[Sequence[PhaseMemory]]) -> tuple[PhaseMemory, ...]:
    """Return the memory of several runs, by phase."""
    phases = dict.fromkeys(one.phase for run in runs for one in run)
    every = [one for run in runs for one in run]
    return tuple(
        PhaseMemory(phase, peaks_together([one.peaks for one in every if one.phase == phase])) for phase in phases
    )


def peak_changes(before: Sequence[PhaseMemory], now: Sequence[PhaseMemory]) -> list[PeakChange]:
    """Return the changes of the memory of each phase that both runs have."""
    befores = {one.phase: one for one in before}
    return [
        PeakChange(one.phase, name, befores[one.phase].peaks[name], peak)
        for one in now
        if one.phase in befores
        for name, peak in one.peaks.items()
        if name in befores[one.phase].peaks
    ]
