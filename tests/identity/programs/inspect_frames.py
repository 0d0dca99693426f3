"""The forward of a model inspects its callers, its local variables and the functions that it calls."""

import dis
import inspect
import sys

import torch
from small import Simple, Stack, show, vectors


class Looks(Simple):
    def forward(self, x):
        frame = sys._getframe()
        files = {entry.filename.rpartition("/")[2] for entry in inspect.stack(0)}
        print(frame.f_code.co_name, sorted(frame.f_locals), "module.py" in files, __name__)
        own = [entry.function for entry in inspect.stack(0) if entry.frame.f_globals.get("__name__") == __name__]
        print(own, sys._getframe(1).f_code.co_name)
        return super().forward(x)


model = Stack(Looks).eval()
with torch.no_grad():
    for step in range(4):
        show(step, model(vectors()))
print(
    [instruction.opname for instruction in dis.get_instructions(Looks.forward)][-3:], Looks.forward.__code__.co_names
)
