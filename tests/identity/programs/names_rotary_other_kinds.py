"""Names of rotary and mask functions, which cbtop watches, refer to a class, a partial, an object or a tuple."""

import functools

import torch
from small import Simple, Stack, show, vectors


class apply_rotary_pos_emb:  # noqa: N801 - the name is the point
    made = 0

    def __init__(self, x):
        type(self).made += 1
        self.x = x * 2


class Mask:
    calls = 0

    def __call__(self, size):
        self.calls += 1
        return torch.ones(size, size).tril()


@functools.lru_cache
def build_alibi_tensor(heads):
    return heads / 8


def eager_attention_forward(x, /, *, power):
    yield from (x, x**power)


apply_rotary_emb = functools.partial(torch.mul, 0.5)
create_causal_mask = Mask()
create_sliding_window_causal_mask = (1, 2)


class Block(Simple):
    def forward(self, x):
        y = apply_rotary_emb(apply_rotary_pos_emb(super().forward(x)).x)
        y = create_causal_mask(y.shape[1]) @ y + build_alibi_tensor(heads=4)
        return sum(eager_attention_forward(y, power=2)) / sum(create_sliding_window_causal_mask)


model = Stack(Block).eval()
with torch.no_grad():
    for step in range(8):
        show(step, model(vectors()), apply_rotary_pos_emb.made, create_causal_mask.calls)
print(build_alibi_tensor.cache_info(), apply_rotary_emb.args, isinstance(apply_rotary_pos_emb, type))
