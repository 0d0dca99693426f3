"""Divides the time of one thread between the parts of a training step."""

from __future__ import annotations

from collections.abc import Callable

from cbtop.profiler.cpu_sampling import CODES, NO_STEP, end_training_step, show_part
from cbtop.protocol.vocabulary import TrainingPart

MOST_RANGES = 8_000  # at most this many ranges of time are kept for the record of a step

Parts = dict[TrainingPart, int]  # part of a training step -> its time in ns


class StepClock:
    """Divides the time of one thread between the parts of a training step.

    If parts are nested, time counts for the innermost part. From the end of a forward to the beginning of the next
    part, time counts for the loss. The time of cbtop's own work counts for no part.
    """

    __slots__ = ("_around", "_at_ns", "_part", "begun_ns", "changed", "has_backward", "own_ns", "parts", "ranges")

    def __init__(self) -> None:
        # a function that is called when a part of the step begins; its argument is the part
        self.changed: Callable[[TrainingPart], None] | None = None
        self.restart(None)

    def restart(self, now_ns: int | None) -> None:
        """Begin a step at `now_ns`. If `now_ns` is None, the step begins together with its next part."""
        self.begun_ns, self._at_ns = now_ns, now_ns or 0
        self._part = TrainingPart.OTHER
        self._around: list[TrainingPart] = []
        self.own_ns = 0  # time in ns of cbtop's own work, in no part
        self.parts: Parts = {}
        # Each item is a part of the step, its begin and its end in ns.
        self.ranges: list[tuple[TrainingPart, int, int]] = []
        self.has_backward = False
        self._show_part()
        end_training_step(False)  # after `finish`, nothing is left to drop

    def _show_part(self) -> None:
        """Tell the sampler of functions which part runs."""
        show_part(NO_STEP if self.begun_ns is None else CODES[self._part])

    @property
    def is_in(self) -> TrainingPart | None:
        """The part of the step that the running call belongs to. None if no call of a part is running."""
        return self._part if self._around else None

    @property
    def depth(self) -> int:
        """Number of running calls that belong to parts."""
        return len(self._around)

    def is_inside(self, part: TrainingPart) -> bool:
        """Return whether a call that belongs to `part` is running, also if another call runs inside of it."""
        return self.is_in is part or part in self._around

    def begin(self, part: TrainingPart, now_ns: int) -> None:
        """Begin a call that belongs to `part`."""
        if self.begun_ns is None:
            self.restart(now_ns)
        self._count(now_ns)
        self._around.append(self._part)
        self._part = part
        self._show_part()
        if self.changed is not None:
            self.changed(part)

    def end(self, now_ns: int) -> None:
        """End the innermost call that belongs to a part."""
        self._end(now_ns)
        self._show_part()
        if self.changed is not None:
            self.changed(self._part)

    def _end(self, now_ns: int) -> None:
        self._count(now_ns)
        ended = self._part
        if self._around:
            self._part = self._around.pop()
        if ended is TrainingPart.BACKWARD:
            self.has_backward = True
        if self._around and self._part not in (TrainingPart.OPTIMIZER, TrainingPart.LOSS):
            return
        if ended is TrainingPart.FORWARD:
            self._part = TrainingPart.LOSS
        elif ended is TrainingPart.BACKWARD:  # an optimizer's closure, or the loop itself, has called the backward
            self._part = TrainingPart.OPTIMIZER if self._around else TrainingPart.OTHER

    def leave_out(self, from_ns: int, until_ns: int) -> None:
        """Count the time between `from_ns` and `until_ns` for no part, because cbtop itself was working.

        If this interrupts a call of a part, the range of the call stays in one piece, as if the work had come before.
        """
        self._count(from_ns)
        self._at_ns = until_ns
        self.own_ns += until_ns - from_ns
        if self._around and self.ranges and self.ranges[-1][0] is self._part:
            _, begin_ns, end_ns = self.ranges[-1]
            self.ranges[-1] = self._part, begin_ns + until_ns - from_ns, end_ns + until_ns - from_ns

    def finish(self, now_ns: int) -> tuple[int, Parts, list[tuple[TrainingPart, int, int]]]:
        """End the step, and begin the next.

        Returns three values of the ended step: its begin in ns, the times of its parts, and the ranges of its parts.
        """
        self._count(now_ns)
        begun_ns = now_ns if self.begun_ns is None else self.begun_ns
        parts, ranges = self.parts, self.ranges
        end_training_step(True)
        self.restart(now_ns)
        return begun_ns, parts, ranges

    def _count(self, now_ns: int) -> None:
        if self.begun_ns is not None:
            self.parts[self._part] = self.parts.get(self._part, 0) + now_ns - self._at_ns
            # A call of a part inside a call of the same part is the same range.
            if self.ranges and self._around and self.ranges[-1][::2] == (self._part, self._at_ns):
                self.ranges[-1] = self._part, self.ranges[-1][1], now_ns
            elif len(self.ranges) < MOST_RANGES:
                self.ranges.append((self._part, self._at_ns, now_ns))
            self._at_ns = now_ns
