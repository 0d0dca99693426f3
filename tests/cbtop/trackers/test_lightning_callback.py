"""The callback for Lightning sends metrics when the Trainer logs, and never breaks the training."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

# Importing Lightning replaces `torch.compile`. So it is imported in a process of its own.
SCRIPT = """
import json, sys
from types import SimpleNamespace
from cbtop.trackers.lightning_callback import LightningCallback

found = {}
for every in (0, 1, 2):
    steps = found[every] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: steps.append(step))
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=every, loggers=[logger])
    callback = LightningCallback()
    callback.on_train_start(trainer, None)
    for step in range(1, 5):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, None, None, None, step)
    callback.on_train_end(trainer, None)
json.dump(found, sys.stdout)
"""


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed: make torch")
def test_metrics_are_sent_as_often_as_the_trainer_logs() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"0": [], "1": [1, 2, 3, 4], "2": [2, 4]}
