"""A test program with compiled layers.

With the argument `faulty`, each has a graph break, and texts have two lengths.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
IS_FAULTY = sys.argv[1] == "faulty"


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        up = self.up_proj(x).relu()
        if IS_FAULTY:
            torch._dynamo.graph_break()
        return self.down_proj(up)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().eval()
for layer in model.layers:
    layer.mlp.compile(backend="eager", dynamic=False)
with torch.no_grad():
    for length in (8, 8, 8, 9 if IS_FAULTY else 8, 8):
        model(torch.ones(1, length, 64))
