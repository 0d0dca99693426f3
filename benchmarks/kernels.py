"""How near a kernel comes to its roof, beside the share that its contract names: one thread, all data from memory.

Processor time, in rounds that take turns with plain reading of the largest array. What a kernel has to read and to
write counts once, whatever the processor makes of it. A share below the contract's by more than its regression
threshold is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio
from benchmarks.gemv import plain_reading
from cbtop.compute.backends import cpu_backend
from cbtop.compute.contracts import all_names, contract
from cbtop.compute.kernels import (
    activation,
    add_rms_norm,
    attention,
    kv_write,
    layer_norm,
    linear,
    linear_int8,
    quantize_rows,
    residual_add,
    rms_norm,
    rope,
)
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.memory import on_huge_pages
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.q4_k import Q4_K

COLUMNS, WEIGHTS_BYTES, ROUNDS = 4096, 600_000_000, 15
NO_BIAS = np.zeros(0, np.float32)
TOKENS, HIDDEN, HEAD_DIM = 1 << 14, 2048, 128  # of what works on activations: 128 MB an array
Case = tuple[Kernel, Arguments, int]  # a call of it, and the bytes that this has to read and to write


def run() -> list[Figure]:
    return list(_figures())


def _figures() -> Iterator[Figure]:
    cpu_backend(1)  # threads that wait spin, which is processor time, too
    for name in all_names():
        bound = contract(name).performance
        if bound is None:
            continue
        kernel, arguments, moved_bytes = CASES[name]()
        ratio = Ratio.of(_shares(kernel, arguments, moved_bytes), [bound.fraction] * ROUNDS)
        regression = ", A REGRESSION" if ratio.median * bound.regression < 1 else ""
        what = f"{kernel.name}: share of {bound.roof}{regression}"
        yield Figure(what, 100 * ratio.median * bound.fraction, "%", "the contract's", ratio)


def _shares(kernel: Kernel, arguments: Arguments, moved_bytes: int) -> list[float]:
    """Of each round the time of reading as many bytes over that of the kernel."""
    largest = max((one for one in arguments if isinstance(one, np.ndarray)), key=lambda one: one.nbytes)
    read = plain_reading(largest)
    shares = []
    for _ in range(ROUNDS + 1):  # the first compiles, and touches every page
        taken_ns = _cpu_ns(lambda: kernel.implementation(*arguments))
        shares.append(_cpu_ns(read) * moved_bytes / largest.nbytes / taken_ns)
    return shares[1:]


def _cpu_ns(call: Callable[[], object]) -> float:
    begun_ns = time.process_time_ns()
    call()
    return time.process_time_ns() - begun_ns


def _weights() -> QuantizedMatrix:
    """A Q4_K matrix that no cache holds, of some rows again and again."""
    some = QuantizedMatrix.of(Q4_K, np.random.default_rng(1).standard_normal((64, COLUMNS), dtype=np.float32)).data
    times = WEIGHTS_BYTES // some.nbytes
    data = np.frombuffer(on_huge_pages(times * some.nbytes), np.uint8).reshape(times, *some.shape)
    data[:] = some
    return QuantizedMatrix(Q4_K, data.reshape(-1, some.shape[1]), COLUMNS)


def _linear() -> Case:
    matrix = _weights()
    x, out = np.ones((1, COLUMNS), np.float32), np.zeros((1, matrix.rows), np.float32)
    scratch = np.zeros((1, COLUMNS), np.float32)
    return linear.LINEAR[Q4_K.code], (Q4_K.code, matrix.data, NO_BIAS, x, out, scratch), matrix.data.nbytes


def _linear_int8() -> Case:
    matrix = InterleavedMatrix.of(_weights())
    x, out = np.ones((1, COLUMNS), np.float32), np.zeros((1, matrix.rows), np.float32)
    scratch = linear_int8.Int8Scratch.of(1, COLUMNS, 1)
    return linear_int8.LINEAR_INT8[Q4_K.code], (Q4_K.code, matrix.data, NO_BIAS, x, out, scratch), matrix.data.nbytes


def _rows() -> Any:
    """Activations that no cache holds, of some rows again and again."""
    some = np.random.default_rng(1).standard_normal((64, HIDDEN), dtype=np.float32)
    return np.tile(some, (TOKENS // len(some), 1))


def _rms_norm() -> Case:
    x, out = _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
    return rms_norm.RMS_NORM, (x, x[0].copy(), 1e-6, out), x.nbytes + out.nbytes


def _layer_norm() -> Case:
    x, out = _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
    return layer_norm.LAYER_NORM, (x, x[0].copy(), x[1].copy(), 1e-5, out), x.nbytes + out.nbytes


def _add_rms_norm() -> Case:
    x, out = _rows(), np.zeros((TOKENS, HIDDEN), np.float32)
    delta = np.zeros_like(x)
    return add_rms_norm.ADD_RMS_NORM, (x, delta, x[0].copy(), 1e-6, out), 2 * x.nbytes + delta.nbytes + out.nbytes


def _residual_add() -> Case:
    x, delta = _rows(), _rows()  # pages of zeros that nobody wrote would be one page, in cache
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
    caches = attention.empty_caches(HIDDEN // HEAD_DIM, TOKENS, HEAD_DIM, np.uint16)
    return kv_write.KV_WRITE, (k, v, 0, *caches), k.nbytes + v.nbytes + caches[0].nbytes + caches[1].nbytes


def _quantize_rows() -> Case:
    x = _rows()
    codes, factors = quantize_rows.empty_codes(TOKENS, HIDDEN)
    return quantize_rows.QUANTIZE_ROWS, (x, codes, factors), x.nbytes + codes.nbytes + factors.nbytes


def _attention() -> Case:
    """One token that sees more positions than a cache holds, with 8 heads of keys and values for 32 of queries."""
    heads, kv_heads = 32, 8
    caches = attention.empty_caches(kv_heads, 4 * TOKENS, HEAD_DIM, np.uint16)
    for cache in caches:
        cache[:] = np.uint16(0x3000)
    q, out = np.ones((1, heads * HEAD_DIM), np.float32), np.zeros((1, heads * HEAD_DIM), np.float32)
    scratch = attention.scratch_for(1, HEAD_DIM)
    call = q, *caches, 4 * TOKENS - 1, HEAD_DIM**-0.5, 0, 0.0, out, scratch
    return attention.kernel_for(), call, caches[0].nbytes + caches[1].nbytes


CASES: dict[str, Callable[[], Case]] = {
    "add_rms_norm": _add_rms_norm,
    "attention": _attention,
    "geglu": _gate(activation.GEGLU),
    "kv_write": _kv_write,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "linear_int8": _linear_int8,
    "quantize_rows": _quantize_rows,
    "residual_add": _residual_add,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _gate(activation.SWIGLU),
}
