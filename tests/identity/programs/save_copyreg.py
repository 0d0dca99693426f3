"""Picklers with a dispatch table, a persistent id and a reducer pickle objects of a running model."""

import collections
import copyreg
import io
import pickle

import torch
from small import IDS, Net, show
from torch import nn


class Lists(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file, protocol=4)
        self.seen = collections.Counter()

    def persistent_id(self, value):
        self.seen[type(value).__name__] += 1
        return ("tensor", tuple(value.shape)) if isinstance(value, torch.Tensor) else None

    def reducer_override(self, value):
        self.seen["reduced " + type(value).__name__] += 1
        return NotImplemented


def reduce_linear(layer):
    return nn.Linear, (layer.in_features, layer.out_features), sorted(layer.__dict__)


copyreg.pickle(nn.LayerNorm, lambda norm: (nn.LayerNorm, (norm.normalized_shape,), None))
model = Net().eval()
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS))
        file = io.BytesIO()
        pickler = Lists(file)
        pickler.dump(model)
        show(file.getvalue(), pickler.seen, pickle.dumps(model))
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = copyreg.dispatch_table | {nn.Linear: lambda layer: (str, (str(layer),))}
        pickler.dump(model)
        show(file.getvalue())
