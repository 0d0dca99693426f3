"""Score a text with a GPT that is written by hand."""

import torch
from blocks import GPT
from steady import DEVICE, DTYPE, run

WIDTH, LAYERS, BATCH, LENGTH = (1024, 24, 8, 512) if DEVICE == "cuda" else (256, 4, 1, 48)
model = GPT(WIDTH, LAYERS).eval().to(DEVICE, DTYPE)
words = torch.randint(0, 2000, (BATCH, LENGTH), device=DEVICE)


@torch.no_grad()
def score():
    scores = model(words).float().log_softmax(-1)
    return scores[:, :-1].gather(-1, words[:, 1:, None]).sum((1, 2)).tolist()


run(score)
