"""Two ranks train with DistributedDataParallel; in the faulty program, gradients take longer than the computation.

Prints the share of a step that communication takes by the program's own clock: the same steps take less time in
`no_sync`, in which DistributedDataParallel sends nothing.
"""

import sys
import time
from contextlib import nullcontext
from statistics import median

import torch
from torch import nn
from two_ranks import run

WIDTH, BATCH, LAYERS = (1024, 1, 2) if sys.argv[1] == "faulty" else (128, 4096, 4)
WITHOUT, WITH = range(20, 60), range(60, 200)


def main(rank):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, WIDTH)
    seconds = []
    for step in range(WITH.stop):
        begun = time.perf_counter()
        with parallel.no_sync() if step in WITHOUT else nullcontext():
            parallel(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seconds.append(time.perf_counter() - begun)
    exposed = 1 - median(seconds[step] for step in WITHOUT) / median(seconds[step] for step in WITH)
    sys.stdout.write(f"rank {rank}: {100 * exposed:.1f} % of a step\n")


run(main)
