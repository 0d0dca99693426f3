"""Eight equal layers run. In the faulty program, one takes 1.5 times as long: `slow_layer.py [SECONDS] [faulty]`."""

import sys

import torch
from blocks import GPT
from steady import DEVICE, DTYPE, run
from torch import nn

WIDTH, LENGTH = (1024, 512) if DEVICE == "cuda" else (256, 64)
LAYERS, SLOW = 8, 5

model = GPT(WIDTH, LAYERS)
if "faulty" in sys.argv:
    # The weights of a layer are 12 x width², of which the feed-forward network has 8 x width². Making the network
    # 1.75 times as wide makes the layer 1.5 times as large.
    network, wide = model.layers[SLOW].mlp, 7 * WIDTH
    network.fc1, network.fc2 = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)
model = model.eval().to(DEVICE, DTYPE)
words = torch.randint(0, 2000, (1, LENGTH), device=DEVICE)


@torch.no_grad()
def score():
    return model(words).argmax(-1).tolist()


run(score)
