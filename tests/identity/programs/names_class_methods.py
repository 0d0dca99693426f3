"""`_attn`, a name that cbtop watches, is a class method, a nested class, an inherited static method or similar."""

import torch
from small import Stack, show, vectors
from torch import nn


class Attending(type):
    def _attn(cls, x):
        return x * len(cls.__name__)


class Base(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)

    @staticmethod
    def _attn(x, scale=2.0):
        return x * scale


class Inherited(Base):
    def forward(self, x):
        return self._attn(self.proj(x), scale=0.5)


class ByClass(Base):
    calls = 0

    @classmethod
    def _attn(cls, x):
        cls.calls += 1
        return x + cls.calls

    def forward(self, x):
        return self._attn(self.proj(x))


class Nested(Base):
    class _attn:  # noqa: N801 - the name is the point
        def __init__(self, x):
            self.x = x

    def forward(self, x):
        return self._attn(self.proj(x)).x


class OfMeta(nn.Module, metaclass=Attending):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        return type(self)._attn(self.proj(x))


for block in (Inherited, ByClass, Nested, OfMeta):
    model = Stack(block).eval()
    with torch.no_grad():
        for step in range(5):
            show(block.__name__, step, model(vectors()))
print(ByClass.calls, Nested._attn.__name__, type(vars(Base)["_attn"]).__name__)
