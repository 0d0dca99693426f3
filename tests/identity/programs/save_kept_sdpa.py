"""While a first model runs, a second model stores a torch function in an attribute.

Both models are saved and copied.
"""

import copy
import pickle

import torch
import torch.nn.functional as F
from small import show, vectors
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend = F.scaled_dot_product_attention

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return x + self.o_proj(self.attend(q, k, v, is_causal=True).squeeze(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Attention(8) for _ in range(3)), nn.Linear(8, 20)
        self.seen = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.seen = F.scaled_dot_product_attention
        return self.head(x)


builtin, x = F.scaled_dot_product_attention, vectors()
first = Model().eval()
show(first(x))
second = Model().eval()
for step in range(10):
    show(step, first(x), second(x), second.layers[0].attend is builtin, first.seen is builtin)
    show(pickle.dumps(first), pickle.dumps(second), pickle.dumps(F.scaled_dot_product_attention))
    if step in (0, 1, 9):
        torch.save(second, f"second-{step}.pt")
        show(torch.load(f"second-{step}.pt", weights_only=False)(x), copy.deepcopy(second)(x))
