"""In each step, a forward reads and writes a module flag whose name cbtop watches."""

import torch
from small import Simple, Stack, show, vectors

dropout_add = 0
create_causal_mask = "no"


class Block(Simple):
    _attn = None

    def forward(self, x):
        global dropout_add, create_causal_mask
        dropout_add = dropout_add + 1
        create_causal_mask = "yes" if create_causal_mask == "no" else "no"
        if self._attn is None:
            type(self)._attn = dropout_add
        return super().forward(x) * dropout_add


model = Stack(Block).eval()
with torch.no_grad():
    for step in range(12):
        show(step, model(vectors()), dropout_add, create_causal_mask, Block._attn)
        if step % 3 == 2:
            Block._attn = None
del dropout_add, create_causal_mask
print(sorted(name for name in globals() if "mask" in name or "dropout" in name))
