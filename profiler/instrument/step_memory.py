"""Measures the memory of recorded training steps on a GPU, by the counters of torch's allocator.

The allocator counts when the host allocates, not when kernels run. So the host reads the counters whenever a
different module call or a different part of the step begins. These are the places of a step.

Rules
- The program may use `torch.cuda.max_memory_allocated`, so cbtop never resets a counter.
- If torch's own peak rises between two reads, it is the peak of the place between them. Otherwise the larger of the
  two reads is used, which is a lower bound.
- If the counters cannot be read, the step is recorded without its memory. The error is reported as the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cbtop.profiler.device.kernel_burst import Keys
from cbtop.profiler.instrument.brick_memory import BrickSizes
from cbtop.profiler.instrument.torch_internals import current_device, memory_of
from cbtop.profiler.instrument.trouble import in_words, log_own_error
from cbtop.protocol.memory_messages import PartMemory, TrainingMemory
from cbtop.protocol.training_messages import MAX_TIMED_STEPS
from cbtop.protocol.vocabulary import TrainingPart

NO_GPU = "torch counts the memory of GPUs only"
NO_RECORD = "no step is recorded by its kernels"


class MemoryCounters(NamedTuple):
    """The counters of torch's allocator for one GPU."""

    allocated_bytes: int
    torch_peak_bytes: int  # peak of allocated_bytes since the process started or the program reset the peak
    reserved_bytes: int
    retries: int  # how often the allocator emptied its cache and tried again


def _counters_here() -> MemoryCounters:  # pragma: no cover - gpu
    """Return the counters of the caller's current GPU."""
    found = memory_of(current_device())
    allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return MemoryCounters(allocated["current"], allocated["peak"], reserved["current"], found["num_alloc_retries"])


def _free_here() -> int:  # pragma: no cover - gpu
    """Return the bytes that the process can still reserve on the caller's current GPU."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    share: float = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()
    allowed_bytes = round(share * int(total_bytes)) - counters_here().reserved_bytes
    return max(0, min(int(free_bytes), allowed_bytes))


# Tests without a device replace these functions.
counters_here: Callable[[], MemoryCounters] = _counters_here
free_here: Callable[[], int] = _free_here


@dataclass(slots=True)
class Peak:
    """The largest memory in one place (module call) or part of a step."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    unused_bytes: int = 0  # memory that was reserved but not allocated, at the moment of the largest allocation
    kept_bytes: int = 0  # what was allocated here and not freed here; less than 0 if more was freed

    def see(self, allocated_bytes: int, reserved_bytes: int) -> None:
        if allocated_bytes > self.allocated_bytes:
            self.allocated_bytes = allocated_bytes
            self.unused_bytes = max(0, reserved_bytes - allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)

    def merge(self, other: Peak) -> None:
        self.see(other.allocated_bytes, other.allocated_bytes + other.unused_bytes)
        self.reserved_bytes = max(self.reserved_bytes, other.reserved_bytes)


class StepMemory:
    """The memory of one recorded step, by place (module call or part of the step)."""

    __slots__ = ("_before", "_most_bytes", "_place", "first", "highest", "peaks", "trouble")

    def __init__(self) -> None:
        self.peaks: dict[Keys, Peak] = {}
        self.highest: Keys = ()  # the place with the largest allocation of the step
        self._most_bytes = 0
        self.trouble = ""  # why the memory is not known
        self._place: Keys | None = None
        self.first = self._before = MemoryCounters(0, 0, 0, 0)
        self._read()
        self.first = self._before

    def enter(self, place: Keys) -> None:
        """Go on in `place`: the module call or part of the step that begins now."""
        if self.trouble:
            return
        before = self._before
        now = self._read()
        if now is not None and self._place is not None:
            peak = self.peaks.get(self._place)
            if peak is None:
                peak = self.peaks[self._place] = Peak()
            peak.see(before.allocated_bytes, before.reserved_bytes)
            is_true = now.torch_peak_bytes > before.torch_peak_bytes
            allocated_bytes = now.torch_peak_bytes if is_true else now.allocated_bytes
            peak.see(allocated_bytes, now.reserved_bytes)
            peak.kept_bytes += now.allocated_bytes - before.allocated_bytes
            if allocated_bytes > self._most_bytes:
                self.highest, self._most_bytes = self._place, allocated_bytes
        self._place = place

    def by_place(self, outputs: Mapping[Keys, BrickSizes]) -> dict[Keys, BrickSizes]:
        """Return the sizes in each place. `outputs` has the tensors that bricks have returned."""
        return {
            place: BrickSizes(
                outputs.get(place, BrickSizes()).outputs, peak.allocated_bytes, peak.reserved_bytes, peak.kept_bytes
            )
            for place, peak in self.peaks.items()
        }

    def _read(self) -> MemoryCounters | None:
        try:
            self._before = counters_here()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.trouble = in_words(error)
            return None
        return self._before

    def end(self) -> MemoryCounters:
        """End the step. Returns the counters at its end."""
        self.enter(())
        return self._before


