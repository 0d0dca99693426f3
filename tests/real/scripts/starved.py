"""A model on one CPU. With the argument `faulty`, two busy processes run on the same CPU."""

import os
import subprocess
import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


cpu = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpu})
others = []
if sys.argv[1] == "faulty":
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2)]
model = Model().eval()
x = torch.randn(1, 64, 512)
end = time.perf_counter() + 5
with torch.no_grad():
    while time.perf_counter() < end:
        model(x)
for other in others:
    other.kill()
    other.wait()
