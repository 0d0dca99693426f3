"""A program with modules that are data classes: they cannot be hashed, or are compared by their fields."""

import dataclasses

import torch
from small import Simple, Stack, show, vectors
from torch import nn


@dataclasses.dataclass
class Data(nn.Module):
    width: int = 8

    def __post_init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Simple(self.width) for _ in range(3))

    forward = Stack.forward


@dataclasses.dataclass(unsafe_hash=True)
class Hashed(Data):
    name: str = "same"


@dataclasses.dataclass(eq=False)
class DataBlock(nn.Module):
    width: int

    def __post_init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(self.width)

    def forward(self, x):
        return x + self.norm(x)


@dataclasses.dataclass
class UnhashableBlock(DataBlock):
    scale: float = 2.0


with torch.no_grad():
    for make in (Data, Hashed, lambda: Stack(DataBlock), lambda: Stack(UnhashableBlock)):
        first, second = make(), make()
        for step in range(6):
            show(type(first).__name__, step, first(vectors()), second(vectors()), first == second)
        print(type(first).__hash__ is None, dataclasses.is_dataclass(first), list(vars(first))[:3])
