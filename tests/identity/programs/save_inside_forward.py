"""A model saves, copies and hashes itself and its layers in the middle of its own step."""

import copy
import pickle

import torch
from small import IDS, Net, read_without_cbtop, show


class Saving(Net):
    step = 0

    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                show(self.step, pickle.dumps(layer), pickle.dumps(self.layers))
                torch.save(self.layers, f"layers-{self.step}.pt")
                x = x + copy.deepcopy(layer)(x)
        self.step += 1
        return self.lm_head(x)


READER = """
import pickle, torch
from small import show
show(pickle.load(sys.stdin.buffer)[0](torch.ones(1, 4, 16)))
"""
model = Saving().eval()
with torch.no_grad():
    for _ in range(6):
        show(model(IDS), pickle.dumps(model.layers))
print(read_without_cbtop(pickle.dumps(model.layers), READER))