class RecordedMemory:
    """The memory of the newest recorded steps of one phase."""

    def __init__(self) -> None:
        self._steps: deque[tuple[dict[TrainingPart, Peak], Keys]] = deque(maxlen=MAX_TIMED_STEPS)
        # (number of a step, retries of the allocator until then)
        self._counts: deque[tuple[int, int]] = deque(maxlen=MAX_TIMED_STEPS)
        self._torch_peak_bytes = self._limit_bytes = 0
        self._trouble = ""

    def add(self, memory: StepMemory, part_of: Mapping[Keys, TrainingPart], step: int) -> None:
        """Add the memory of a recorded step that has just ended. It is number `step` of its model."""
        last = memory.end()
        if memory.trouble:
            self._trouble = memory.trouble
            return
        parts: dict[TrainingPart, Peak] = {}
        for place, peak in memory.peaks.items():
            parts.setdefault(part_of.get(place, TrainingPart.OTHER), Peak()).merge(peak)
        if parts:
            self._steps.append((parts, memory.highest))
        if self._counts and last.retries < self._counts[-1][1]:  # the program has reset the counters
            self._counts.clear()
        if not self._counts:
            self._counts.append((step - 1, min(memory.first.retries, last.retries)))
        self._counts.append((step, last.retries))
        self._torch_peak_bytes = last.torch_peak_bytes
        try:
            self._limit_bytes = last.reserved_bytes + free_here()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "the memory that a GPU has left is not known")
            self._limit_bytes = 0

    def message(self, phase: str, model: str, node_of: Callable[[Keys], int]) -> TrainingMemory:
        """Return the message about these steps. `node_of` returns the node of a place, or 0."""
        if not self._steps:
            return TrainingMemory(phase, model, 0, why_unknown=self._trouble or NO_RECORD)
        found: dict[TrainingPart, Peak] = {}
        for parts, _ in self._steps:
            for part, peak in parts.items():
                found.setdefault(part, Peak()).merge(peak)
        peaks = [max(parts.values(), key=_allocated) for parts, _ in self._steps]
        at = max(range(len(peaks)), key=lambda at: peaks[at].allocated_bytes)
        (first, retries), (last, until) = self._counts[0], self._counts[-1]
        return TrainingMemory(
            phase,
            model,
            len(self._steps),
            tuple(PartMemory(part, one.allocated_bytes, one.reserved_bytes) for part, one in found.items()),
            node=max(0, node_of(self._steps[at][1])),
            unused_bytes=peaks[at].unused_bytes,
            torch_peak_bytes=self._torch_peak_bytes,
            limit_bytes=self._limit_bytes,
            retries=until - retries,
            counted_steps=last - first,
            lowest_allocated_bytes=min(peak.allocated_bytes for peak in peaks),
            lowest_reserved_bytes=min(max(map(_reserved, parts.values())) for parts, _ in self._steps),
        )


def _allocated(peak: Peak) -> int:
    return peak.allocated_bytes


def _reserved(peak: Peak) -> int:
    return peak.reserved_bytes
