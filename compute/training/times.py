"""Measure the times of the parts of training steps, and add them up for an announcement."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from cbtop.protocol.training_messages import MAX_TIMED_STEPS, PartTime, TrainingTimes
from cbtop.protocol.vocabulary import TRAIN, TrainingPart


class PartTimes:
    """Adds up the times of the parts of the latest training steps. Each part begins when the previous one ends."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._steps: deque[dict[TrainingPart, int]] = deque(maxlen=MAX_TIMED_STEPS)
        self._parts: dict[TrainingPart, int] = {}
        # : Time at which the latest part ended, in ns.
        self.ended_ns = clock_ns()

    def begin(self) -> None:
        """Begin a step now. The parts of a step that has not ended are forgotten."""
        self._parts = {}
        self.ended_ns = self._clock_ns()

    def end(self, part: TrainingPart) -> None:
        """Count the time since the last part ended as `part`."""
        now_ns = self._clock_ns()
        self._parts[part] = self._parts.get(part, 0) + now_ns - self.ended_ns
        self.ended_ns = now_ns

    def end_step(self) -> None:
        """End the step, and begin the next one.

        The time since the last part ended counts as the part OTHER.
        """
        self.end(TrainingPart.OTHER)
        self._steps.append(self._parts)
        self._parts = {}

    def latest(self) -> TrainingTimes:
        """Return the sums of the parts over the latest steps. At least one step must have ended."""
        parts = []
        for part in TrainingPart:
            times_ns = [step.get(part, 0) for step in self._steps]
            if any(times_ns):
                parts.append(PartTime(part, sum(times_ns), median_low(times_ns)))
        return TrainingTimes(TRAIN, "", len(self._steps), sum(part.sum_ns for part in parts), tuple(parts))
