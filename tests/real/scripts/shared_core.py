"""An encoder like ALBERT: all layers share one core and have their own adapters.

With the argument `faulty`, one adapter is wider.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
WIDTH, SLOW = 256, 3


class Layer(nn.Module):
    def __init__(self, core, rank):
        super().__init__()
        self.core, self.down, self.up = core, nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)

    def forward(self, x):
        x = x + self.core(x)
        return x + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        core = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))
        self.layers = nn.ModuleList(Layer(core, rank) for rank in ranks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


ranks = [64] * 8
if sys.argv[1] == "faulty":
    ranks[SLOW] = 1024
model, x = Model(ranks).eval(), torch.randn(1, 64, WIDTH)
with torch.no_grad():
    for _ in range(600):
        model(x)
