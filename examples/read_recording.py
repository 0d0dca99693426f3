"""The slowest bricks of a recording, as data: python examples/read_recording.py run.cbtop"""

import sys
from collections import defaultdict

import cbtop

if len(sys.argv) != 2:
    sys.exit("pass a recording: python examples/read_recording.py run.cbtop")
bricks = cbtop.read(sys.argv[1]).bricks()
times_us = defaultdict(list)
for name, outer, microseconds in zip(
    bricks.column("brick"), bricks.column("outer_brick"), bricks.column("duration_us"), strict=True
):
    if not outer:  # a brick inside another one is part of its time
        times_us[name].append(microseconds)
for name, each_us in sorted(times_us.items(), key=lambda one: -sum(one[1])):
    median_us = sorted(each_us)[len(each_us) // 2]
    print(f"{name:24} {len(each_us):8,} calls {sum(each_us) / 1e3:12,.1f} ms {median_us:10,.1f} µs p50")
