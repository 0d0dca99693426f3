"""Two ranks train with FSDP2. With the argument `faulty`, they gather more than they compute.

The program prints the share of the latest steps in which it waited for collectives, by its own clocks around them.
"""

import sys
import time
from collections import deque

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from two_ranks import run

WIDTH, BATCH, STEPS = (256, 1, 120) if sys.argv[1] == "faulty" else (256, 4096, 50)


LATEST = 64
waited = [0.0]  # seconds of the step in collectives, and 1 more entry for each collective that is running


def timed(function):
    """Return `function` with a clock around it. A collective inside another one is not timed."""

    def call(*args, **keywords):
        waited.append(0.0)
        begun = time.perf_counter()
        try:
            return function(*args, **keywords)
        finally:
            waited.pop()
            if len(waited) == 1:
                waited[0] += time.perf_counter() - begun

    return call


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(rank):
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(BATCH, WIDTH)
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(distributed, name):  # the names depend on the version of torch
            setattr(distributed, name, timed(getattr(distributed, name)))
    seconds, waits = deque(maxlen=LATEST), deque(maxlen=LATEST)
    for _ in range(STEPS):
        begun, waited[0] = time.perf_counter(), 0.0
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        waits.append(waited[0])
    sys.stdout.write(f"rank {rank}: {100 * sum(waits) / sum(seconds):.1f} % of a step\n")


run(main)
