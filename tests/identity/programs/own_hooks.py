"""A training loop with hooks of every kind that change, count and remove each other."""

import torch
from small import IDS, Net, show
from torch import nn

seen = []


def halve(module, args, output):
    seen.append(type(module).__name__)
    return output * 0.5


def keyword(module, args, kwargs):
    return tuple(argument * 1.0 for argument in args), kwargs


def backward(module, inputs, outputs):
    seen.append(f"grad of {type(module).__name__}")
    show("grad", outputs[0])


model = Net()
handles = [
    model.layers[0].register_forward_hook(halve),
    model.layers[1].register_forward_pre_hook(keyword, with_kwargs=True),
    model.layers[2].register_full_backward_hook(backward),
    model.lm_head.weight.register_hook(lambda grad: grad * 2),
    model.layers[1].register_forward_hook(lambda *_: seen.append("always"), always_call=True),
    nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(len(list(module.children())))),
]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(9):
    loss = model(IDS).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss, len(seen), model.embed.weight.grad)
    if step >= 4:
        handles.pop().remove()
    print(step, [len(module._forward_hooks) for module in model.modules()])
print(seen)
