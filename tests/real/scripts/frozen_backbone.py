"""A model trains with evaluations between epochs. With the argument `healthy`, all layers but the last are frozen."""

import sys

import torch
from training_gpt import GPT, batches, train

model = GPT()
if sys.argv[1] == "healthy":
    for module in (model.embedding, *model.layers[:-1]):
        module.requires_grad_(False)
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
for _ in range(3):
    model.train()
    train(model, optimizer, batches(60))
    model.eval()
    with torch.no_grad():
        for ids in batches(10):
            model(ids)
