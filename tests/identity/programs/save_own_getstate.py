"""Models have a `__getstate__` that copies their `__dict__`, a `__reduce__`, or their own `__deepcopy__`."""

import copy
import pickle

import torch
from small import Stack, show, vectors


class CopiesDict(Stack):
    def __getstate__(self):
        return self.__dict__.copy()


class Filters(Stack):
    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if value is not None}

    def __setstate__(self, state):
        print(sorted(state))
        self.__dict__.update(state)


class Reduces(Stack):
    def __reduce__(self):
        return type(self), (), self.__dict__


class ReducesEx(Stack):
    def __reduce_ex__(self, protocol):
        return rebuild, (protocol, list(self.__dict__.items()))


class Copies(Stack):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        new.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return new


def rebuild(protocol, items):
    model = ReducesEx()
    model.__dict__ = dict(items)
    return model


x = vectors()
for kind in (CopiesDict, Filters, Reduces, ReducesEx, Copies):
    model = kind().eval()
    for step in range(5):
        show(kind.__name__, step, model(x), pickle.dumps(model), pickle.loads(pickle.dumps(model))(x))
        clone = copy.deepcopy(model)
        show(clone(x), copy.copy(model)(x), list(clone.__dict__), list(model.__dict__))
    torch.save(model, f"{kind.__name__}.pt")
