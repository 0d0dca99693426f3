"""A model trains. With the argument `faulty`, the backward of its fourth layer gives NaN from step 100 on."""

import sys

import torch
from torch import nn
from training_gpt import GPT, batches

NAN_FROM = 100  # step number


class Root(nn.Module):
    """A layer that adds a square root to its output. The root contains a factor.

    If the factor is 0, the gradient is infinite times 0, which is NaN.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer, self.factor = layer, 1.0

    def forward(self, x):
        return self.layer(x) + 1e-3 * (x * self.factor).square().sum(-1, keepdim=True).sqrt()


model = GPT()
model.layers[3] = Root(model.layers[3])
# Use SGD, because AdamW would take a quarter of the time of a step in such a small model.
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for number, ids in enumerate(batches(), 1):
    if sys.argv[1] == "faulty" and number >= NAN_FROM:
        model.layers[3].factor = 0.0
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
    sys.stdout.write(f"{number} {norm.item()}\n")
    optimizer.step()
