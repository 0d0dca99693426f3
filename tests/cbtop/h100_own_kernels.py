"""The program of the recording `h100_own_kernels.cbtop`: our own kernels run a random 7B in Q4_K_M on one H100.

    python tests/cbtop/h100_own_kernels.py &
    cbtop record -o h100_own_kernels.cbtop --duration 4

Each prompt has 512 tokens. Then the captured graph decodes 300 tokens. In one of 8 steps, kernels record
their times.
"""

from __future__ import annotations

import time

from benchmarks.gpu.shapes import LAYERS, model_7b
from cbtop.compute.decoder.on_gpu import GpuDecoder
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu_ceilings import measure_gpus
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Manifest

PROMPT, NEW, CONTEXT, SECONDS = 512, 300, 4096, 10.0

gpu = Gpu()
model = model_7b(gpu)
profiler = BrickProfiler(sample_every=8)
profiler.announce(
    Manifest(
        model=model.name,
        architecture=model.architecture,
        backend=gpu.label,
        quantization=model.quantization,
        threads=1,
        layers=LAYERS,
        hidden_size=model.hidden,
        context_length=CONTEXT,
        parameters=7_000_000_000,
        weights_bytes=model.weights_bytes,
    )
)
for roofs, _ in measure_gpus(lambda what, done: None):
    for ceiling in roofs.ceilings:
        profiler.announce(ceiling)
decoder = GpuDecoder(gpu, model, profiler, CONTEXT)
until_s = time.monotonic() + SECONDS
while time.monotonic() < until_s:
    decoder.restart()
    token = decoder.prefill([*range(PROMPT)])
    for _ in range(NEW):
        token = decoder.decode(token)
decoder.tell()
profiler.close("done")
