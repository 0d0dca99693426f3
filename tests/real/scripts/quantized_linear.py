"""Linear layers: quantised dynamically to int8 with the argument `faulty`, float32 with `healthy`."""

import sys
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
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
if sys.argv[1] == "faulty":
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
x = torch.randn(1, 8, 1024)
with torch.no_grad():
    for _ in range(800):
        model(x)
