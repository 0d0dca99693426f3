"""A GPT in blocks and a training loop, shared by the training programs of this folder."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
torch.manual_seed(0)
WORDS, LENGTH = 100, 32


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class GPT(nn.Module):
    def __init__(self, words=WORDS, width=128, checkpoints=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Block(width) for _ in range(6))
        self.checkpoints = checkpoints

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


def train(model, optimizer, batches):
    for ids in batches:
        optimizer.zero_grad()
        scores = model(ids)
        nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


def batches(count=150, words=WORDS):
    return (torch.randint(0, words, (4, LENGTH)) for _ in range(count))
