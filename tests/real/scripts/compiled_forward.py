"""A test program with a model. Its forward is compiled only with the argument `faulty`."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(256, 100)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model, x = Model().eval(), torch.randn(1, 64, 256)
if sys.argv[1] == "faulty":
    model.forward = torch.compile(model.forward)
with torch.no_grad():
    model(x)
    for _ in range(900):
        model(x)
