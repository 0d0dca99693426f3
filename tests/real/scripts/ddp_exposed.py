"""Two ranks train with DistributedDataParallel. With the argument `faulty`, gradients take longer than computation.

The program prints the share of the latest steps in which DistributedDataParallel waited for gradients. This share
comes from the times that DistributedDataParallel measured itself.
"""

import sys
import time
from collections import deque

import torch
from torch import nn
from two_ranks import run

WIDTH, BATCH, STEPS = (2048, 1, 150) if sys.argv[1] == "faulty" else (256, 8192, 100)
LATEST = 80


def main(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8, bias=False))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel._set_ddp_runtime_logging_sample_rate(1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, WIDTH)
    seconds, waits = deque(maxlen=LATEST), deque(maxlen=LATEST)
    for _ in range(STEPS):
        begun = time.perf_counter()
        parallel(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seconds.append(time.perf_counter() - begun)
        # DistributedDataParallel reports the times of the step before, if there is one.
        times = parallel._get_ddp_logging_data()
        waits.append(times.get("backward_comm_time_end", 0) - times.get("backward_compute_time_end", 0))
    sys.stdout.write(f"rank {rank}: {100 * sum(waits) / 1e9 / sum(seconds):.1f} % of a step\n")


run(main)
