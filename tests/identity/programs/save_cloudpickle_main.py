"""A model of `__main__` and its rotary helper are pickled by value with cloudpickle and loaded without cbtop."""

import itertools
import pickle
from types import SimpleNamespace
from uuid import UUID

import cloudpickle
import torch
import torch.nn.functional as F
from small import IDS, exact, read_without_cbtop, rotate_half, show
from torch import nn

numbers = itertools.count()
# Fix this value, so that the pickle has the same bytes in each run.
cloudpickle.cloudpickle.uuid = SimpleNamespace(uuid4=lambda: UUID(int=next(numbers)))


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).float()[:, None].expand(-1, x.shape[2]) / 10
        q, k = apply_rotary_pos_emb(self.q_proj(x), self.k_proj(x), angles.cos(), angles.sin())
        return x + self.o_proj(F.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None])[:, 0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(Attention(16) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


READER = """
import pickle, torch
torch.set_num_threads(1)
model = pickle.load(sys.stdin.buffer)
print(float(model(torch.tensor([[1, 2, 3, 4]])).sum()).hex())
"""
model = Model().eval()
with torch.no_grad():
    for step in range(10):
        answer = model(IDS)
        if step in (0, 1, 9):
            data = cloudpickle.dumps(model)
            show(step, float(answer.sum()), b"cbtop" in data)
            print(exact(data), exact(cloudpickle.dumps(apply_rotary_pos_emb)))
            if step != 1:
                print(read_without_cbtop(data, READER))
        print(pickle.loads(pickle.dumps(apply_rotary_pos_emb)) is apply_rotary_pos_emb)
