"""A callback for Lightning. It sends step metrics to the loggers of the Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from cbtop.profiler.profiler import BrickProfiler
from cbtop.trackers.step_metrics import BRICKS, StepMetrics


class LightningCallback(Callback):  # type: ignore[misc]  # the base class is the host's
    """Sends the metrics of training steps to all loggers: `Trainer(callbacks=[LightningCallback()])`.

    They are sent every `log_every_n_steps` steps of the Trainer, and never if it is 0.
    """

    def __init__(self, profiler: BrickProfiler | None = None, bricks: int = BRICKS) -> None:
        self._metrics = StepMetrics(profiler, bricks)
        self._sent_at = 0  # number of the optimizer step at which metrics were last sent

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._sent_at = trainer.global_step
        self._metrics.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if step == self._sent_at or not every or step % every:
            return
        self._sent_at = step
        found = self._metrics.since_last()
        for logger in trainer.loggers:
            logger.log_metrics(found, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._metrics.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._metrics.end()
