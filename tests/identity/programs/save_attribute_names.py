"""Prints the names of attributes of a model, its class and its layers: before, between and after steps."""

import inspect

import torch
from small import IDS, Block, Net, show
from torch import nn


def names(model):
    layer = model.layers[0]
    print(sorted(vars(model)), list(model.__dict__), len(dir(model)), sorted(vars(layer.self_attn)))
    print(list(vars(Net)), list(vars(Block)), len(vars(nn.Module)), len(dir(nn.Linear)), sorted(vars(nn.functional)))
    print([name for name, _ in inspect.getmembers(layer) if "call" in name or "cbtop" in name])
    print(model.__dict__.get("_compiled_call_impl", "absent"), hasattr(model, "_hf_hook"), layer.__dict__.keys())


model = Net().eval()
names(model)
with torch.no_grad():
    for step in range(8):
        show(step, model(IDS))
        names(model)
