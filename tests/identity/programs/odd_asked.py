"""A program with attributes that do something when they are read: they draw numbers, load, create or record."""

from collections import defaultdict
from collections.abc import Mapping
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from small import Stack, show, vectors
from torch import nn


class NoisyLinear(nn.Module):
    """A layer whose weight is a property that draws noise (Fortunato et al., Noisy Networks for Exploration)."""

    num_embeddings = property(lambda self: print("num_embeddings was read"))

    def __init__(self):
        super().__init__()
        self.in_features = self.out_features = 8
        self.mean = nn.Parameter(torch.randn(8, 8))

    @property
    def weight(self):
        return self.mean + torch.randn(8, 8)

    def forward(self, x):
        return F.linear(x, self.weight)


class Noisy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), NoisyLinear()

    def forward(self, x):
        return self.up(self.norm(x))


class Made(defaultdict):
    """A config that creates each attribute on its first read."""

    def __init__(self):
        super().__init__(Made)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class LazyBatch(Mapping):
    """A batch that changes a column when it is read, as random augmentation of data does."""

    def __getitem__(self, name):
        print("column", name)
        return vectors() + torch.rand(1)

    def __iter__(self):
        return iter(["x", "unused"])

    def __len__(self):
        return 2


class LazyBatchOfDict(dict):
    def __getitem__(self, name):
        print("entry", name)
        return super().__getitem__(name) + torch.rand(1)


class Lazy:
    """An object that loads itself when its `__class__` is read, as proxies of web frameworks do."""

    @property
    def __class__(self):
        print("loaded")
        return torch.Tensor


class Model(Stack):
    def forward(self, batch=None, image=None, past_key_values=None):
        return super().forward(vectors() if batch is None else batch["x"])


with torch.no_grad():
    noisy = Stack(Noisy)
    for step in range(4):
        show(step, noisy(vectors()), torch.rand(1))
    model = Model()
    model.config = Made()
    cache = MagicMock()
    for step in range(4):
        show(step, model(LazyBatch()), torch.rand(1))
        show(step, model(LazyBatchOfDict(x=vectors(), y=vectors())), torch.rand(1))
        show(step, model(image=Lazy()), torch.rand(1))
        show(step, model(past_key_values=cache))
print(sorted(model.config), cache.mock_calls)
