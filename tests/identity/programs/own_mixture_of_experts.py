"""A mixture of experts routes tokens to some experts in each step."""

import torch
import torch.nn.functional as F
from small import Simple, Stack, show
from torch import nn


class SparseMoeBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 4), nn.ModuleList(Simple(width) for _ in range(4))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            self.counts[number] += len(rows)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return x + out.view_as(x)


model = Stack(SparseMoeBlock)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(10):
    x = torch.randn(2, 4, 8)
    loss = F.mse_loss(model(x), x.flip(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss, [layer.counts.tolist() for layer in model.layers])
torch.save(model, "experts.pt")
