"""A model trains.

With the argument `faulty`, its vocabulary is so large that the optimizer takes most of the time.
"""

import sys

import torch
from training_gpt import GPT, batches, train

model = GPT(words=40_000 if sys.argv[1] == "faulty" else 100)
model.head = torch.nn.Linear(128, 100)
train(model, torch.optim.AdamW(model.parameters()), batches())
