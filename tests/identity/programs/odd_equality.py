"""A program with modules that define `__eq__` (always true, raises or returns a tensor) or `__hash__` oddly."""

import torch
from small import Simple, Stack, show, vectors


class Equal(Stack):
    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return 1


class RaisesEqual(Stack):
    def __eq__(self, other):
        raise TypeError("this cannot be compared")

    __hash__ = torch.nn.Module.__hash__


class RaisesHash(Stack):
    def __hash__(self):
        raise TypeError("this cannot be hashed")


class UnhashableBlock(Simple):
    def __eq__(self, other):
        return self is other


class TensorEqual(Simple):
    def __eq__(self, other):
        return self.up.weight == other.up.weight

    def __hash__(self):
        return 7


with torch.no_grad():
    for make in (Equal, RaisesEqual, RaisesHash, lambda: Stack(UnhashableBlock), lambda: Stack(TensorEqual)):
        models = [make(), make()]
        for step in range(6):
            show(make.__name__, step, *(model(vectors()) for model in models))
    print([RaisesHash in type(model).__mro__ for model in models])
