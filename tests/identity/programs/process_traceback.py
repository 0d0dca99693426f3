"""The forward of a model raises: in its own code, in a builtin and in a hook.

The program prints the type, the message and its own frames of the traceback.
"""

import traceback

import torch
from small import IDS, Net, Simple, Stack, show, vectors
from torch import nn


class Raises(Simple):
    def forward(self, x):
        if x.shape[1] > 3:
            raise LookupError(f"too long: {x.shape[1]}") from ValueError("cause")
        return super().forward(x)


def hook(module, args, output):
    raise PermissionError("from a hook")


def failing(model, *args):
    try:
        show("fine", model(*args))
    except Exception as error:
        summary = traceback.extract_tb(error.__traceback__)
        own = [frame.name for frame in summary if frame.filename in (__file__, nn.__file__)]
        print(type(error).__name__, error, repr(error.__cause__), repr(error.__context__), own, summary[-1].line)
        print(getattr(error, "__notes__", []), error.__suppress_context__)


model, net = Stack(Raises).eval(), Net().eval()
hooked = Stack().eval()
for step in range(6):
    failing(model, vectors())
    failing(model, vectors()[:, :2])
    failing(net, IDS + 90)
    failing(net)
    failing(net, IDS, "more")
    failing(net.layers[0].self_attn, torch.ones(1, 2, 3))
    failing(hooked, vectors())
    if step == 2:
        hooked.layers[1].register_forward_hook(hook)
net.layers[1] = Raises(16)
failing(net, IDS)
