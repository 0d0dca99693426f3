"""A retention network switches the `forward` of each layer between three methods. It is saved and loaded again."""

import copy

import torch
from small import show
from torch import nn


class Retention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Parameter(torch.randn(3, width, width) / width)
        self.choose("parallel")

    def choose(self, mode):
        self.forward = getattr(self, "forward_" + mode)

    def forward_parallel(self, x, state=None):
        q, k, v = torch.einsum("btd,nde->nbte", self.norm(x), self.qkv)
        age = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        return (q @ k.mT * (0.9**age).tril()) @ v, None

    def forward_recurrent(self, x, state=None):
        q, k, v = torch.einsum("btd,nde->nbte", self.norm(x), self.qkv)
        state, out = 0 if state is None else state, []
        for t in range(x.shape[1]):
            state = 0.9 * state + k[:, t, :, None] * v[:, t, None]
            out.append(torch.einsum("bd,bde->be", q[:, t], state))
        return torch.stack(out, 1), state

    def forward_doubled(self, x, state=None):
        out, state = self.forward_recurrent(x, state)
        return 2 * out, state


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Retention(width) for _ in range(3))

    def forward(self, ids, states=(None, None, None)):
        x, after = self.embed(ids), []
        for layer, state in zip(self.layers, states, strict=True):
            out, state = layer(x, state)
            x = x + out
            after.append(state)
        return x @ self.embed.weight.T, after


net, ids = Net(), torch.randint(0, 40, (2, 9))
for step in range(12):
    for layer in net.layers:
        layer.choose(("parallel", "recurrent", "doubled")[step % 3])
    scores, states = net(ids)
    show(step, scores, *(layer.forward.__name__ for layer in net.layers), *sorted(vars(net.layers[0])))
    if states[0] is not None:
        for _ in range(5):
            token = scores[:, -1:].argmax(-1)
            scores, states = net(token, states)
        show(token, states)
    torch.save(net, f"net{step % 3}.pt")
    for again in (torch.load(f"net{step % 3}.pt", weights_only=False), copy.deepcopy(net)):
        show(again(ids)[0], again.layers[0].forward.__self__ is again.layers[0])
for layer in net.layers:
    del layer.forward
try:
    net(ids)
except Exception as error:
    print(type(error).__name__, error)  # Modules without a forward: torch's own error, also under cbtop.
else:
    print("a module without a forward ran")
