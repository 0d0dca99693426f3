"""A program with modules that have a metaclass, slots or a `__call__` of their class, or change their class."""

import abc

import torch
from small import Simple, Stack, show, vectors
from torch import nn


class Registers(type):
    made = ()

    def __call__(cls, *args):
        Registers.made += (cls.__name__,)
        return super().__call__(*args)

    def __setattr__(cls, name, value):
        print("class set", name)
        super().__setattr__(name, value)

    def __instancecheck__(cls, instance):
        return type(instance) is cls


class OfMeta(Stack, metaclass=Registers):
    pass


class Slotted(Stack):
    __slots__ = ("cache", "count")

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x) + self.count


class Abstract(Stack, abc.ABC):
    @abc.abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def forward(self, x):
        return Stack.forward(self, x) * 2


class CallsItself(Stack):
    def __call__(self, x, *, times=2):
        for _ in range(times):
            x = super().__call__(x)
        return x


class Before(Simple):
    pass


class After(Simple):
    def forward(self, x):
        return super().forward(x) * 3


with torch.no_grad():
    for make in (OfMeta, Slotted, Concrete, CallsItself, lambda: Stack(Before)):
        model = make()
        for step in range(6):
            show(make.__name__, step, model(vectors()))
    model.layers[1].__class__ = After
    show(model(vectors()), Registers.made, isinstance(model, OfMeta), isinstance(model, nn.Module))
    del model.layers[0]
    show(model(vectors()), Slotted.__slots__)
