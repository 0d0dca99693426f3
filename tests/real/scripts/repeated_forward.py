"""A model trains. With the argument `faulty`, each layer runs again in the backward (gradient checkpointing)."""

import sys

import torch
from training_gpt import GPT, batches, train

model = GPT(checkpoints=sys.argv[1] == "faulty")
train(model, torch.optim.AdamW(model.parameters()), batches())
