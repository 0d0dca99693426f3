"""Four blocks with a scan. The faulty program runs the scan in a block's own code.

The healthy program runs it in a module.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
WIDTH = 192


class Decay(nn.Module):
    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = 0.9 * state + x[:, at]
            states.append(state)
        return torch.stack(states, 1)


class ScanBlock(nn.Module):
    def __init__(self, has_module):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scan = Decay() if has_module else None

    def forward(self, x):
        y = self.up(self.norm(x))
        return self.down(Decay.forward(self, y) if self.scan is None else self.scan(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ScanBlock(sys.argv[1] == "healthy") for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model, x = Model(), torch.randn(2, 48, WIDTH)
if sys.argv[1].endswith("train"):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(60):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    with torch.no_grad():
        for _ in range(150):
            model.eval()(x)
