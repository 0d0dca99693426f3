"""Train a GPT with AdamW."""

import torch
from blocks import GPT
from steady import DEVICE, run

WIDTH, LAYERS, BATCH, LENGTH = (768, 12, 8, 256) if DEVICE == "cuda" else (128, 3, 1, 32)
model = GPT(WIDTH, LAYERS).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
words = torch.randint(0, 2000, (BATCH, LENGTH), device=DEVICE)


def train():
    with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda"):
        scores = model(words[:, :-1])
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), words[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


run(train)
