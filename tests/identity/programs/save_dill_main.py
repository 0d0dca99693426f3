"""A model of `__main__` is saved by value with dill, also with recursive globals, and loaded without cbtop."""

from pathlib import Path

import dill
import torch
from small import IDS, Block, read_without_cbtop, show
from torch import nn


def dropout_add(x, residual):
    return x + residual


class Layer(Block):
    def forward(self, x):
        return dropout_add(self.self_attn(self.input_layernorm(x)), x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList(Layer(16) for _ in range(3))
        self.combine = dropout_add

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = self.combine(layer(x), x)
        return x


READER = """
import dill, torch
torch.set_num_threads(1)
model = dill.load(sys.stdin.buffer)
print(float(model(torch.tensor([[1, 2, 3, 4]])).sum()).hex())
"""
model = Model().eval()
with torch.no_grad():
    for step in range(8):
        show(step, float(model(IDS).sum()))
        if step in (0, 7):
            data = dill.dumps(model, byref=False, recurse=True)
            Path(f"model-{step}.dill").write_bytes(data)
            show(data, b"cbtop" in data, dill.dumps(dropout_add, recurse=True), dill.source.getsource(dropout_add))
            print(read_without_cbtop(data, READER))
