"""Counts of references to a model, its layers, its weights and its functions are as before the first step."""

import gc
import sys
import weakref

import torch
from small import IDS, Net, apply_rotary_pos_emb, show


def counts(model):
    layer = model.layers[0]
    print([sys.getrefcount(value) for value in (model, layer, layer.mlp, layer.mlp[0].weight, apply_rotary_pos_emb)])
    print([weakref.getweakrefcount(value) for value in (model, layer, layer.mlp[0].weight)])
    print(sorted(type(value).__name__ for value in gc.get_referrers(layer) if not isinstance(value, type(gc))))


model = Net().eval()
counts(model)
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS))
        counts(model)
