"""Tests of sampled functions in real programs: the planted function is named, and its healthy twin names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.profiler.cpu_sampling import CAN_SAMPLE
from cbtop.protocol.sample_messages import BETWEEN_STEPS
from cbtop.protocol.vocabulary import TrainingPart
from cbtop.viewmodels.cpu_samples import SampledTimeView
from tests.real.programs import view_of

pytest.importorskip("torch", reason="torch is not installed: make torch")
pytestmark = pytest.mark.skipif(not CAN_SAMPLE, reason="the sampler is not compiled here")

# A program that does something slow between its steps, in its loader, and after a training step.
PROGRAM = """
import time
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

def busy(ms):
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass

def tokenize():
    busy(4)
"""
BETWEEN = """
model.eval()
with torch.no_grad():
    for _ in range(400):
        model(torch.ones(4, 64))
        tokenize()
"""
TRAINING = """
class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return self.decode()

    def decode(self):
        end = time.perf_counter() + 0.006
        while time.perf_counter() < end:
            pass
        return torch.ones(64)

def log():
    end = time.perf_counter() + 0.006
    while time.perf_counter() < end:
        pass

optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(Pictures(), batch_size=1):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    log()
"""


def place(program: str, directory: Path, name: str) -> SampledTimeView:
    (found,) = [found for found in view_of(program, directory).sampled if found.place == name]
    return found


# The default run skips this test, because tests/profiler/test_cpu_sampling.py samples such a program without torch.
@pytest.mark.slow
def test_the_function_between_steps_is_named(tmp_path: Path, runtime: Path) -> None:
    found = place(PROGRAM + BETWEEN, tmp_path, BETWEEN_STEPS)
    assert found.is_enough
    assert found.functions[0].name == "busy"


@pytest.mark.slow
def test_a_training_step_names_its_loader_and_its_loop(tmp_path: Path, runtime: Path) -> None:
    program = PROGRAM + TRAINING
    for part, name in ((TrainingPart.DATA_WAIT, "Pictures.decode"), (TrainingPart.OTHER, "log")):
        assert place(program, tmp_path / part, part).functions[0].name == name
