"""Bricks on a CUDA stream, timed by the GPU without waiting for it: python examples/cuda_stream.py"""

import sys

import torch

from cbtop import BrickId, BrickProfiler
from cbtop.profiler.instrument.torch_clock import torch_clock

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
if not torch.cuda.is_available():
    sys.exit("this example needs an NVIDIA GPU")
profiler = BrickProfiler(device_clock=torch_clock())
x = torch.ones(1, 4096, device="cuda")
weight = torch.randn(4096, 4096, device="cuda")

with torch.cuda.stream(torch.cuda.Stream()):
    for _ in range(steps):
        with profiler.step("decode", tokens=1), profiler.layer(0):
            with profiler.brick(BrickId.RMS_NORM, elements=x.numel()):
                y = x / (x.square().mean() + 1e-6).sqrt()
            with profiler.brick(BrickId.DOWN_PROJECTION, elements=x.numel()):
                y = y @ weight
profiler.finalize()
print(profiler.report())
