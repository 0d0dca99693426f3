"""A program that creates and drops modules in a loop, so new modules get the addresses of old ones."""

import gc

import torch
from small import Net, Simple, Stack, show, vectors


class Other(Simple):
    def forward(self, x):
        return super().forward(x) - 1


classes = (Simple, Other)
with torch.no_grad():
    for number in range(60):
        model = Stack(classes[number % 2], layers=2 + number % 3)
        show(number, model(vectors()), model(vectors()))
        if number % 7 == 0:
            model.layers[0] = classes[(number + 1) % 2]()
            show(model(vectors()))
        del model
        if number % 10 == 0:
            gc.collect()
    for number in range(10):
        show(Net(layers=1)(torch.tensor([[number, 1]])))
