"""How near a kernel comes to its roof, beside the share that its contract names: one thread, weights from memory.

Processor time, in rounds that take turns with plain reading of the same memory. A share below the contract's by more
than its regression threshold is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.base import Figure, Ratio
from cbtop.compute.backends import cpu_backend
from cbtop.compute.ceilings import _read
from cbtop.compute.contracts import all_names, contract
from cbtop.compute.kernels import linear, linear_int8
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.memory import on_huge_pages
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.q4_k import Q4_K

COLUMNS, WEIGHTS_BYTES, ROUNDS = 4096, 600_000_000, 15
NO_BIAS = np.zeros(0, np.float32)
Case = tuple[Kernel, Arguments]  # and a call of it; its weights come second


def run() -> list[Figure]:
    return list(_figures())


def _figures() -> Iterator[Figure]:
    cpu_backend(1)  # threads that wait spin, which is processor time, too
    for name in all_names():
        bound = contract(name).performance
        if bound is None:
            continue
        kernel, arguments = CASES[name]()
        ratio = Ratio.of(_shares(kernel, arguments), [bound.fraction] * ROUNDS)
        regression = ", A REGRESSION" if ratio.median * bound.regression < 1 else ""
        what = f"{kernel.name}: share of {bound.roof}{regression}"
        yield Figure(what, 100 * ratio.median * bound.fraction, "%", "the contract's", ratio)


def _shares(kernel: Kernel, arguments: Arguments) -> list[float]:
    """Of each round the time of reading the weights over that of the kernel."""
    sums, words = np.zeros(1, np.int64), arguments[1].reshape(-1).view(np.int64)
    shares = []
    for _ in range(ROUNDS + 1):  # the first compiles, and touches every page
        taken_ns = _cpu_ns(lambda: kernel.implementation(*arguments))
        shares.append(_cpu_ns(lambda: _read(words, sums)) / taken_ns)
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
    return linear.LINEAR[Q4_K.code], (Q4_K.code, matrix.data, NO_BIAS, x, out, np.zeros((1, COLUMNS), np.float32))


def _linear_int8() -> Case:
    matrix = InterleavedMatrix.of(_weights())
    x, out = np.ones((1, COLUMNS), np.float32), np.zeros((1, matrix.rows), np.float32)
    scratch = linear_int8.Int8Scratch.of(1, COLUMNS, 1)
    return linear_int8.LINEAR_INT8[Q4_K.code], (Q4_K.code, matrix.data, NO_BIAS, x, out, scratch)


CASES: dict[str, Callable[[], Case]] = {"linear": _linear, "linear_int8": _linear_int8}
