"""A logits processor saves the model while it generates."""

import copy
import pickle

import torch
from small import IDS, llama, show
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList


class Saves(LogitsProcessor):
    def __init__(self, model):
        self.model, self.calls = model, 0

    def __call__(self, ids, scores):
        torch.save(self.model, f"model-{self.calls}.pt")
        show(self.calls, scores, pickle.dumps(self.model.model.layers))
        self.calls += 1
        return scores


class Copies(StoppingCriteria):
    def __init__(self, model):
        self.model = model

    def __call__(self, ids, scores, **options):
        show(copy.deepcopy(self.model)(IDS).logits)
        return torch.zeros(ids.shape[0], dtype=torch.bool)


model = llama()
for _ in range(2):
    show(model.generate(
        IDS, max_new_tokens=4, do_sample=False,
        logits_processor=LogitsProcessorList([Saves(model)]), stopping_criteria=StoppingCriteriaList([Copies(model)]),
    ))  # fmt: skip
