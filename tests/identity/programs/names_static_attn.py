"""Methods that cbtop watches are static: one block has `_attn(module, q, kv)`, another has `_split_heads`."""

import torch.nn.functional as F
from small import Stack, show, vectors
from torch import nn


class MultiheadBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

    @staticmethod
    def _attn(module, q, kv):
        rows, length, width = q.shape
        weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).view(rows, -1, module.num_heads, width // module.num_heads).transpose(1, 2)
            for x, weight, bias in zip((q, kv, kv), weights, biases, strict=True)
        )
        return module.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width))

    def forward(self, x):
        y = self.norm(x)
        return x + self._attn(self.attn, y, y)


class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    @staticmethod
    def _split_heads(x, heads):
        return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self._split_heads(part, 2) for part in self.qkv_proj(x).chunk(3, -1))
        return x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


for block in (MultiheadBlock, SelfAttention):
    model = Stack(block).eval()
    for step in range(6):
        show(block.__name__, step, model(vectors()))
