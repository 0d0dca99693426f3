"""Short prompts, then a long step. With the argument `faulty`, the long step hangs.

With `healthy`, it has many tokens.
"""

import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.delay = nn.Linear(256, 1024), nn.Linear(1024, 256), 0.0

    def forward(self, x):
        time.sleep(self.delay)
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 256)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(256, 100)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def seconds(length):
    begun = time.perf_counter()
    model(torch.zeros(1, length, dtype=torch.long))
    return time.perf_counter() - begun


model = Model().eval()
with torch.no_grad():
    each = min(seconds(256) for _ in range(200)) / 256
    if sys.argv[1] == "faulty":
        model.layers[3].delay = 15
        seconds(256)
    else:
        seconds(int(6 / each))
