"""A model gets tensors of a subclass with `__torch_function__`. Its parameters are parametrised."""

import torch
from small import Stack, show, vectors
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode


class Logged(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Logged.calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


model = Stack().eval()
parametrizations.weight_norm(model.layers[0].up)
with torch.no_grad():
    for step in range(6):
        out = model(vectors().as_subclass(Logged))
        show(step, type(out).__name__, out.as_subclass(torch.Tensor), Logged.calls)
        with Counts() as counts:
            show(model(vectors()), len(counts.names), sorted(set(counts.names)))
        if step == 2:
            model.layers.append(nn.Linear(8, 8))
            parametrize.register_parametrization(model.layers[3], "weight", Symmetric())
        print(type(model.layers[0].up).__name__, [type(layer).__name__ for layer in model.layers])
