"""An encoder with batches of equal token counts. With the argument `faulty`, two shapes alternate."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + self.out((query @ key.transpose(-1, -2)).softmax(-1) @ value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 100)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Model().eval()
shapes = [(16, 32), (1, 512)] if sys.argv[1] == "faulty" else [(16, 32)]
batches = [torch.randint(0, 100, shape) for shape in shapes]
with torch.no_grad():
    for step in range(600):
        model(batches[step % len(batches)])
