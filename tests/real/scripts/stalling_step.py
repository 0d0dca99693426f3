"""A loop of steps. With the argument `faulty`, one step in 40 waits for 0.3 s, as for a page or a lock."""

import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.calls = nn.Linear(256, 256), 0

    def forward(self, x):
        self.calls += 1
        if sys.argv[1] == "faulty" and self.calls % 40 == 0:
            time.sleep(0.3)
        return self.proj(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4))
        )
        self.head = Head()

    def forward(self, x):
        return self.head(self.blocks(x))


model, x = Model().eval(), torch.randn(1, 64, 256)
with torch.no_grad():
    for _ in range(400):
        model(x)
