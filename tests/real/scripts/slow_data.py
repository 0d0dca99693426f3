"""A model trains on batches of a data loader. With the argument `faulty`, each sample takes 3 ms to read."""

import sys
import time

import torch
from training_gpt import GPT, LENGTH, WORDS, train

SAMPLE_SECONDS = 0.003 if sys.argv[1] == "faulty" else 0.0


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, at):
        time.sleep(SAMPLE_SECONDS)
        return torch.arange(at, at + LENGTH) % WORDS


model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):  # two epochs
    train(model, optimizer, torch.utils.data.DataLoader(Samples(), batch_size=4))
