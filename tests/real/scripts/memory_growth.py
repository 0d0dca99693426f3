"""A loop of steps. With the argument `faulty`, it keeps all logits, so its memory grows.

With `healthy`, it keeps one.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)
        )
        self.head = nn.Linear(512, 8192)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Model().eval()
x, kept = torch.randn(1, 128, 512), []
with torch.no_grad():
    for _ in range(150):
        kept.append(model(x))
        if sys.argv[1] == "healthy":
            del kept[:-1]
