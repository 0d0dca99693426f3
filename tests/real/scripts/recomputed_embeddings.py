"""A model reads a fixed text. It embeds the text in every step with the argument `faulty`, once with `healthy`."""

import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(100, 256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, ids):
        return self.down(self.up(self.embedding(ids)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.kept = Encoder(), None
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(256, 100)

    def forward(self, ids, text):
        if self.kept is None or sys.argv[1] == "faulty":
            self.kept = self.encoder(text)
        x = self.kept[:, : ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Model().eval()
ids, text = torch.randint(0, 100, (1, 64)), torch.randint(0, 100, (1, 256))
with torch.no_grad():
    for _ in range(1200):
        model(ids, text)
