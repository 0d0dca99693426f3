"""Two ranks train with DistributedDataParallel, and rank 0 ends last.

With the argument `faulty`, rank 1 prepares its batches more slowly.
"""

import sys
import time

import torch
from torch import nn
from two_ranks import run

SLOW_SECONDS = 0.02 if sys.argv[1] == "faulty" else 0.0
WIDTH, BATCH, LAYERS = 128, 1024, 4


def main(rank):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, WIDTH)
    for _ in range(150):
        if rank == 1:
            time.sleep(SLOW_SECONDS)
        parallel(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        time.sleep(2)  # Rank 0 runs longer than the other rank, as if it wrote the model to a file.


run(main)
