"""Check the time stamps that kernels write themselves: `python -m benchmarks.gpu.stamps`.

A pass of one token through a 7B in Q4_K_M is launched kernel by kernel while CUPTI records it. For each launch, the
stamped duration is compared with CUPTI's, which is from the start to the end of the kernel in the hardware.
"""

from __future__ import annotations

import statistics

import torch  # provides libcupti

from benchmarks.gpu.shapes import LAYERS, model_7b
from cbtop.compute.decoder.on_gpu import GpuDecoder
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu.passes import LaunchedPass
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.device.cupti import KernelRecord, TorchsCupti, decoded, demangled
from cbtop.profiler.device.kernel_burst import OF_KERNELS
from cbtop.profiler.profiler import BrickProfiler

PASSES, CONTEXT = 5, 2048
CLOSE_SHARE, CLOSE_NS = 0.05, 300


def stamped_and_told(decoder: GpuDecoder, gpu: Gpu, cupti: TorchsCupti) -> list[tuple[str, int, int]]:
    """Return the name, the stamped duration and CUPTI's duration (ns) of each launch of a pass."""
    stamps = decoder._stamps
    cupti.begin(OF_KERNELS)
    try:
        ran = LaunchedPass(gpu, stamps, decoder._code_space)
        decoder._whole_pass((1,), ran.run, ran.layer)
        gpu.cupy.cuda.runtime.deviceSynchronize()
        cupti.end()
        records = [one for one in map(decoded, cupti.records()) if isinstance(one, KernelRecord)]
        named = [(demangled(cupti.text(one.name_at)), one) for one in sorted(records, key=lambda one: one.start_ns)]
    finally:
        cupti.finalize()
    own = [one.what.name for one in ran.launched if isinstance(one.what, KernelDefinition)]
    told = [(name, one.end_ns - one.start_ns) for name, one in named if name in own]
    assert [name for name, _ in told] == own, f"CUPTI has other kernels than were launched: {named[:20]} {own[:20]}"
    times = gpu.host(stamps[: len(own)]).astype("i8")
    return [(name, int(end - begin), ns) for (begin, end), (name, ns) in zip(times, told, strict=True)]


def main() -> None:
    torch.cuda.init()
    gpu = Gpu()
    decoder = GpuDecoder(gpu, model_7b(gpu), BrickProfiler(enabled=False), CONTEXT)
    decoder.decode(decoder.prefill([*range(1500)]))
    cupti = TorchsCupti()
    stamped_and_told(decoder, gpu, cupti)
    both: dict[str, list[tuple[int, int]]] = {}
    for _ in range(PASSES):
        for name, stamped, told in stamped_and_told(decoder, gpu, cupti):
            both.setdefault(name, []).append((stamped, told))
    print(f"{gpu.name}, {LAYERS} layers, position {decoder.position}, {PASSES} passes, launch by launch")
    print(f"{'kernel':24} {'launches':>8} {'stamped us':>11} {'CUPTI us':>9} {'difference':>11}")
    for name, pairs in both.items():
        stamped, told = (statistics.median(values) for values in zip(*pairs, strict=True))
        off = statistics.median(one - other for one, other in pairs)
        verdict = "" if abs(off) <= max(CLOSE_NS, CLOSE_SHARE * told) else "  more than 5 % and 0.3 us"
        print(f"{name:24} {len(pairs):8} {stamped / 1e3:11.2f} {told / 1e3:9.2f} {off / 1e3:+11.2f}{verdict}")


if __name__ == "__main__":
    main()
