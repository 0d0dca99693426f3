"""After some steps, the forward of a model raises. The error ends the program through its own excepthook."""

import sys

import torch
from small import Simple, Stack, show, vectors


class Fails(Simple):
    calls = 0

    def forward(self, x):
        Fails.calls += 1
        if Fails.calls == 20:
            raise ZeroDivisionError("at last")
        return super().forward(x)


def report(kind, error, trace):
    names = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in ("__main__", "small"):
            names.append((trace.tb_frame.f_code.co_name, trace.tb_lineno))
        trace = trace.tb_next
    print(kind.__name__, error, names, file=sys.stderr)


sys.excepthook = report
model = Stack(Fails).eval()
with torch.no_grad():
    for step in range(9):
        show(step, model(vectors()))
