"""Two ranks train with DistributedDataParallel; in the faulty program, gradients take longer than the computation.

Prints the share of a step that communication takes by the program's own clock: the same steps take less time in
`no_sync`, in which DistributedDataParallel sends nothing. All gradients are in one bucket, so nothing overlaps.
"""

import sys
import time
from contextlib import nullcontext
from statistics import mean

import torch
from torch import nn
from two_ranks import run

WIDTH, BATCH, STEPS = (1024, 1, 600) if sys.argv[1] == "faulty" else (256, 8192, 120)
LATEST = STEPS - 50  # steps that communicate


def main(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8, bias=False))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, WIDTH)
    seconds, without = [], range(15, STEPS - LATEST)
    for step in range(STEPS):
        begun = time.perf_counter()
        with parallel.no_sync() if step in without else nullcontext():
            parallel(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seconds.append(time.perf_counter() - begun)
    exposed = 1 - mean(seconds[step] for step in without) / mean(seconds[-LATEST:])
    sys.stdout.write(f"rank {rank}: {100 * exposed:.1f} % of a step\n")


run(main)
