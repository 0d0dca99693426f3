"""Compare attention on a CUDA device with reading the same bytes. The sizes are those of a 7B model: 28 heads of 128
numbers, with 4 f16 heads of keys and values.

Two cases are measured: one token that sees 1 K, 8 K or 32 K positions, and 512 tokens that see each other and 7,680
earlier positions. Each round first replays a graph of attention calls, captured as in a decoder. The calls use the
caches of several layers, which together exceed the second-level cache. Then the round replays a graph of a kernel
that reads as many bytes in as many launches. Ratios are computed round by round. If torch is installed, prompts are
also compared with its attention in float16. torch multiplies float16 numbers. Our kernel multiplies float32 numbers,
as sums of two float16 numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from benchmarks.base import Ratio
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, line
from cbtop.compute.gpu.device import Gpu, launches_of
from cbtop.compute.kernels import attention

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128
CONTEXTS, PROMPT = (1024, 8192, 32768), 512
ALL_BYTES, ROUNDS, REPLAYS = 400_000_000, 15, 5
READ_THREADS, READ_LOADS = 256, 8
READ = CudaModule(
    "read",
    f"""
KERNEL read(const uint4* from, int64_t size, uint32_t* out STAMP)
{{
    ENTER
    uint32_t sum = 0;
    const int64_t first = (int64_t)blockIdx.x * {READ_THREADS * READ_LOADS} + threadIdx.x;
#pragma unroll
    for (int i = 0; i < {READ_LOADS}; i++)
        if (first + i * {READ_THREADS} < size) {{
            const uint4 some = __ldg(from + first + i * {READ_THREADS});
            sum += some.x ^ some.y ^ some.z ^ some.w;
        }}
    if (sum == 0x12345678u) *out = sum;
    LEAVE
}}
""",
)


class Layers:
    """Key-value caches of `context` positions with random contents. They are for enough layers to exceed the device's
    cache.
    """

    def __init__(self, gpu: Gpu, context: int) -> None:
        self.context = context
        self.bytes = 2 * KV_HEADS * context * HEAD_DIM * 2
        self.count = max(ALL_BYTES // self.bytes, 4)
        shape = self.count, 2, KV_HEADS, context, HEAD_DIM
        random = gpu.cupy.random
        self.numbers = random.standard_normal(shape, dtype=np.float32).astype(np.float16).view(np.uint16)


kept: list[object] = []  # Keep the arrays of captured launches alive until the process ends.


def graph_of(gpu: Gpu, enqueue: Callable[[], None]) -> Callable[[], float]:
    """Capture the launches that `enqueue` makes. Return a function that replays them, and returns the duration of a
    replay in microseconds.
    """
    cupy = gpu.cupy
    stream = cupy.cuda.Stream()
    with stream:
        enqueue()
        stream.begin_capture()
        enqueue()
        graph = stream.end_capture()
    begun, ended = cupy.cuda.Event(), cupy.cuda.Event()

    def replay_us() -> float:
        begun.record(stream)
        for _ in range(REPLAYS):
            graph.launch(stream)
        ended.record(stream)
        ended.synchronize()
        return float(cupy.cuda.get_elapsed_time(begun, ended) * 1e3 / REPLAYS)

    kept.append(enqueue)
    return replay_us


def attend(gpu: Gpu, layers: Layers, tokens: int) -> Callable[[], None]:
    """Return a function that enqueues the attention calls of all layers, for `tokens` tokens at the end of the
    context.
    """
    q = gpu.array(np.random.default_rng(1).standard_normal((tokens, HEADS * HEAD_DIM), dtype=np.float32))
    out, start = gpu.zeros(q.shape, np.float32), gpu.array(np.array([layers.context - tokens], np.int32))
    scratch = gpu.zeros(attention.scratch_shape(gpu.multiprocessors), np.float32)

    def enqueue() -> None:
        for keys, values in layers.numbers:
            call = q, keys, values, start, HEAD_DIM**-0.5, 0, 0.0, out, scratch
            for one in launches_of(attention.ATTENTION, call):
                gpu.launch(one, is_early=True)

    return enqueue


def read(gpu: Gpu, layers: Layers) -> Callable[[], None]:
    words, out = layers.bytes // 16, gpu.zeros(1, np.uint32)
    grid = line(-(-words // (READ_THREADS * READ_LOADS)), READ_THREADS)

    def enqueue() -> None:
        for layer in layers.numbers:
            gpu.launch(CudaLaunch(READ, "read", *grid, (layer, np.int64(words), out)), is_early=True)

    return enqueue


def by_torch(layers: Layers, tokens: int) -> Callable[[], float] | None:
    """Return a function that measures torch's attention over all layers, in microseconds.

    Returns None without torch.
    """
    try:
        import torch
    except ImportError:
        return None
    from torch.nn.attention.bias import causal_lower_right

    caches = torch.from_dlpack(layers.numbers.view(np.float16))
    q = torch.randn((1, HEADS, tokens, HEAD_DIM), device="cuda", dtype=torch.float16)
    seen = causal_lower_right(tokens, layers.context)
    keys = [[half.repeat_interleave(HEADS // KV_HEADS, 0)[None] for half in layer] for layer in caches[:4]]

    def enqueue() -> None:
        for one in keys:
            torch.nn.functional.scaled_dot_product_attention(q, *one, attn_mask=seen)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        enqueue()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run_us() -> float:
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended) * 1e3 / len(keys) * layers.count)

    return run_us


def main() -> None:
    gpu = Gpu()
    print(f"{gpu.name}, {gpu.multiprocessors} multiprocessors")
    for context in CONTEXTS:
        layers = Layers(gpu, context)
        ours, plain = graph_of(gpu, attend(gpu, layers, 1)), graph_of(gpu, read(gpu, layers))
        rounds = [(ours(), plain()) for _ in range(ROUNDS)]
        share = Ratio.of([own for _, own in rounds], [own for own, _ in rounds])
        took, reading = (statistics.median(times) / layers.count for times in zip(*rounds, strict=True))
        print(
            f"  1 token at {context:6,}: {took:7.2f} us a layer, {layers.bytes / took / 1e3:6.0f} GB/s; reading "
            f"{reading:7.2f} us, {layers.bytes / reading / 1e3:6.0f} GB/s; share {share.median:.3f} "
            f"({share.low:.3f} to {share.high:.3f})"
        )
    for context in (PROMPT, CONTEXTS[1]):
        layers = Layers(gpu, context)
        ours, peer = graph_of(gpu, attend(gpu, layers, PROMPT)), by_torch(layers, PROMPT)
        both = [(ours(), peer() if peer else float("nan")) for _ in range(ROUNDS)]
        took, its = (statistics.median(times) / layers.count for times in zip(*both, strict=True))
        products = 4 * HEADS * HEAD_DIM * attention.positions_seen(context - PROMPT, PROMPT, 0)
        print(
            f"  {PROMPT} tokens up to {context:6,}: {took:7.1f} us a layer, {products / took / 1e6:6.0f} TFLOP/s "
            f"counted once; torch in float16 {its:7.1f} us"
        )


if __name__ == "__main__":
    main()
