"""A program with a model of 126 layers and a model of several thousand modules."""

import torch
from small import IDS, Net, Stack, show, vectors
from torch import nn

deep = Net(layers=126, width=8).eval()
wide = nn.Sequential(*(Stack(layers=4) for _ in range(150))).eval()
with torch.no_grad():
    for step in range(3):
        show(step, deep(IDS), wide(vectors()))
print(len(list(deep.modules())), len(list(wide.modules())))
