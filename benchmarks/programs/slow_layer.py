"""Run eight equal layers. In the faulty program, one of them takes 1.5 times as long: `slow_layer.py [SECONDS]
[faulty]`.
"""

import sys

import torch
from blocks import GPT
from steady import DEVICE, DTYPE, run
from torch import nn

WIDTH, LENGTH = (1024, 512) if DEVICE == "cuda" else (256, 64)
LAYERS, SLOW = 8, 5

model = GPT(WIDTH, LAYERS)
if "faulty" in sys.argv:
    # A layer has 12 x width² weights, and 8 x width² of them are in the feed-forward network. If the network is 1.75
    # times as wide, the layer is 1.5 times as large.
    network, wide = model.layers[SLOW].mlp, 7 * WIDTH
    network.fc1, network.fc2 = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)
model = model.eval().to(DEVICE, DTYPE)
words = torch.randint(0, 2000, (1, LENGTH), device=DEVICE)


@torch.no_grad()
def score():
    return model(words).argmax(-1).tolist()


run(score)
