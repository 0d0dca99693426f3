"""A program with modules that define `__getattribute__`, `__setattr__` or `__delattr__`, or copy a `__dict__`."""

import torch
from small import Simple, Stack, show, vectors


class Counts(Stack):
    names = ()

    def __getattribute__(self, name):
        if name in ("layers", "forward"):
            type(self).names += (name,)
        return super().__getattribute__(name)


class CopiesDict(Stack):
    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return dict(value) if name == "__dict__" else value


class Frozen(Stack):
    is_frozen = False

    def __setattr__(self, name, value):
        if self.is_frozen:
            raise AttributeError(f"cannot set {name}")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        raise AttributeError(f"cannot delete {name}")


class Says(Simple):
    def __setattr__(self, name, value):
        print("set", name)
        super().__setattr__(name, value)

    def __dir__(self):
        raise RuntimeError("no names")

    def __repr__(self):
        raise RuntimeError("no text")


with torch.no_grad():
    for make in (Counts, CopiesDict, Frozen, lambda: Stack(Says)):
        model = make()
        if make is Frozen:
            model.is_frozen = True
        for step in range(6):
            show(make.__name__, step, model(vectors()))
print(Counts.names)
