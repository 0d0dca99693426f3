"""A callback for the Trainer of transformers. It adds step metrics to what the Trainer logs."""

from __future__ import annotations

from typing import Any, Self

from transformers import TrainerCallback

from cbtop.profiler.profiler import BrickProfiler
from cbtop.trackers.step_metrics import BRICKS, StepMetrics


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # the base class is the host's
    """Adds the metrics of training steps to each log of a Trainer: `TransformersCallback().add_to(trainer)`.

    The Trainer calls its callbacks in order, and its trackers are callbacks. `add_to` puts this callback before them.
    With `Trainer(callbacks=[TransformersCallback()])`, only `trainer.state.log_history` has the metrics.
    """

    def __init__(self, profiler: BrickProfiler | None = None, bricks: int = BRICKS) -> None:
        self._metrics = StepMetrics(profiler, bricks)

    def add_to(self, trainer: Any) -> Self:
        """Make this the first callback of `trainer`."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._metrics.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:  # a log of training steps, and not of an evaluation
            found = self._metrics.since_last()
            logs.update(found)
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()

    def end(self) -> None:
        """Detach the models. Call this method if the training was interrupted, because the Trainer does not tell."""
        self._metrics.end()
