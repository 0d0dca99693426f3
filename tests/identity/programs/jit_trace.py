"""Traces a model with torch.jit after one call and after ten calls, and prints the graph."""

import io

import torch
from small import IDS, Net, show

model = Net().eval()
for step in range(11):
    show(step, model(IDS))
    if step in (0, 10):
        traced = torch.jit.trace(model, (IDS,))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        print(
            traced.graph,
            traced.code,
            getattr(traced.layers, "0").self_attn.code,
            [name for name, _ in traced.named_modules()],
        )
        file.seek(0)
        show(torch.jit.load(file)(IDS), torch.jit.trace(model.layers[0], (torch.ones(1, 4, 16),)).code)
