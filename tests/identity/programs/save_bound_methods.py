"""Pickles bound methods of a running model, and partials of such methods."""

import functools
import pickle

import torch
from small import IDS, Net, show

model = Net().eval()
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS))
        methods = (model.forward, model.layers[0].self_attn._split_heads, model.__call__, model.layers[1].forward)
        for method in methods:
            data = pickle.dumps(method)
            show(method.__name__, method.__qualname__, data, pickle.loads(data).__name__)
        partial = functools.partial(model, IDS)
        show(pickle.dumps(partial), pickle.loads(pickle.dumps(partial))())
        show(pickle.loads(pickle.dumps(model.__call__))(IDS), model.forward == model.forward)
