"""A program replaces linear layers by adapters that share their `__dict__`, then merges and removes the adapters."""

import types

import torch
from small import IDS, Net, show
from torch import nn


class Adapted(nn.Linear):
    def __init__(self, base):
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(base).items() if name not in vars(self)})
        self._parameters = dict(base._parameters)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))
        self.is_merged = False

    def forward(self, x):
        y = super().forward(x)
        return y if self.is_merged else y + x @ self.a.T @ self.b.T

    def train(self, mode=True):
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data.add_(self.b @ self.a, alpha=-1 if mode else 1)
            self.is_merged = not mode
        return self


def scaled(self, x):
    return nn.Sequential.forward(self, x) * self.scale


net = Net().requires_grad_(False)
for step in range(4):
    show(step, net(IDS))
for block in net.layers:
    for name in ("q_proj", "v_proj"):
        setattr(block.self_attn, name, Adapted(getattr(block.self_attn, name)))
    block.mlp.register_parameter("scale", nn.Parameter(torch.ones(16)))
    block.mlp.forward = types.MethodType(scaled, block.mlp)
trained = {name: weight for name, weight in net.named_parameters() if weight.requires_grad}
optimizer = torch.optim.AdamW(trained.values(), 1e-2)
print(list(trained), sorted(vars(net.layers[0].self_attn.q_proj)), net)
for step in range(12):
    loss = net(IDS)[:, :-1].logsumexp(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss, net.train(step % 3 > 0)(IDS), net.layers[1].self_attn.q_proj.is_merged)
    net.train()
torch.save({name: weight.detach() for name, weight in trained.items()}, "adapter.pt")
for block in net.layers:
    del block.mlp.forward
    block.self_attn.v_proj.__class__ = nn.Linear
for step in range(4):
    show(step, net(IDS), type(net.layers[2].self_attn.v_proj).__name__, "forward" in vars(net.layers[2].mlp))
torch.save(net, "net.pt")
