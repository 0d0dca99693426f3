"""A program scripts a model and its helper functions with torch.jit: before, between and after steps."""

import inspect

import torch
from small import apply_rotary_pos_emb as library_rope
from small import attempt, rotate_half, show, vectors
from torch import nn


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).to(torch.float32).unsqueeze(1).expand(-1, x.shape[2])
        q, k = apply_rotary_pos_emb(self.q_proj(x), self.k_proj(x), angles.cos(), angles.sin())
        return x + self.o_proj(q * k)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model, x = Model().eval(), vectors()
for step in range(10):
    show(step, model(x))
    if step in (0, 1, 9):
        scripted = torch.jit.script(apply_rotary_pos_emb)
        show(scripted(x, x, x, x), scripted.code)
        attempt("model", lambda: torch.jit.script(model)(x))
        attempt("layer", lambda: torch.jit.script(model.layers[1])(x))
        attempt("library", lambda: torch.jit.script(library_rope)(x, x, x, x))
print(inspect.signature(apply_rotary_pos_emb), inspect.getsource(apply_rotary_pos_emb))
print(type(apply_rotary_pos_emb).__name__, apply_rotary_pos_emb.__code__.co_argcount)
