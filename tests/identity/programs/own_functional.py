"""A model is called by torch.func: functional_call, grad, vmap, jvp, an ensemble, and checkpointing."""

import copy

import torch
from small import Stack, show, vectors
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

model, x = Stack(), vectors()
parameters = dict(model.named_parameters())
models = [Stack() for _ in range(3)]
base = copy.deepcopy(models[0]).to("meta")


def loss(parameters, x):
    return functional_call(model, parameters, (x,)).square().mean()


def call_base(parameters, buffers, x):
    return functional_call(base, (parameters, buffers), (x,))


for step in range(5):
    show(step, model(x), loss(parameters, x))
    show(grad(loss)(parameters, x)["layers.0.up.weight"])
    show(vmap(grad(loss), (None, 0))(parameters, torch.stack([x, -x]))["layers.2.norm.bias"])
    show(jvp(model, (x,), (torch.ones_like(x),)), jacrev(lambda x: model(x).mean(1))(x))
    states = stack_module_state(models)
    show(vmap(call_base, (0, 0, None))(*states, x))
    value = checkpoint(model, x.requires_grad_(), use_reentrant=False).sum()
    value.backward()
    show(value, model.layers[0].up.weight.grad, torch.autograd.functional.vjp(model, x, x)[1])
    model.zero_grad()
    x = x.detach()
