"""A test program with large products: in float32 with the argument `faulty`, in bfloat16 autocast with `healthy`."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().eval()
x = torch.randn(1, 256, 1024)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "healthy"):
    for _ in range(60):
        model(x)
