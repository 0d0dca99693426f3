"""A program with modules that have no truth value, are empty, or define length, iteration and indexing."""

import torch
from small import Simple, Stack, show, vectors


class NoTruth(Stack):
    def __bool__(self):
        raise RuntimeError("the truth of this is ambiguous")


class Falsy(Stack):
    def __bool__(self):
        return False


class Empty(Stack):
    def __len__(self):
        return 0


class Endless(Stack):
    asked = 0

    def __iter__(self):
        type(self).asked += 1
        while True:
            yield self

    def __len__(self):
        type(self).asked += 1
        raise OverflowError("endless")

    def __getitem__(self, index):
        type(self).asked += 1
        return index

    def __contains__(self, item):
        type(self).asked += 1
        return True


class FalseBlock(Simple):
    def __bool__(self):
        return False

    def __len__(self):
        raise ValueError("no length")


with torch.no_grad():
    for make in (NoTruth, Falsy, Empty, Endless, lambda: Stack(FalseBlock)):
        model = make()
        for step in range(6):
            show(make.__name__, step, model(vectors()))
print(Endless.asked)
