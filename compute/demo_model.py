"""The model that runs if the user gives no model.

It has seeded random weights and the shape of a small Qwen2. Its file is written once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cbtop.compute.errors import ModelError
from cbtop.compute.gguf_header import aligned
from cbtop.compute.gguf_writer import written_header
from cbtop.compute.quantization.base import BlockFormat, Bytes
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.protocol.cache import cache_dir
from cbtop.protocol.limits import reason

Progress = Callable[[str, float | None], None]

FORMAT_VERSION = 2  # version in the file's name; increase it with every edit that changes the content of the file
SEED = 20260
# Number of elements that are quantised at a time, so that temporary arrays stay in the cache.
CHUNK_ELEMENTS = 1 << 19
BIAS_DEVIATION = 0.1
NORM_DEVIATION = 0.05
# Standard deviation of the predicted logits. The value is about the same as in a trained model. It makes the largest
# logit clearly larger than the others.
PREDICTED_LOGIT_DEVIATION = 3.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    `hidden`, `feed_forward` and `heads * head_dim` are numbers of columns and multiples of 256.
    """

    architecture: str
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    layers: int
    vocabulary: int
    context_length: int
    tied: bool = True
    experts: int = 0
    experts_used: int = 0
    key_length: int = 0  # number of columns of a head; 0: hidden / heads
    rope_base: float = 10_000.0
    window: int = 0  # number of positions that a token sees in layers with a sliding window; 0: all positions
    # Every window_period-th layer sees all positions. 0 means the usual period of the architecture.
    window_period: int = 0
    rotated: int = 0  # number of dimensions of a head that are rotated; 0: all dimensions

    @property
    def head_dim(self) -> int:
        return self.key_length or self.hidden // self.heads


DEMO = ModelShape("qwen2", 768, 12, 2, 3840, 10, 32_768, 512)
TINY = ModelShape("qwen2", 256, 4, 2, 512, 2, 512, 64)
TINY_QWEN3 = replace(TINY, architecture="qwen3")
TINY_PHI3 = replace(TINY, architecture="phi3", tied=False)
TINY_LLAMA = replace(TINY, architecture="llama", tied=False)
TINY_QWEN3MOE = replace(TINY, architecture="qwen3moe", feed_forward=256, experts=5, experts_used=2)
TINY_GEMMA2 = replace(TINY, architecture="gemma2", kv_heads=1, key_length=128, window=24)
TINY_GEMMA3 = replace(TINY_GEMMA2, architecture="gemma3", rope_base=1e6, window_period=2)
TINY_STABLELM = replace(TINY, architecture="stablelm", tied=False, rotated=16)
TINY_MIXTRAL = replace(TINY_LLAMA, feed_forward=256, experts=4, experts_used=2)


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor of random numbers, normally distributed around `mean`. `shape` is as in NumPy, with rows first."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    deviation: float
    mean: float = 0.0

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))


def demo_model(progress: Progress) -> Path:
    """Return the path of the demo model. Writes the model if it is missing.

    Raises ModelError if it cannot be written.
    """
    path = cache_dir() / f"demo-{DEMO.architecture}-v{FORMAT_VERSION}.gguf"
    try:
        if not path.exists():
            write_model(path, DEMO, progress)
    # If the disk is full, the OSError does not contain a file name. A caller that prints the OSError would blame
    # stdout.
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written ({reason(error)}), the demo's model of 82 MB; give another directory as "
            "XDG_CACHE_HOME, or a model of your own"
        ) from error
    return path


