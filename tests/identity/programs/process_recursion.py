"""Recursive modules run near the recursion limit, and the limit stays as the program set it."""

import sys

import torch
from small import show
from torch import nn


class Nested(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x):
        x = torch.tanh(self.proj(x))
        return x if self.inner is None else self.inner(x)


class Forever(nn.Module):
    def forward(self, x):
        return self(x)


with torch.no_grad():
    for depth in (10, 100, 200):
        model = Nested(depth)
        for step in range(4):
            show(depth, step, model(torch.ones(1, 4)), sys.getrecursionlimit())
    for step in range(3):
        try:
            Forever()(torch.ones(1))
        except RecursionError as error:
            print(step, type(error).__name__, sys.getrecursionlimit())
    sys.setrecursionlimit(3000)
    model = Nested(600)
    for step in range(3):
        show(step, model(torch.ones(1, 4)), sys.getrecursionlimit())
