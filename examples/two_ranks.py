"""Two processes of one job. `cbtop` shows each rank, and `m` merges them: python examples/two_ranks.py"""

import os
import subprocess
import sys
import time

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
if "RANK" not in os.environ:  # start both ranks, as torchrun does
    job = {**os.environ, "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**job, "RANK": str(rank)}) for rank in (0, 1)]
    sys.exit(max(rank.wait() for rank in ranks))

from cbtop import BrickId, BrickProfiler  # noqa: E402 - after the ranks know who they are

profiler = BrickProfiler()
for _ in range(steps):
    with profiler.step("decode", tokens=1), profiler.layer(0), profiler.brick(BrickId.DOWN_PROJECTION):
        time.sleep(0.001 if os.environ["RANK"] == "0" else 0.0015)  # rank 1 is the straggler
print("rank", os.environ["RANK"], profiler.report().steps, "steps")
