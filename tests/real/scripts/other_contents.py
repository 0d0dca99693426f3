"""Runs three steps of a decoder.

With the argument `faulty`, layer 1 copies, layer 2 multiplies in bfloat16, and layer 3 has no fused attention.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)
WIDTH = 64
IS_FAULTY = sys.argv[1] == "faulty"


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number if IS_FAULTY else 0
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up_proj, self.act_fn, self.down_proj = nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH)
        if self.number == 2:
            self.down_proj.bfloat16()

    def attention(self, x):
        if self.number == 3:
            return torch.softmax(x @ x.mT / WIDTH**0.5, -1) @ x
        return functional.scaled_dot_product_attention(x, x, x)

    def forward(self, x):
        x = x + self.o_proj(self.attention(self.q_proj(self.input_layernorm(x))))
        up = self.act_fn(self.up_proj(x))
        if self.number == 1:
            up = up.clone()
        return x + self.down_proj(up.to(self.down_proj.weight.dtype)).float()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


model = Model().eval()
with torch.no_grad():
    for _ in range(3):
        model(torch.arange(8).view(1, 8))
