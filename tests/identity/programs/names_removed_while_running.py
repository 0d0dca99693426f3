"""Names that cbtop watches are deleted from classes and modules between steps, then bound again."""

import torch
from small import Attention, Block, Net, show

plain = Attention._split_heads


class Renamed(Attention):
    def forward(self, x):
        return super().forward(x) * scale


def dropout_add(x):
    return x


scale, model = 1.0, Net().eval()
for layer in model.layers:
    layer.self_attn.__class__ = Renamed
ids = torch.tensor([[5, 6, 7]])
with torch.no_grad():
    for step in range(15):
        show(step, model(ids), "_split_heads" in vars(Renamed), Attention._split_heads is plain)
        if step % 5 == 1:
            Renamed._split_heads = lambda self, x: plain(self, x) * 2
        elif step % 5 == 2:
            del Renamed._split_heads
        elif step % 5 == 3:
            Attention._split_heads = lambda self, x: plain(self, x) + 1
        elif step % 5 == 4:
            Attention._split_heads = plain
        if step == 7:
            del dropout_add
        scale += 0.5
print(sorted(vars(Renamed)), list(vars(Block)), "dropout_add" in globals())
