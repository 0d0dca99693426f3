"""A compiled model reads texts of varying lengths with the argument `faulty`. With `healthy` they are padded."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 256)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)
        )

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().eval()
compiled = torch.compile(model, dynamic=False)
with torch.no_grad():
    compiled(torch.zeros(1, 64, dtype=torch.long))
    for step in range(1400):
        length = 1 + step // 200 * 8 if sys.argv[1] == "faulty" else 64
        compiled(torch.zeros(1, length, dtype=torch.long))
