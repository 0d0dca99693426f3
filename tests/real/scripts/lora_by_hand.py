"""Linear layers with unmerged LoRA adapters, which are active with the argument `faulty` and off with `healthy`."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class LoraLinear(nn.Linear):
    def __init__(self, inside, outside, rank):
        super().__init__(inside, outside)
        self.a, self.b = nn.Linear(inside, rank, bias=False), nn.Linear(rank, outside, bias=False)
        self.is_on = True

    def forward(self, x):
        y = super().forward(x)
        return y + self.b(self.a(x)) if self.is_on else y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = LoraLinear(512, 2048, 256), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model, x = Model().eval(), torch.randn(1, 64, 512)
for layer in model.layers:
    layer.up.is_on = sys.argv[1] == "faulty"
with torch.no_grad():
    for _ in range(250):
        model(x)
