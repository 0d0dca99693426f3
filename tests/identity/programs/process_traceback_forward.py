"""The forward of a model raises, and Python prints the traceback. A warning shows the stack."""

import traceback

import torch
from small import Simple, Stack, show, vectors


class Fails(Simple):
    calls = 0

    def forward(self, x):
        Fails.calls += 1
        if Fails.calls % 5 == 0:
            raise ZeroDivisionError(f"call {Fails.calls}")
        return super().forward(x)


model = Stack(Fails).eval()
with torch.no_grad():
    for step in range(9):
        try:
            show(step, model(vectors()))
        except ZeroDivisionError:
            traceback.print_exc()
    while True:
        model(vectors())
