"""While another model runs, a new model stores Llama's rotary function and its attention interface in attributes."""

import copy
import pickle

import torch
from small import IDS, llama, show, vectors
from torch import nn
from transformers.models.llama import modeling_llama

original = modeling_llama.apply_rotary_pos_emb


class Rotates(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotate, self.proj = modeling_llama.apply_rotary_pos_emb, nn.Linear(8, 8)
        self.repeat = modeling_llama.repeat_kv

    def forward(self, x):
        angles = torch.arange(4.0)[:, None].expand(4, 8)
        return self.rotate(self.proj(x), x, angles.cos(), angles.sin(), unsqueeze_dim=0)[0]


model = llama()
with torch.no_grad():
    for step in range(8):
        show(step, model(IDS).logits)
        rotates = Rotates()
        show(rotates(vectors()), rotates.rotate is original, rotates.rotate == original, pickle.dumps(rotates.rotate))
        torch.save(rotates, f"rotates-{step}.pt")
        show(pickle.dumps(copy.deepcopy(rotates)), rotates.rotate.__module__, repr(type(rotates.rotate)))
        print(modeling_llama.eager_attention_forward.__code__.co_name)
