"""Functions whose names cbtop watches have attributes, defaults and closures, and are compared with `is`."""

import torch
from small import Simple, Stack, show, vectors


def dropout_add(x, residual, seen=[]):  # noqa: B006 - the shared default is the point
    seen.append(len(seen))
    dropout_add.calls += 1
    return x + residual + seen[-1]


def make(factor):
    def apply_rotary_emb(x):
        return x * factor

    return apply_rotary_emb


dropout_add.calls = 0
original, apply_rotary_emb = dropout_add, make(0.5)
kept = {"rotary": apply_rotary_emb}


class Block(Simple):
    def forward(self, x):
        same = dropout_add is original, apply_rotary_emb is kept["rotary"], globals()["dropout_add"] == original
        return dropout_add(apply_rotary_emb(super().forward(x)), x) + sum(same)


model = Stack(Block).eval()
with torch.no_grad():
    for step in range(12):
        show(step, model(vectors()), dropout_add.calls, dropout_add.__defaults__, dropout_add is original)
print(dropout_add.__qualname__, apply_rotary_emb.__qualname__, apply_rotary_emb.__closure__[0].cell_contents)
print({original: "a"}[dropout_add], type(dropout_add).__name__, vars(dropout_add))
