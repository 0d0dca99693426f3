"""Compiles a model with the eager backend: before the first call, after one call, and after ten calls."""

import torch
from small import IDS, Net, show

graphs = []


def backend(graph, inputs):
    graphs.append(graph.code)
    return graph.forward


early, late = Net().eval(), Net().eval()
compiled_early = torch.compile(early, backend="eager")
with torch.no_grad():
    for step in range(11):
        show(step, compiled_early(IDS), late(IDS))
    compiled_late = torch.compile(late, backend=backend, fullgraph=True)
    for step in range(4):
        show(step, compiled_late(IDS), compiled_early(IDS), late(IDS), len(graphs))
late.compile(backend=backend)
show(late(IDS), len(graphs), compiled_late._orig_mod is late)
print(graphs[0])
