"""A tracker for Accelerate. It sends step metrics to the other trackers of the Accelerator."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from cbtop.profiler.profiler import BrickProfiler
from cbtop.trackers.step_metrics import BRICKS, StepMetrics


class AccelerateTracker(GeneralTracker):  # type: ignore[misc]  # the base class is the host's
    """Sends the metrics of training steps to the trackers of an Accelerator, at each `accelerator.log(…, step=…)`.

    `AccelerateTracker(accelerator)` after `accelerator.init_trackers(…)`. `accelerator.end_training()` ends it. Only
    the main process has trackers.
    """

    name = "cbtop"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, accelerator: Any, profiler: BrickProfiler | None = None, bricks: int = BRICKS) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._metrics = StepMetrics(profiler, bricks)
        if accelerator.is_main_process:
            accelerator.trackers.append(self)
            self._metrics.begin()

    @property
    def tracker(self) -> StepMetrics:
        """The source of the metrics."""
        return self._metrics

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Send the metrics since the last log to the other trackers."""
        found = self._metrics.since_last()
        for other in self._accelerator.trackers:
            if other is not self and found:
                other.log(found, step=step)

    def finish(self) -> None:
        """Detach the models. `accelerator.end_training()` calls this method."""
        self._metrics.end()
