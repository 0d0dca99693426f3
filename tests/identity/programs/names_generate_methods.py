"""A model has methods with the names of transformers' generation, with other parameters or as static methods.

It also has its own `generate`.
"""

import torch
from small import IDS, Net, show


class Own(Net):
    @staticmethod
    def prepare_inputs_for_generation(ids, temperature=1.0):
        return ids[:, -8:], temperature

    @property
    def _update_model_kwargs_for_generation(self):
        return {"steps": 4}

    def _update_causal_mask(self):
        return "mask"

    @torch.no_grad()
    def generate(self, ids, steps):
        for _ in range(steps):
            inputs, temperature = self.prepare_inputs_for_generation(ids, temperature=0.5)
            logits = self(inputs)[:, -1] / temperature
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        return ids


class ByClass(Own):
    prepare_inputs_for_generation = classmethod(lambda cls, ids, **options: (ids, len(cls.__name__)))


class AsClass(Own):
    class prepare_inputs_for_generation(tuple):  # noqa: N801 - the name is the point
        def __new__(cls, ids, temperature):
            return tuple.__new__(cls, (ids, temperature))


for kind in (Own, ByClass, AsClass):
    model = kind().eval()
    for _ in range(3):
        show(kind.__name__, model.generate(IDS, **model._update_model_kwargs_for_generation))