def write_model(
    path: Path, shape: ModelShape, progress: Progress, seed: int = SEED, matrices: BlockFormat | None = None
) -> None:
    """Write a random model of `shape` at `path`. If writing fails, `path` is left as it was.

    `matrices` is the format of all matrices. None means the mix of `tensors_of`. The weights before quantisation
    depend on `seed` only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _write(temporary, shape, progress, seed, matrices)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # this runs after Ctrl-C, too, so no incomplete file stays


def _write(path: Path, shape: ModelShape, progress: Progress, seed: int, matrices: BlockFormat | None) -> None:
    tensors = list(tensors_of(shape))
    if matrices:
        tensors = [one if one.format is F32 else replace(one, format=matrices) for one in tensors]
    rng = np.random.default_rng(seed)
    done, total = 0, sum(tensor.elements for tensor in tensors)
    with path.open("wb") as stream:
        stream.write(written_header(metadata_of(shape), [(one.name, one.shape, one.format) for one in tensors]))
        for tensor in tensors:
            progress("writing the demo model", done / total)
            data = _draw(tensor, rng)
            stream.write(data.data)
            stream.write(bytes(aligned(data.nbytes) - data.nbytes))
            done += tensor.elements
        progress("writing the demo model", 1.0)


def _draw(tensor: RandomTensor, rng: np.random.Generator) -> Bytes:
    """Return the random tensor, quantised, as bytes: uint8 (rows, row_bytes). A few rows are quantised at a time."""
    columns = tensor.shape[-1]
    rows = tensor.elements // columns
    out = np.empty((rows, tensor.format.row_bytes(columns)), np.uint8)
    step = max(CHUNK_ELEMENTS // columns, 1)
    for first in range(0, rows, step):
        weights = rng.standard_normal((min(step, rows - first), columns), dtype=np.float32)
        weights *= np.float32(tensor.deviation)
        weights += np.float32(tensor.mean)
        out[first : first + step] = tensor.format.quantize(weights)
    return out


def metadata_of(shape: ModelShape) -> dict[str, str | int | float]:
    """Return the metadata (keys and values) of a GGUF file with a model of `shape`."""
    prefix = shape.architecture
    mixture = {
        f"{prefix}.expert_count": shape.experts,
        f"{prefix}.expert_used_count": shape.experts_used,
        f"{prefix}.expert_feed_forward_length": shape.feed_forward,
    }
    heads = {
        f"{prefix}.attention.key_length": shape.key_length,
        f"{prefix}.attention.value_length": shape.key_length,
    }
    parts = {
        f"{prefix}.rope.dimension_count": shape.rotated,
        f"{prefix}.attention.sliding_window": shape.window,
        f"{prefix}.attention.sliding_window_pattern": shape.window_period,
    }
    return {
        "general.architecture": prefix,
        "general.name": f"cbtop demo ({shape.layers} layers, random weights)",
        f"{prefix}.block_count": shape.layers,
        f"{prefix}.context_length": shape.context_length,
        f"{prefix}.embedding_length": shape.hidden,
        f"{prefix}.feed_forward_length": shape.feed_forward,
        f"{prefix}.attention.head_count": shape.heads,
        f"{prefix}.attention.head_count_kv": shape.kv_heads,
        f"{prefix}.rope.freq_base": shape.rope_base,
        f"{prefix}.attention.{'layer_norm' if prefix == 'stablelm' else 'layer_norm_rms'}_epsilon": 1e-6,
        **(mixture if shape.experts else {}),
        **{key: value for key, value in (heads | parts).items() if value},
    }


def tensors_of(shape: ModelShape) -> Iterator[RandomTensor]:
    """Yield all tensors, in the mix of formats that llama.cpp calls Q4_K_M.

    The output and every second layer's v and down are Q6_K. The other matrices are Q4_K.
    """
    hidden, kv_rows, query_rows = shape.hidden, shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    # With a standard deviation of 1/sqrt(columns), the outputs of a product are as large as its inputs.
    spread, ffn_spread = hidden**-0.5, shape.feed_forward**-0.5
    # A tied embedding also computes the logits, so its standard deviation determines theirs. If the embedding is not
    # tied, its scale does not matter, because the first norm removes it.
    head_spread = PREDICTED_LOGIT_DEVIATION * spread
    yield RandomTensor("token_embd.weight", (shape.vocabulary, hidden), Q6_K if shape.tied else Q4_K, head_spread)
    for index in range(shape.layers):
        rich = Q6_K if index % 2 == 0 else Q4_K
        layer = f"blk.{index}"
        yield from _norm(f"{layer}.attn_norm", shape)
        is_fused = shape.architecture == "phi3"
        if is_fused:
            yield RandomTensor(f"{layer}.attn_qkv.weight", (query_rows + 2 * kv_rows, hidden), rich, spread)
        else:
            yield RandomTensor(f"{layer}.attn_q.weight", (query_rows, hidden), Q4_K, spread)
            yield RandomTensor(f"{layer}.attn_k.weight", (kv_rows, hidden), Q4_K, spread)
            yield RandomTensor(f"{layer}.attn_v.weight", (kv_rows, hidden), rich, spread)
        if shape.architecture in ("qwen2", "stablelm"):
            yield RandomTensor(f"{layer}.attn_q.bias", (query_rows,), F32, BIAS_DEVIATION)
            yield RandomTensor(f"{layer}.attn_k.bias", (kv_rows,), F32, BIAS_DEVIATION)
            yield RandomTensor(f"{layer}.attn_v.bias", (kv_rows,), F32, BIAS_DEVIATION)
        if shape.architecture in ("qwen3", "qwen3moe", "gemma3"):
            yield RandomTensor(f"{layer}.attn_q_norm.weight", (shape.head_dim,), F32, NORM_DEVIATION, 1.0)
            yield RandomTensor(f"{layer}.attn_k_norm.weight", (shape.head_dim,), F32, NORM_DEVIATION, 1.0)
        yield RandomTensor(f"{layer}.attn_output.weight", (hidden, query_rows), Q4_K, query_rows**-0.5)
        is_gemma = shape.architecture in ("gemma2", "gemma3")
        if is_gemma:
            yield RandomTensor(f"{layer}.post_attention_norm.weight", (hidden,), F32, NORM_DEVIATION, 1.0)
        yield from _norm(f"{layer}.ffn_norm", shape)
        of_all = (shape.experts,) if shape.experts else ()
        end = "_exps.weight" if shape.experts else ".weight"
        if shape.experts:
            yield RandomTensor(f"{layer}.ffn_gate_inp.weight", (shape.experts, hidden), F32, spread)
        if is_fused:
            yield RandomTensor(f"{layer}.ffn_up.weight", (2 * shape.feed_forward, hidden), Q4_K, spread)
        else:
            yield RandomTensor(f"{layer}.ffn_gate{end}", (*of_all, shape.feed_forward, hidden), Q4_K, spread)
            yield RandomTensor(f"{layer}.ffn_up{end}", (*of_all, shape.feed_forward, hidden), Q4_K, spread)
        yield RandomTensor(f"{layer}.ffn_down{end}", (*of_all, hidden, shape.feed_forward), rich, ffn_spread)
        if is_gemma:
            yield RandomTensor(f"{layer}.post_ffw_norm.weight", (hidden,), F32, NORM_DEVIATION, 1.0)
    yield from _norm("output_norm", shape)
    if not shape.tied:
        yield RandomTensor("output.weight", (shape.vocabulary, hidden), Q6_K, head_spread)


def _norm(name: str, shape: ModelShape) -> Iterator[RandomTensor]:
    yield RandomTensor(f"{name}.weight", (shape.hidden,), F32, NORM_DEVIATION, 1.0)
    if shape.architecture == "stablelm":
        yield RandomTensor(f"{name}.bias", (shape.hidden,), F32, BIAS_DEVIATION)
