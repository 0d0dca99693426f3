"""A model. With the argument `faulty`, it runs pure Python code between its modules."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if sys.argv[1] == "faulty":
                scale = sum(one * one for one in range(6000))
                for _ in range(10):
                    x = x * (1 + 1 / scale)
        return x


model, x = Model().eval(), torch.randn(1, 64, 256)
with torch.no_grad():
    for _ in range(800):
        model(x)
