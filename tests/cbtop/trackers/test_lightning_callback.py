"""The callback for Lightning sends metrics when the Trainer logs, and never breaks the training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lightning")

from cbtop.trackers.lightning_callback import LightningCallback


@pytest.mark.parametrize(("every", "sent_at"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_metrics_are_sent_as_often_as_the_trainer_logs(every: int, sent_at: list[int]) -> None:
    steps: list[int] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: steps.append(step))
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=every, loggers=[logger])
    callback = LightningCallback()
    callback.on_train_start(trainer, None)
    for step in range(1, 5):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, None, None, None, step)
    callback.on_train_end(trainer, None)
    assert steps == sent_at
