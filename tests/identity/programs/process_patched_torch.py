"""The program replaces functions of torch and transformers, and restores the functions in a different order."""

from unittest import mock

import torch
import torch.nn.functional as F
from small import IDS, Net, llama, show
from torch import nn
from transformers.models.llama import modeling_llama

builtin, rope, call = F.scaled_dot_product_attention, modeling_llama.apply_rotary_pos_emb, nn.Module.__call__
calls = []


def own_attention(*args, **options):
    calls.append("attention")
    return builtin(*args, **options)


def own_rope(*args, **options):
    calls.append("rope")
    return rope(*args, **options)


def own_call(self, *args, **options):
    calls.append("call")
    return call(self, *args, **options)


net, model = Net().eval(), llama()
with torch.no_grad():
    for step in range(5):
        show(step, net(IDS), model(IDS).logits, len(calls))
        F.scaled_dot_product_attention = own_attention
        show(net(IDS), len(calls), F.scaled_dot_product_attention is own_attention)
        with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", own_rope):
            show(model(IDS).logits, len(calls))
            nn.Module.__call__ = own_call
            show(net(IDS), model(IDS).logits, len(calls))
            F.scaled_dot_product_attention = builtin
        nn.Module.__call__ = call
        show(net(IDS), len(calls), modeling_llama.apply_rotary_pos_emb is rope, nn.Module.__call__ is call)
        with mock.patch("torch.nn.functional.scaled_dot_product_attention", wraps=builtin) as patched:
            show(net(IDS), patched.call_count)
        print(F.scaled_dot_product_attention is builtin, calls[-3:])
