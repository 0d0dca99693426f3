"""A sentence encoder: its modules pass a dictionary on, and its vectors are pooled, normalised and compared."""

import torch
from small import Block, show
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(50, 16), nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, features):
        x = self.embed(features["input_ids"])
        for layer in self.encoder:
            x = layer(x)
        features["token_embeddings"] = x
        return features


class Pooling(nn.Module):
    def forward(self, features):
        mask = features["attention_mask"][..., None].float()
        features["sentence"] = (features["token_embeddings"] * mask).sum(1) / mask.sum(1)
        return features


class Encoder(nn.Sequential):
    @torch.inference_mode()
    def encode(self, sentences):
        length = max(map(len, sentences))
        ids = torch.tensor([sentence + [0] * (length - len(sentence)) for sentence in sentences])
        features = self({"input_ids": ids, "attention_mask": ids.ne(0)})
        return nn.functional.normalize(features["sentence"], dim=-1)


encoder = Encoder(Words(), Pooling()).eval()
for step in range(6):
    vectors = encoder.encode([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    show(step, vectors, vectors @ vectors.T)
