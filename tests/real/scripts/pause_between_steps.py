"""A loop of steps. With the argument `faulty`, the loop sleeps between the steps."""

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


model = Model().eval()
x = torch.randn(1, 64, 512)
with torch.no_grad():
    for _ in range(150):
        model(x)
        if sys.argv[1] == "faulty":
            time.sleep(0.03)
