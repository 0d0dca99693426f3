"""A CUPTI window that records the kernels of several training steps in a row.

Opening and closing CUPTI takes 16 ms and more on an H200, however many steps are recorded in between. The host does
not wait for the device between the steps. If no training step follows, an evaluation or the end of the process closes
the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cbtop.profiler.device.kernel_burst import MAX_RECORDS, KernelBurstResults, Keys, LaunchedKernel
from cbtop.profiler.instrument.kernel_bursts import KernelRecording, Owner
from cbtop.profiler.instrument.kernel_steps import MOST_STEPS, RECORDS_PER_LAUNCH
from cbtop.protocol import clock

if TYPE_CHECKING:
    from cbtop.profiler.instrument.timed_model import TimedModel
    from cbtop.profiler.instrument.training import EndedStep

# Windows of several steps may cost FLOOR_SHARE of this time until FLOOR steps are recorded.
FIRST_NS = 15_000_000_000
MOST_OPEN_NS = 1_000_000_000  # a window that has been open for this time gets no further step


class TrainedStep(NamedTuple):
    """A training step that has ended in an open window. Its kernels are known when the window is closed.

    `steps` are the `GpuTrainingSteps` of the step's model, and `calls` the `StepKernels` of the step.
    """

    steps: Any
    model: TimedModel
    name: str
    ended: EndedStep
    calls: Any


class TrainingResults(KernelBurstResults):
    """The kernels of a window, by step. The first key of a kernel is the number of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.covered_ns = Counter()
        self.each: dict[Hashable, KernelBurstResults] = {}

    def add(self, keys: Keys, kernel: LaunchedKernel, duration_ns: int) -> None:
        found = self.each.get(keys[0])
        if found is None:
            found = self.each[keys[0]] = KernelBurstResults()
        found.add(keys, kernel, duration_ns)

    def of(self, number: int) -> KernelBurstResults:
        """Return the kernels of the step with this `number` in its window."""
        found = self.each.get(number) or KernelBurstResults()
        covered: Mapping[Keys, int] = self.covered_ns or {}
        found.covered_ns = Counter({keys: took_ns for keys, took_ns in covered.items() if keys and keys[0] == number})
        return found

    @property
    def launches(self) -> int:
        return sum(durations.count for one in self.each.values() for durations in one.kernels.values())


class TrainingWindow(KernelRecording):
    """Records the kernels of up to `most` training steps. `begun_ns` is when cbtop began to open CUPTI."""

    def __init__(self, steps: Owner, window: Any, stream: int, most: int, begun_ns: int) -> None:
        super().__init__(steps, window, 0, stream)
        self.most = most
        self.begun_ns, self.opened_ns, self.closing_ns = begun_ns, clock.perf_counter_ns(), 0
        self.steps: list[TrainedStep] = []

    @property
    def goes_on(self) -> bool:
        """Whether the window can record another step."""
        is_full = len(self.steps) >= self.most or clock.perf_counter_ns() - self.opened_ns >= MOST_OPEN_NS
        return self.window.is_on and not is_full and not self.window.has_graphs

    def end_step(self) -> None:
        """Close the window."""
        self.closing_ns = clock.perf_counter_ns()
        super().end_step()

    def paid_ns(self, plain_ns: float, closed_ns: int) -> int:
        """Return the cost of the window in ns. Its steps would have taken `plain_ns` each."""
        ended_ns = self.steps[-1].ended.ended_ns if self.steps else self.opened_ns
        paid_ns = ended_ns - self.begun_ns - len(self.steps) * plain_ns + closed_ns - self.closing_ns
        return max(0, round(paid_ns))

    def most_next(self, launches: int, plain_ns: float, paid_ns: int, missing: int, left_ns: float) -> int:
        """Return how many steps the next window may have, after this one. Its steps had `launches`.

        While steps are `missing` for reliable figures, a window has as many as possible within `left_ns`, which
        recording may still cost. Later, its steps cost about as much as opening and closing.
        """
        count = max(1, len(self.steps))
        fixed_ns = self.opened_ns - self.begun_ns + clock.perf_counter_ns() - self.closing_ns
        wanted = -(-fixed_ns * count // max(1, paid_ns - fixed_ns))
        if missing > 0:
            wanted = min(missing, round(left_ns * count // max(1, paid_ns)))
        by_time = MOST_OPEN_NS // max(1, round(plain_ns))
        by_records = MAX_RECORDS // 2 * count // max(1, RECORDS_PER_LAUNCH * launches)
        return max(1, min(MOST_STEPS, wanted, by_time, by_records))


def dated(burst: KernelBurstResults, key: Hashable) -> KernelBurstResults:
    """Return a copy of `burst`, with `key` as the key of the step of all kernels.

    This key was unknown when the step began.
    """
    found = KernelBurstResults()
    found.kernels = {((key, *keys[1:]), kernel): durations for (keys, kernel), durations in burst.kernels.items()}
    found.steps[key] = 1
    found.unplaced, found.lost, found.left_out = burst.unplaced, burst.lost, burst.left_out
    return found
