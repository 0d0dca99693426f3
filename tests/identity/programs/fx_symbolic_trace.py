"""Traces a model with torch.fx after one call and after ten, transforms it, and replaces modules while it runs."""

import torch
from small import IDS, Net, Stack, show, vectors
from torch import fx

stack, net = Stack().eval(), Net().eval()
with torch.no_grad():
    for step in range(11):
        show(step, stack(vectors()), net(IDS))
        if step in (0, 10):
            graph = fx.symbolic_trace(stack)
            print(graph.code, [node.target for node in graph.graph.nodes])
            for node in graph.graph.nodes:
                if node.op == "call_function" and node.target is torch.nn.functional.gelu:
                    node.target = torch.relu
            graph.recompile()
            show(graph(vectors()), graph(vectors()))
            print(fx.Tracer().trace(net.layers[0].mlp))
