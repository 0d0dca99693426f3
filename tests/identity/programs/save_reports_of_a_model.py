"""Prints descriptions of a model: its repr, its named modules, a summary by hooks, and a graph of its objects."""

import pickletools

import torch
from small import IDS, Net, exact, show
from torch import nn


def summary(model):
    rows, handles = [], []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda m, args, out, name=name: rows.append((name, exact(out)))))
    model(IDS)
    for handle in handles:
        handle.remove()
    return rows


def strings(value):
    import pickle

    data = pickle.dumps(value)
    return [argument for code, argument, _ in pickletools.genops(data) if isinstance(argument, str)]


model = Net().eval()
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS), len(strings(model)))
        print(model, [name for name, _ in model.named_modules()], model._get_name(), model.extra_repr())
        show(summary(model))
        text = sorted(set(strings(model)))
        print([name for name in text if not name.isascii() or "cbtop" in name or "call" in name])
        print({type(value).__name__ for module in model.modules() for value in vars(module).values()})
        print([name for module in model.modules() for name in vars(module) if name not in vars(nn.Module())][:9])
