"""A model of six blocks. The first is a little wider by design.

With the argument `faulty`, the fifth is slower still.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
WIDTH = 256


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.ModuleList(Block(each) for each in hidden)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


hidden = [1120, 1024, 1024, 1024, 1024, 1024]
if sys.argv[1] == "faulty":
    hidden[0], hidden[4] = 1280, 1792
model, x = Model(hidden).eval(), torch.randn(1, 64, WIDTH)
with torch.no_grad():
    for _ in range(600):
        model(x)
