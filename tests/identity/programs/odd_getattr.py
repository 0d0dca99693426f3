"""A program with modules that define `__getattr__`: they invent attributes, reject them, or forward them."""

import torch
from small import Stack, show, vectors
from torch import nn


class Anything(Stack):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return 7


class Forwards(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.__dict__["inner"] = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def __call__(self, *args):
        return self.__dict__["inner"](*args)


class Raises(Stack):
    def __getattr__(self, name):
        if name in ("config", "dtype", "device", "generation_config", "_hf_hook", "name"):
            raise RuntimeError(f"no {name} yet")
        return super().__getattr__(name)


with torch.no_grad():
    for make in (Anything, lambda: Forwards(Stack()), Raises):
        model = make()
        for step in range(6):
            show(make.__name__, step, model(vectors()))
