"""Class attributes with names that cbtop watches are strings, properties, descriptors and class methods."""

import torch
from small import Stack, show, vectors
from torch import nn


class Scale:
    """A descriptor that returns a number."""

    def __get__(self, instance, owner):
        return 3 if instance is None else instance.heads * 0.5


class OddAttention(nn.Module):
    _attn = "softmax"
    _merge_heads = Scale()

    def __init__(self, width):
        super().__init__()
        self.heads, self.proj = 2, nn.Linear(width, width)

    @property
    def _split_heads(self):
        return self.heads + 1

    @classmethod
    def expand_kv(cls, x, *, times=2):
        return x.repeat(times, 1, 1)[: x.shape[0]] * cls._merge_heads

    def _reshape(self, shape):
        return tuple(reversed(shape))

    def forward(self, x):
        y = self.proj(x) * self._merge_heads + self._split_heads
        if self._attn == "softmax":
            y = y.softmax(-1)
        return self.expand_kv(y, times=3) + len(self._reshape(x.shape))


model = Stack(OddAttention).eval()
with torch.no_grad():
    for step in range(12):
        show(step, model(vectors()), OddAttention._attn, OddAttention._merge_heads, OddAttention.expand_kv.__name__)
print(sorted((name, type(value).__name__) for name, value in vars(OddAttention).items() if "_heads" in name))
