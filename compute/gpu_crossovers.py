"""Time a decoder's passes on a GPU and on this processor, and find how much work makes the GPU faster.

Rules
- Work is counted per layer, because the time of a pass is proportional to the number of layers on both processors.
- From the crossover on, the GPU is faster at all measured sizes by more than the spread of the times. If there is no
  such size, all work stays on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.crossovers import PairedTimes, Rung, crossover, timed
from cbtop.compute.decoder.base import MAX_EXPERTS, LayerWeights, Model, Norm, Projection, Rope
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import interleaved
from cbtop.compute.decoder.on_gpu import GpuDecoder, model_on
from cbtop.compute.gguf import GgufFile
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.crossovers import Crossover

DECODING, PROMPTS = "gpu_layer_bytes", "gpu_prompt_bytes"
HIDDEN = (256, 512, 1024, 2048)  # hidden sizes of the measured models; one layer has 0.6 to 36 MB of Q4_K
LAYERS, HEAD_DIM, VOCABULARY = 2, 64, 1024
HIDDEN_OF_PROMPTS, TOKENS = 512, (1, 4, 16, 64, 256)
SEED = 11


def measure_gpu_crossovers(
    threads: int, progress: Callable[[str], None], time: Callable[..., list[PairedTimes]] = timed
) -> tuple[Crossover, ...]:
    """Measure how much work a pass must have to be faster on the first GPU than on `threads` CPU threads.

    - DECODING: work is the bytes of weights that a token reads per layer.
    - PROMPTS: work is these bytes times the number of tokens in the prompt.

    The note of each crossover is the GPU's name. Raises ComputeError without a GPU, or if its memory is too small.
    """
    gpu = Gpu()
    progress(DECODING)
    decoding = crossover(DECODING, time([_step(gpu, hidden, threads, None) for hidden in HIDDEN]), gpu.name)
    progress(PROMPTS)
    prompts = [_step(gpu, HIDDEN_OF_PROMPTS, threads, tokens) for tokens in TOKENS]
    return decoding, crossover(PROMPTS, time(prompts), gpu.name)


def layer_bytes(path: Path) -> int:
    """Return the bytes of weights that a token reads per layer of the model at `path`.

    Raises ModelError if the file is not a model.
    """
    with GgufFile.open(path) as file:
        prefix = file.metadata.text("general.architecture")
        size, of_experts = file.size_bytes("blk."), file.size_bytes("_exps.")
        if of_experts:
            count = file.metadata.integer(f"{prefix}.expert_count", MAX_EXPERTS)
            size -= of_experts * (count - file.metadata.integer(f"{prefix}.expert_used_count", count)) // count
        return size // file.metadata.integer(f"{prefix}.block_count", 1 << 16)


def _step(gpu: Gpu, hidden: int, threads: int, tokens: int | None) -> Rung:
    """Return the same work for the CPU (`before`) and for the GPU (`after`), to be timed.

    The work is a prompt of `tokens` tokens. Without `tokens`, it is decoding the first token of a sequence.
    """
    model = _model(hidden)
    on_gpu = model_on(gpu, model, is_exact=False)
    on_cpu = model if TIER == "generic" else interleaved(model)
    context, silent = tokens or 1, BrickProfiler(enabled=False)
    decoders = Decoder(on_cpu, "cpu", threads, silent, context), GpuDecoder(gpu, on_gpu, silent, context)

    def run(decoder: Decoder) -> Callable[[], object]:
        def step() -> None:
            decoder.restart()
            if tokens is None:
                decoder.decode(1)
            else:
                decoder.prefill([1] * tokens)

        return step

    size = model.weights_bytes // LAYERS * (tokens or 1)
    return Rung(size, *map(run, decoders))


def _model(hidden: int) -> Model:
    """Return a model of random weights in Q4_K, with the proportions of a small qwen2."""
    heads = hidden // HEAD_DIM
    kv_heads, feed_forward = heads // 4, 4 * hidden
    no_bias, ones = np.zeros(0, np.float32), Norm(np.ones(hidden, np.float32))
    rope = Rope("neox", HEAD_DIM, 1e6, 1.0, 1.0, None, None, 1, 0.0, (32.0, 1.0))

    def product(rows: int, columns: int) -> Projection:
        return Projection(_matrix(rows, columns), no_bias)

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=ones, q=product(hidden, hidden), k=product(kv_heads * HEAD_DIM, hidden),
            v=product(kv_heads * HEAD_DIM, hidden), q_norm=None, k_norm=None, output=product(hidden, hidden),
            attention_post_norm=None, ffn_norm=ones, gate=product(feed_forward, hidden),
            up=product(feed_forward, hidden), down=product(hidden, feed_forward), router=None, ffn_post_norm=None,
            slides=False,
        )  # fmt: skip

    layers = tuple(layer() for _ in range(LAYERS))
    sizes = (one.weight.size_bytes for each in layers for one in _products(each))
    return Model(
        name="random", architecture="qwen2", quantization="Q4_K", hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=HEAD_DIM, feed_forward=feed_forward, vocabulary=VOCABULARY, context_length=max(TOKENS), window=0,
        epsilon=1e-6, rope=rope, sliding_rope=rope, activation="silu", embedding_scale=1.0,
        attention_scale=HEAD_DIM**-0.5, attention_cap=0.0, logit_cap=0.0, experts=None,
        embedding=_matrix(VOCABULARY, hidden), layers=layers, final_norm=ones, lm_head=_matrix(VOCABULARY, hidden),
        parameters=0, weights_bytes=sum(sizes),
    )  # fmt: skip


def _products(layer: LayerWeights) -> tuple[Projection, ...]:
    return layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down


def _matrix(rows: int, columns: int) -> QuantizedMatrix:
    """Return a matrix that repeats ROWS random rows. Computing the scales of different rows would take seconds."""
    few: Any = np.random.default_rng(SEED).standard_normal((ROWS, columns), dtype=np.float32)
    data = np.tile(QuantizedMatrix.of(Q4_K, few * np.float32(columns**-0.5)).data, (rows // ROWS, 1))
    # Numba compiles different code for writable arrays. A decoder's weights are read-only, so these weights must also
    # be read-only.
    data.flags.writeable = False
    return QuantizedMatrix(Q4_K, data, columns)
