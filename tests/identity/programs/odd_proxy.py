"""A program that calls models through proxies, mixins, partials, patched forwards and shared submodules."""

import functools
import types

import torch
from small import Simple, Stack, show, vectors
from torch import nn


class Proxy:
    def __init__(self, target):
        object.__setattr__(self, "target", target)

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "target"), name)

    def __setattr__(self, name, value):
        setattr(self.target, name, value)

    def __call__(self, *args):
        return self.target(*args)

    @property
    def __class__(self):
        return type(self.target)


model = Stack().eval()
proxy = Proxy(model)
with torch.no_grad():
    for step in range(5):
        show(step, proxy(vectors()), isinstance(proxy, nn.Module), functools.partial(model)(vectors()))
    model.layers[0].forward = types.MethodType(lambda self, x: Simple.forward(self, x) + 1, model.layers[0])
    show(proxy(vectors()), "forward" in vars(model.layers[0]))
    original = model.forward
    model.forward = lambda x: original(x) * 2
    for step in range(5):
        show(step, model(vectors()), proxy.forward(vectors()))
    del model.forward
    model.layers.append(model.layers[0])
    model.layers.insert(0, Proxy(nn.Sequential(model.layers[1], nn.Tanh())).target)
    for step in range(5):
        show(step, model(vectors()), len(list(model.modules())))
    shared = nn.ModuleList([model, model])
    show([part(vectors()) for part in shared], Stack.__call__ is nn.Module.__call__)
