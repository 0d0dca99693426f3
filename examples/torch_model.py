"""A torch model, attached by one line. `cbtop run -- python PROGRAM` needs not even this line."""

import sys

import torch

import cbtop

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up_proj, self.down_proj = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down_proj(torch.nn.functional.gelu(self.up_proj(self.norm(x))))


model = torch.nn.Sequential(*(Block(128) for _ in range(4))).eval()
cbtop.attach(model)
with torch.inference_mode():
    for _ in range(steps):
        model(torch.ones(8, 128))
print(f"{steps} steps")
