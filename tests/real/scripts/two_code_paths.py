"""A loop of steps.

Every third step takes a slow path with the argument `faulty`, and has a longer batch with `healthy`.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.steps = nn.Embedding(100, 256), 0
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3)
        )
        self.head = nn.Linear(256, 100)

    def forward(self, ids):
        self.steps += 1
        x = self.embedding(ids)
        rounds = 4 if sys.argv[1] == "faulty" and self.steps % 3 == 0 else 1
        for _ in range(rounds):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


model = Model().eval()
lengths = [64] if sys.argv[1] == "faulty" else [64, 64, 256]
batches = [torch.randint(0, 100, (2, length)) for length in lengths]
with torch.no_grad():
    for step in range(300):
        model(batches[step % len(batches)])
