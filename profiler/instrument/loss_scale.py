"""Announces the scale of a gradient scaler, and how often the scale fell."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cbtop.profiler.instrument.gradients import is_observed
from cbtop.profiler.instrument.late_figures import LateFigures, can_read
from cbtop.protocol import clock
from cbtop.protocol.training_messages import MAX_TIMED_STEPS, LossScale

if TYPE_CHECKING:
    from weakref import ref

    from cbtop.profiler.instrument.optimizer_gradients import OptimizerGradients

#: A scaler begins with a scale that is too large, and halves it in most of its first steps. This many first updates
#: may lower the scale without being counted as a problem.
FIRST_UPDATES = 32
ANNOUNCE_NS = 1_000_000_000
EARLY = 4, 16  # announce the scale at once after these numbers of updates
MAX_WAITING = 4  # at most this many scales are on their way from a device


class ScalerHistory:
    """The scale of one gradient scaler after each of its updates."""

    def __init__(self, scaler: ref[Any]) -> None:
        self.scaler = scaler
        self.optimizer: OptimizerGradients | None = None  # the optimizer of the newest step with this scaler
        self._updates = self._falls = 0
        self._scale: float | None = None  # the scale after the latest update
        # The scale before and after each update.
        self._latest: deque[tuple[float, float]] = deque(maxlen=MAX_TIMED_STEPS)
        self._waiting: deque[LateFigures] = deque(maxlen=MAX_WAITING)
        self._told_ns = 0

    def before_update(self, scale: Any) -> None:
        """Store the scale before an update, because the program may have set it.

        A scale on a device is read only the first time.
        """
        is_new = self._scale is None and not self._waiting
        if type(scale) is Tensor and (is_new or scale.device.type == "cpu"):
            self._scale = None
            self._read(scale)

    def after_update(self, scale: Any) -> None:
        """Store the scale after an update. Announces the scales, unless this was done a short while ago."""
        self._read(scale)
        now_ns = clock.perf_counter_ns()
        model = None if self.optimizer is None or self.optimizer.model is None else self.optimizer.model()
        is_early = now_ns - self._told_ns < ANNOUNCE_NS and self._updates not in EARLY
        if self.optimizer is not None and model is not None and self._updates and not is_early:
            self._told_ns = now_ns
            model.profiler.announce(self._message(self.optimizer.phase, model.model))

    def _read(self, scale: Any) -> None:
        if type(scale) is Tensor and not is_observed() and can_read(scale.device):
            self._waiting.append(LateFigures(scale.detach().reshape(1)))
        while self._waiting and (figures := self._waiting[0].read()) is not None:
            self._waiting.popleft()
            self._take(*figures)

    def _take(self, scale: float) -> None:
        before, self._scale = self._scale, scale
        if before is None:
            return
        self._updates += 1
        self._falls += _fell(before, scale)
        if self._updates > FIRST_UPDATES:
            self._latest.append((before, scale))

    def _message(self, phase: str, model: str) -> LossScale:
        first = next((at for at, (before, after) in enumerate(self._latest) if _fell(before, after)), None)
        latest = [] if first is None else list(self._latest)[first:]
        scale = self._scale or 0.0
        return LossScale(
            phase,
            model,
            scale,
            self._updates,
            self._falls,
            latest[0][0] if latest else scale,
            len(latest),
            sum(_fell(before, after) for before, after in latest),
            sum(after > before for before, after in latest),
        )


def _fell(before: float, after: float) -> bool:
    """Return whether an update lowered the scale.

    A scale of 0 counts, too. It stays 0, and all steps are skipped.
    """
    return after < before or not before
