"""A program with a module that records reads of attributes that it lacks, and calls of `hash`."""

import torch
from small import Simple, Stack, show, vectors


class Counts(Stack):
    def __getattr__(self, name):
        if name != "layers":
            asked.append(name)
        return super().__getattr__(name)


class CountsBlock(Simple):
    def __getattr__(self, name):
        if name not in ("norm", "up", "down"):
            asked.append(name)
        return super().__getattr__(name)

    def __hash__(self):
        asked.append("hash")
        return id(self)


asked = []
with torch.no_grad():
    for model in (Counts(), Stack(CountsBlock)):
        asked.clear()
        for step in range(6):
            show(step, model(vectors()), asked)
