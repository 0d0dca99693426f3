"""A model of eight equal blocks. With the argument `faulty`, one of them has a wider hidden layer."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
WIDTH, SLOW = 256, 5


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


hidden = [1024] * 8
if sys.argv[1] == "faulty":
    hidden[SLOW] = 2048
model, x = Model(hidden).eval(), torch.randn(1, 64, WIDTH)
with torch.no_grad():
    for _ in range(400):
        model(x)
