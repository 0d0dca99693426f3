"""A model trains in float16 with a gradient scaler. With the argument `faulty`, its loss overflows repeatedly."""

import sys

import torch
from torch import nn
from training_gpt import GPT, batches

GROWS_FROM = 60  # Until this step, the program does the same with both arguments.

model = GPT(width=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for number, ids in enumerate(batches(), 1):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        scores = model(ids)
    loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), ids.flatten())
    if sys.argv[1] == "faulty" and number > GROWS_FROM:
        loss = loss * 2.0 ** ((number - GROWS_FROM) // 3)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sys.stdout.write(f"{number} {norm.item()} {scaler.get_scale()}\n")
    scaler.step(optimizer)
    scaler.update()
