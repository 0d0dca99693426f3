"""A server warms a model up, scripts it with torch.jit and saves it. The model calls the fused attention."""

import io

import torch
import torch.nn.functional as F
from small import attempt, show, vectors
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Attention(8) for _ in range(3)), nn.Linear(8, 20)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def script():
    scripted, file = torch.jit.script(model), io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return scripted.code, torch.jit.load(file)(x), torch.jit.freeze(scripted)(x)


model, x = Model().eval(), vectors()
for step in range(10):
    show(step, model(x))
    if step in (0, 1, 9):
        attempt("script", script)
