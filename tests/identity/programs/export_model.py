"""Exports a model with torch.export after one call and after ten calls."""

import torch
from small import IDS, Net, show

model = Net().eval()
with torch.no_grad():
    for step in range(11):
        show(step, model(IDS))
        if step in (0, 10):
            program = torch.export.export(model, (IDS,))
            print(program.graph_module.code)
            show(program.module()(IDS), [entry.target for entry in program.graph_signature.input_specs])
