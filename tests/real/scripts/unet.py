"""A network like a UNet with eight equal blocks in its middle. With the argument `faulty`, one of them is slow."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, kernel=3):
        super().__init__()
        self.norm = nn.GroupNorm(4, 32)
        self.first = nn.Conv2d(32, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, kernel, padding=kernel // 2)

    def forward(self, x):
        return x + self.second(self.first(self.norm(x)).relu())


class UNet(nn.Module):
    def __init__(self, kernels):
        super().__init__()
        self.inside, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(kernel) for kernel in kernels)
        self.up, self.outside = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x):
        wide = self.inside(x)
        x = self.down(wide)
        for block in self.blocks:
            x = block(x)
        return self.outside(torch.cat([self.up(x), wide], 1))


kernels = [3] * 8
if sys.argv[1] == "faulty":
    kernels[6] = 7
model, x = UNet(kernels).eval(), torch.randn(1, 3, 64, 64)
with torch.no_grad():
    for _ in range(700):
        model(x)
