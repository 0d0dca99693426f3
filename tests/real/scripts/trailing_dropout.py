"""A model of blocks that end in Dropout. The Dropout is off, except in one block with the argument `faulty`."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(256, 512), nn.Linear(512, 256), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(8))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(x)


model, x = Model().eval(), torch.randn(1, 256, 256)
if sys.argv[1] == "faulty":
    model.layers[3].train()
with torch.no_grad():
    for _ in range(350):
        model(x)
