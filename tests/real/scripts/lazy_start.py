"""A test program. With the argument `faulty`, its model builds a table in each of its first five steps."""

import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)
        )
        self.head = nn.Linear(512, 100)

    def forward(self, x):
        self.steps += 1
        if sys.argv[1] == "faulty" and self.steps <= 5:
            time.sleep(0.2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model, x = Model().eval(), torch.randn(1, 64, 512)
with torch.no_grad():
    for _ in range(300):
        model(x)
