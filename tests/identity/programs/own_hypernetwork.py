"""A hypernetwork trains: it computes the weights of a model on the meta device. Its warnings are printed."""

import sys
import warnings

import torch
from small import Stack, show, vectors
from torch import nn
from torch.func import functional_call, vmap

warnings.showwarning = lambda text, kind, *_: print(kind.__name__, text, file=sys.stderr)
warnings.simplefilter("always")
with torch.device("meta"):
    target = Stack()
shapes = {name: weight.shape for name, weight in target.named_parameters()}


class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict(
            {name.replace(".", "_"): nn.Linear(4, shape.numel()) for name, shape in shapes.items()}
        )

    def weights(self, z):
        return {name: self.heads[name.replace(".", "_")](z).view(shape) for name, shape in shapes.items()}

    def forward(self, z, x):
        return functional_call(target, self.weights(z), (x,))


hyper, codes = Hyper(), nn.Embedding(3, 4)
optimizer = torch.optim.Adam([*hyper.parameters(), *codes.parameters()], 1e-2)
for step in range(12):
    loss = (hyper(codes.weight[step % 3], vectors()) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
with torch.no_grad():
    every = vmap(hyper.weights)(codes.weight)
    show(vmap(lambda weights: functional_call(target, weights, (vectors(),)))(every))
show(every, {str(weight.device) for weight in target.parameters()})
torch.save({"hyper": hyper.state_dict(), "every": every}, "hyper.pt")
