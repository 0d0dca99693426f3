"""Compares members of classes and modules by identity: before a step, in the middle of a step, and after it."""

import small
import torch
import torch.nn.functional as F
from small import IDS, Net, llama, show
from torch import nn
from transformers import cache_utils
from transformers.generation import utils as generation
from transformers.models.llama import modeling_llama

OWNERS = (
    small, F, nn.Module, nn.Linear, small.Net, small.Block, small.Attention, modeling_llama,
    modeling_llama.LlamaAttention, modeling_llama.LlamaForCausalLM, generation.GenerationMixin, cache_utils.Cache,
    cache_utils.DynamicCache, generation.LogitsProcessorList, generation.StoppingCriteriaList,
)  # fmt: skip


def changed():
    for owner, members in zip(OWNERS, before, strict=True):
        now = dict(vars(owner))
        names = sorted(name for name in now.keys() | members.keys() if now.get(name) is not members.get(name))
        if names:
            print(owner.__name__, names)


class Looks(Net):
    def forward(self, ids):
        logits = super().forward(ids)
        changed()
        return logits


model, net = llama(), Looks().eval()
before = [dict(vars(owner)) for owner in OWNERS]
with torch.no_grad():
    for step in range(6):
        show(step, net(IDS), model(IDS).logits)
        changed()
        show(model.generate(IDS, max_new_tokens=3, do_sample=False))
        changed()
