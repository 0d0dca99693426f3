"""Measure which share of its roof each kernel reaches, and compare it with the share in the kernel's contract.

One thread is used, and all data comes from memory. Processor time is measured, in rounds that take turns with plain
reading of the largest array, or with products of tiles alone.

The bytes that a kernel must read and write count once, whatever the processor does. If a share is below the
contract's by more than its regression threshold, it is reported as a regression. A contract that was measured on
another maker's processor, or with other instructions, cannot show a regression. A product of tiles is measured if the
processor has tiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio
from benchmarks.gemv import plain_reading
from cbtop.compute import ceilings
from cbtop.compute.backends import cpu_backend
from cbtop.compute.contracts import all_names, contract
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, TIER
from cbtop.compute.kernels import (
    activation,
    activation_backward,
    adam_w,
    add_rms_norm,
    add_rms_norm_int8,
    attention,
    attention_backward,
    attention_bf16,
    combine,
    cross_entropy,
    cross_entropy_backward,
    embedding,
    expert_gated,
    expert_linear,
    gated,
    kv_write,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    linear_bf16,
    linear_int8,
    qkv,
    quantize_rows,
    residual_add,
    rms_norm,
    rms_norm_backward,
    rms_norm_int8,
    rope,
    route,
    sampling,
    soft_cap,
    take_rows,
    weight_gradient,
)
from cbtop.compute.kernels.attention_loops import scratch_for
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.kernels.kv_caches import empty_caches
from cbtop.compute.memory import on_huge_pages
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.protocol.roofs import cpu_name

COLUMNS, WEIGHTS_BYTES, ROUNDS = 4096, 600_000_000, 15
NO_BIAS = np.zeros(0, np.float32)
# Number of elements for kernels of activations. An array of them has 128 MB.
TOKENS, HIDDEN, HEAD_DIM = 1 << 14, 2048, 128
PROMPT, ROWS = 512, 4096  # sizes of the matrices for products of tiles
GRADIENT_TOKENS = 16
EXPERTS, USED, LOGITS = 64, 8, 1 << 24
TILES = "tiles_bfloat16"  # Kernels that are limited by multiplication, not by reading, have this roof.
# (kernel, arguments of a call, bytes that the call must read and write); products of tiles have FLOP in place of
# bytes
Case = tuple[Kernel, Arguments, float]


def run() -> list[Figure]:
    return list(_figures())


def _figures() -> Iterator[Figure]:
    cpu_backend(1)  # Use one thread. Waiting threads spin, which would count as processor time.
    for name in all_names():
        bound = contract(name).performance
        if (bound.roof == TILES and not HAS_TILES) or (name == "attention_bf16" and not BF16_PAYS):
            continue
        kernel, arguments, amount = CASES[name]()
        ratio = Ratio.of(_shares(kernel, arguments, amount, bound.roof), [bound.fraction] * ROUNDS)
        note = ", A REGRESSION" if ratio.median * bound.regression < 1 else ""
        if not all(word in bound.where for word in (cpu_name().partition(" ")[0].removesuffix("(R)"), f"({TIER}")):
            note = ", there another CPU"
        what = f"{kernel.name}: share of {bound.roof}{note}"
        yield Figure(what, 100 * ratio.median * bound.fraction, "%", "the contract's", ratio)


def _shares(kernel: Kernel, arguments: Arguments, amount: float, roof: str) -> list[float]:
    """Return the share of its roof that the kernel reaches in every round.

    It is the time that the same amount takes at the roof, divided by the kernel's time.
    """
    largest = max((one for one in arguments if isinstance(one, np.ndarray)), key=lambda one: one.nbytes)
    at_roof, as_much = _tiles() if roof == TILES else (plain_reading(largest), largest.nbytes)
    shares = []
    for _ in range(ROUNDS + 1):  # Leave out the first round, which compiles the code and touches every page.
        taken_ns = _cpu_ns(lambda: kernel.implementation(*arguments))
        shares.append(_cpu_ns(at_roof) * amount / as_much / taken_ns)
    return shares[1:]


def _tiles() -> tuple[Callable[[], object], float]:  # pragma: no cover - AMX
    """Return a function that only multiplies tiles (Intel AMX), and the number of FLOP that it does."""
    on = ceilings._Threads(1)
    run = on.runner(ceilings._multiply_four_tiles, np.ones((1, ceilings.LANES), np.float32), ceilings.TILE_REPEATS)
    return run, 2.0 * ceilings.TILE_REPEATS * ceilings.PRODUCTS_OF_TILES


def _cpu_ns(call: Callable[[], object]) -> float:
    begun_ns = time.process_time_ns()
    call()
    return time.process_time_ns() - begun_ns


def _weights(parts: int = 1) -> QuantizedMatrix:
    """Return a matrix that is larger than any cache. The matrix repeats a few rows.

    With `parts`, it has only one of `parts` equal parts of these bytes. The format is Q6_K, because this is the
    common format that is farthest from its roof.
    """
    some = QuantizedMatrix.of(Q6_K, np.random.default_rng(1).standard_normal((64, COLUMNS), dtype=np.float32)).data
    times = max(WEIGHTS_BYTES // parts // some.nbytes, 1)
    data = np.frombuffer(on_huge_pages(times * some.nbytes), np.uint8).reshape(times, *some.shape)
    data[:] = some
    return QuantizedMatrix(Q6_K, data.reshape(-1, some.shape[1]), COLUMNS)


def _interleaved(parts: int = 1) -> Any:
    return InterleavedMatrix.of(_weights(parts)).data


def _x(tokens: int = 1) -> Any:
    return np.ones((tokens, COLUMNS), np.float32)


def _out(matrix: Any, tokens: int = 1) -> Any:
    return np.zeros((tokens, len(matrix)), np.float32)


def _linear() -> Case:
    data = _weights().data
    call = Q6_K.code, data, NO_BIAS, _x(), _out(data), np.zeros((1, COLUMNS), np.float32)
    return linear.LINEAR[Q6_K.code], call, data.nbytes


def _linear_int8() -> Case:
    data = _interleaved()
    call = Q6_K.code, data, NO_BIAS, _x(), _out(data), linear_int8.Int8Scratch.of(1, COLUMNS, 1)
    return linear_int8.LINEAR_INT8[Q6_K.code], call, data.nbytes


def _linear_bf16() -> Case:
    data = _interleaved()[:ROWS]
    call = Q6_K.code, data, NO_BIAS, _x(PROMPT), _out(data, PROMPT), linear_bf16.TileScratch.of(PROMPT, COLUMNS, 1)
    return linear_bf16.LINEAR_BF16[Q6_K.code], call, 2.0 * PROMPT * ROWS * COLUMNS


def _qkv() -> Case:
    parts = [_interleaved(3) for _ in range(3)]
    matrices = [one for data in parts for one in (Q6_K.code, data, NO_BIAS)]
    call = *matrices, _x(), *map(_out, parts), linear_int8.Int8Scratch.of(1, COLUMNS, 1)
    return qkv.QKV_INT8[Q6_K.code], call, sum(data.nbytes for data in parts)


def _gated() -> Case:
    parts = [_interleaved(2) for _ in range(2)]
    matrices = [one for data in parts for one in (Q6_K.code, data, NO_BIAS)]
    outs = [_out(parts[0]) for _ in range(3)]
    call = *matrices, _x(), *outs, linear_int8.Int8Scratch.of(1, COLUMNS, 1)
    return gated.GATED_INT8[Q6_K.code], call, sum(data.nbytes for data in parts)


def _of_experts(parts: int) -> list[Any]:
    """Return the weights of all experts of a mixture of experts. Each is `parts` matrices in one.

    Each expert has whole groups of rows.
    """
    rows = len(_interleaved(parts * EXPERTS)) // 16 * 16
    return [_interleaved(parts)[: rows * EXPERTS].reshape(EXPERTS, rows, -1) for _ in range(parts)]


def _expert_linear() -> Case:
    """Return a call of a mixture of experts with a single token that uses each expert once."""
    (data,) = _of_experts(1)
    out, scratch = np.zeros((EXPERTS, data.shape[1]), np.float32), linear_int8.Int8Scratch.of(EXPERTS, COLUMNS, 1)
    call = Q6_K.code, data, np.arange(EXPERTS), _x(), out, scratch
    return expert_linear.EXPERT_LINEAR_INT8[Q6_K.code], call, data.nbytes


def _expert_gated() -> Case:
    gate, up = _of_experts(2)
    outs = [np.zeros((EXPERTS, gate.shape[1]), np.float32) for _ in range(3)]
    matrices = Q6_K.code, gate, Q6_K.code, up
    call = *matrices, np.arange(EXPERTS), _x(), *outs, linear_int8.Int8Scratch.of(EXPERTS, COLUMNS, 1)
    return expert_gated.EXPERT_GATED_INT8[Q6_K.code], call, gate.nbytes + up.nbytes


def _embedding() -> Case:
    """Return a call that embeds TOKENS tokens from all over the matrix."""
    matrix = _weights()
    tokens = np.random.default_rng(1).integers(0, matrix.rows, TOKENS)
    out = np.zeros((TOKENS, COLUMNS), np.float32)
    moved_bytes = TOKENS * matrix.data.shape[1] + out.nbytes
    return embedding.EMBEDDING, (Q6_K.code, matrix.data, tokens, 1.0, out), moved_bytes


def _take_rows() -> Case:
    x = _rows()
    return take_rows.TAKE_ROWS, (x, np.random.default_rng(1).permutation(TOKENS), np.zeros_like(x)), 2 * x.nbytes


def _combine() -> Case:
    outputs, tokens = _rows(), TOKENS // USED
    places = np.random.default_rng(1).permutation(TOKENS).reshape(tokens, USED)
    weights, out = np.full((tokens, USED), 1 / USED, np.float32), np.zeros((tokens, HIDDEN), np.float32)
    return combine.COMBINE, (outputs, places, weights, out), outputs.nbytes + out.nbytes


def _route() -> Case:
    tokens = 16 * TOKENS
    logits = np.random.default_rng(1).standard_normal((tokens, EXPERTS), np.float32)
    pairs = tokens, USED
    outs = np.zeros(pairs, np.float32), np.zeros(pairs, np.int64), *np.zeros((2, tokens * USED), np.int64)
    call = logits, True, 1.0, *outs, np.zeros(EXPERTS + 1, np.int64)
    return route.ROUTE, call, logits.nbytes + sum(out.nbytes for out in outs)


def _soft_cap() -> Case:
    x = _rows()
    return soft_cap.SOFT_CAP, (x, 30.0, np.zeros_like(x)), 2 * x.nbytes


def _greedy() -> Case:
    logits = np.random.default_rng(1).standard_normal((1, LOGITS), np.float32)
    return sampling.GREEDY, (logits, np.zeros(1, np.int64)), logits.nbytes


def _drawn() -> Case:
    """Return a call that draws a token from the likeliest ones, with common settings."""
    logits = np.random.default_rng(1).standard_normal((1, LOGITS), np.float32)
    return sampling.DRAWN, (logits, 0.8, 40, 0.95, 1, 1, 0, np.zeros(1, np.int64)), logits.nbytes


def _rows() -> Any:
    """Return activations that are larger than any cache. They repeat a few rows."""
    some = np.random.default_rng(1).standard_normal((64, HIDDEN), dtype=np.float32)
    return np.tile(some, (TOKENS // len(some), 1))


def _rms_norm() -> Case:
    x, out = _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
    return rms_norm.RMS_NORM, (x, x[0].copy(), 1e-6, out), x.nbytes + out.nbytes


def _rms_norm_int8() -> Case:
    _, (*norm, out), moved_bytes = _rms_norm()
    codes = quantize_rows.empty_codes(*out.shape)
    return rms_norm_int8.RMS_NORM_INT8, (*norm, out, out, *codes), moved_bytes + sum(one.nbytes for one in codes)


def _layer_norm() -> Case:
    x, out = _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
    return layer_norm.LAYER_NORM, (x, x[0].copy(), x[1].copy(), 1e-5, out), x.nbytes + out.nbytes


def _add_rms_norm() -> Case:
    x, out = _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
    delta = np.zeros_like(x)
    return add_rms_norm.ADD_RMS_NORM, (x, delta, x[0].copy(), 1e-6, out), 2 * x.nbytes + delta.nbytes + out.nbytes


def _add_rms_norm_int8() -> Case:
    _, (*norm, out), moved_bytes = _add_rms_norm()
    codes = quantize_rows.empty_codes(*out.shape)
    call = *norm, out, out, *codes
    return add_rms_norm_int8.ADD_RMS_NORM_INT8, call, moved_bytes + sum(one.nbytes for one in codes)


def _residual_add() -> Case:
    # Write to every page of the array. Otherwise all of its pages would be one page of zeros, which stays in the
    # cache.
    x, delta = _rows(), _rows()
    return residual_add.RESIDUAL_ADD, (x, delta), 2 * x.nbytes + delta.nbytes


def _gate(kernel: Kernel) -> Callable[[], Case]:
    def case() -> Case:
        gate, up, out = _rows(), _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
        return kernel, (gate, up, out), 3 * out.nbytes

    return case


def _rope() -> Case:
    x, half = _rows(), HEAD_DIM // 2
    table = rope.angle_table(TOKENS, 1e4 ** -(np.arange(half) / half))
    return rope.ROPE_NEOX, (x, HEAD_DIM, 0, table, True), 2 * x.nbytes + table.nbytes


def _kv_write() -> Case:
    k, v = _rows(), _rows()
    caches = empty_caches(HIDDEN // HEAD_DIM, TOKENS, HEAD_DIM, np.uint16)
    return kv_write.KV_WRITE, (k, v, 0, *caches), k.nbytes + v.nbytes + caches[0].nbytes + caches[1].nbytes


def _quantize_rows() -> Case:
    x = _rows()
    codes, factors = quantize_rows.empty_codes(TOKENS, HIDDEN)
    return quantize_rows.QUANTIZE_ROWS, (x, codes, factors), x.nbytes + codes.nbytes + factors.nbytes


def _attention() -> Case:
    """Return a call of one token that attends to more positions than a cache holds.

    There are 8 heads of keys and values for 32 heads of queries.
    """
    heads, kv_heads = 32, 8
    caches = empty_caches(kv_heads, 4 * TOKENS, HEAD_DIM, np.uint16)
    for cache in caches:
        cache[:] = np.uint16(0x3000)
    q, out = np.ones((1, heads * HEAD_DIM), np.float32), np.zeros((1, heads * HEAD_DIM), np.float32)
    scratch = scratch_for(1, HEAD_DIM)
    call = q, *caches, 4 * TOKENS - 1, HEAD_DIM**-0.5, 0, 0.0, out, scratch
    return attention.kernel_for(), call, caches[0].nbytes + caches[1].nbytes


def _attention_bf16() -> Case:
    _, call, size_bytes = _attention()
    return attention_bf16.kernel_for(), call, size_bytes


def _linear_backward() -> Case:
    data = _weights().data
    call = Q6_K.code, data, np.ones((1, len(data)), np.float32), False, _x(), linear_backward.scratch_for(1, COLUMNS)
    return linear_backward.LINEAR_BACKWARD[Q6_K.code], call, data.nbytes


def _weight_gradient() -> Case:
    """Return a call that adds the gradient of a few tokens to a matrix that is larger than any cache."""
    d_weights, x = _rows(), np.ones((GRADIENT_TOKENS, HIDDEN), np.float32)
    call = np.ones((GRADIENT_TOKENS, TOKENS), np.float32), x, d_weights
    return weight_gradient.WEIGHT_GRADIENT, call, 2 * d_weights.nbytes


def _norm_backward(kernel: Kernel) -> Callable[[], Case]:
    def case() -> Case:
        x, d_out, d_x = _rows(), _rows(), _rows()
        return kernel, (x, x[0].copy(), 1e-6, d_out, True, d_x), 4 * x.nbytes

    return case


def _gate_backward(kernel: Kernel) -> Callable[[], Case]:
    def case() -> Case:
        gate, up, d_out, d_gate, d_up = (_rows() for _ in range(5))
        return kernel, (gate, up, d_out, d_gate, d_up), 5 * gate.nbytes

    return case


def _attention_backward() -> Case:
    heads, kv_heads = 32, 8
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((PROMPT, of, HEAD_DIM), np.float32) for of in (heads, kv_heads))
    outs = np.zeros_like(q), np.zeros_like(k), np.zeros_like(k)
    call = q, k, k.copy(), HEAD_DIM**-0.5, 0, q.copy(), *outs
    return attention_backward.ATTENTION_BACKWARD, call, 3 * q.nbytes + 4 * k.nbytes


def _cross_entropy() -> Case:
    logits = _rows()
    call = logits, np.zeros(TOKENS, np.int64), np.zeros(TOKENS, np.float32)
    return cross_entropy.CROSS_ENTROPY, call, logits.nbytes


def _cross_entropy_backward() -> Case:
    logits, d_logits = _rows(), _rows()
    call = logits, np.zeros(TOKENS, np.int64), d_logits
    return cross_entropy_backward.CROSS_ENTROPY_BACKWARD, call, 2 * logits.nbytes


def _adam_w() -> Case:
    weights, gradient, mean = _rows(), _rows(), _rows()
    return adam_w.ADAM_W, (weights, gradient, mean, mean**2, 1, 1e-3, 0.01), 7 * weights.nbytes


CASES: dict[str, Callable[[], Case]] = {
    "adam_w": _adam_w,
    "add_rms_norm": _add_rms_norm,
    "add_rms_norm_int8": _add_rms_norm_int8,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_bf16": _attention_bf16,
    "combine": _combine,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "drawn": _drawn,
    "embedding": _embedding,
    "expert_gated": _expert_gated,
    "expert_linear": _expert_linear,
    "gated": _gated,
    "geglu": _gate(activation.GEGLU),
    "geglu_backward": _gate_backward(activation_backward.GEGLU_BACKWARD),
    "greedy": _greedy,
    "kv_write": _kv_write,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _norm_backward(layer_norm_backward.LAYER_NORM_BACKWARD),
    "linear": _linear,
    "linear_backward": _linear_backward,
    "linear_bf16": _linear_bf16,
    "linear_int8": _linear_int8,
    "qkv": _qkv,
    "quantize_rows": _quantize_rows,
    "residual_add": _residual_add,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _norm_backward(rms_norm_backward.RMS_NORM_BACKWARD),
    "rms_norm_int8": _rms_norm_int8,
    "rope": _rope,
    "route": _route,
    "soft_cap": _soft_cap,
    "swiglu": _gate(activation.SWIGLU),
    "swiglu_backward": _gate_backward(activation_backward.SWIGLU_BACKWARD),
    "take_rows": _take_rows,
    "weight_gradient": _weight_gradient,
}
