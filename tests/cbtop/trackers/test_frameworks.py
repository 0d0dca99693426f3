"""The callbacks run in the real Trainers, and the trackers get the metrics. Afterwards no model is attached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import CBTOP, DEADLINE_S

MODEL = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
from cbtop.profiler.instrument import attachment

torch.set_num_threads(1)
STEPS = 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return {"loss": loss}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, at):
        words = torch.arange(at, at + 16) % 100
        return {"ids": words, "labels": words}


seen = []
"""
TRANSFORMERS = """
import tempfile
from transformers import Trainer, TrainerCallback, TrainingArguments
from cbtop.trackers import TransformersCallback


class Tracker(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        seen.append(dict(logs))


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=STEPS, logging_steps=10, report_to=[],
    use_cpu=True, save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=Language(), args=arguments, train_dataset=Samples(), callbacks=[Tracker()])
TransformersCallback().add_to(trainer)
trainer.train()
history = [one for one in trainer.state.log_history if "cbtop/step_ms" in one]
assert len(history) == len([one for one in seen if "cbtop/step_ms" in one]), trainer.state.log_history
"""
LIGHTNING = """
import lightning
from lightning.pytorch.loggers import CSVLogger
from cbtop.trackers import LightningCallback


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Language()

    def training_step(self, batch, number):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    max_steps=STEPS, accelerator="cpu", log_every_n_steps=10, logger=CSVLogger(sys.argv[1]),
    callbacks=[LightningCallback()], enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=4))
import csv
with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
    seen += [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from cbtop.trackers import AccelerateTracker


class Tracker(GeneralTracker):
    name, requires_logging_directory, tracker = "mine", False, None

    def log(self, values, step=None, **kwargs):
        seen.append(values | {"step": step})


accelerator = Accelerator(cpu=True, log_with=[Tracker()])
accelerator.init_trackers("run")
AccelerateTracker(accelerator)
model = Language()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(Samples(), batch_size=4)
)
for number, batch in enumerate(loader, 1):
    loss = model(**batch)["loss"]
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if number % 10 == 0:
        accelerator.log({"loss": float(loss)}, step=number)
accelerator.end_training()
"""
END = """
print(json.dumps({"seen": seen, "attached": len(attachment.attachments()), "mine": 1}))
"""
PROGRAMS = {"transformers": TRANSFORMERS, "lightning": LIGHTNING, "accelerate": ACCELERATE}


def run(tmp_path: Path, package: str, *before: str) -> dict[str, Any]:
    """Run a training program. Returns what its trackers have seen."""
    for needed in ("torch", "accelerate", package):
        pytest.importorskip(needed, reason=f"{needed} is not installed: make torch")
    path = tmp_path / "program.py"
    path.write_text(MODEL + PROGRAMS[package] + END, encoding="utf-8")
    done = subprocess.run(
        [*before, sys.executable, str(path), str(tmp_path)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("package", PROGRAMS)
def test_the_trackers_get_rates_and_parts_of_training_steps(tmp_path: Path, package: str) -> None:
    found = run(tmp_path, package)
    logged = [one for one in found["seen"] if "cbtop/step_ms" in one]
    assert len(logged) >= 3  # the first log may be of the warm-up alone
    for one in logged:
        assert 0 < one["cbtop/step_ms"] < 10_000
        assert one["cbtop/tokens_per_sec"] == pytest.approx(1e3 * 4 * 16 / one["cbtop/step_ms"], rel=0.2)
    parts = {name for one in logged for name in one}
    assert {"cbtop/percent/forward", "cbtop/percent/backward", "cbtop/percent/optimizer"} <= parts
    recorded = next(one for one in logged if "cbtop/percent/forward" in one)
    assert sum(value for name, value in recorded.items() if name.startswith("cbtop/percent/")) == pytest.approx(100)
    assert found["attached"] == 0


def test_under_cbtop_run_its_own_profiler_is_read(tmp_path: Path) -> None:
    found = run(tmp_path, "accelerate", *CBTOP, "run", "--quiet", "--overhead", "100%", "--")
    assert len([one for one in found["seen"] if "cbtop/percent/forward" in one]) >= 3
    assert found["attached"] == 1
