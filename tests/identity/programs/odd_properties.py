"""A program with properties that raise, print, or change the module when they are read."""

import torch
from small import Simple, Stack, show, vectors


class Raises(Stack):
    @property
    def config(self):
        raise RuntimeError("no config yet")

    @property
    def device(self):
        raise StopIteration

    @property
    def dtype(self):
        raise KeyError("dtype")


class Prints(Stack):
    @property
    def config(self):
        print("config was read")
        return {"hidden_size": 8}

    @property
    def generation_config(self):
        print("generation_config was read")

    @property
    def training(self):
        return False

    @training.setter
    def training(self, value):
        pass


class Moves(Simple):
    reads = 0

    @property
    def weight(self):
        self.reads += 1
        return self.up.weight

    @property
    def in_features(self):
        raise RuntimeError("in_features cannot be read")

    @property
    def num_heads(self):
        print("num_heads was read")
        return 0

    head_dim = hidden_size = num_heads


with torch.no_grad():
    for make in (Raises, Prints, lambda: Stack(Moves)):
        model = make()
        for step in range(6):
            show(make.__name__, step, model(vectors()))
print([layer.reads for layer in model.layers])
