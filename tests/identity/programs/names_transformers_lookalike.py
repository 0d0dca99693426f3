"""A script defines its own attention under the names that transformers uses.

Its parameters differ, and it has its own registry of functions.
"""

import torch
from small import Stack, show, vectors
from torch import nn


def eager_attention_forward(q, *, heads):
    return q.softmax(-1) * heads, None


def create_causal_mask(length, /):
    return torch.ones(length, length).tril().log()


def build_alibi_tensor():
    return torch.arange(4.0)[:, None]


def apply_rotary_emb(x):
    x.mul_(0.5)


ALL_ATTENTION_FUNCTIONS = {"eager": eager_attention_forward, "text": "sdpa"}


class OwnAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self._attn = ALL_ATTENTION_FUNCTIONS["eager"]
        self._split_heads = 2

    def _merge_heads(self, *parts, dim):
        return torch.cat(parts, dim)

    def _reshape(self):
        return self._split_heads

    def forward(self, x, *, residual=None):
        out, weights = self._attn(self.q_proj(x), heads=self._reshape())
        apply_rotary_emb(out)
        assert weights is None
        mask = create_causal_mask(x.shape[1]).exp()
        return self._merge_heads(mask @ out, x + build_alibi_tensor(), dim=-1)[..., ::2]


model = Stack(OwnAttention).eval()
with torch.no_grad():
    for step in range(12):
        show(step, model(vectors()), ALL_ATTENTION_FUNCTIONS["eager"] is eager_attention_forward)
