"""Plain flags of a script, a class and an instance have names of functions that cbtop watches."""

import torch
from small import Simple, Stack, show, vectors

dropout_add = False
apply_rotary_emb = 0
create_causal_mask = None
build_alibi_tensor = ""
eager_attention_forward = {}


class Block(Simple):
    _attn = ""  # Programs also give this flag the value "linear".
    _split_heads = 0
    expand_kv = False

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x))))
        if dropout_add or create_causal_mask or build_alibi_tensor or eager_attention_forward:
            y = y * 0
        if apply_rotary_emb:
            y = y.flip(-1)
        if self._attn or self._split_heads or self.expand_kv:
            y = y + 1
        return x + y


model = Stack(Block).eval()
with torch.no_grad():
    for step in range(12):
        show(step, model(vectors()), dropout_add, apply_rotary_emb, Block._attn, type(create_causal_mask))
