"""What checking contracts at every call costs: conditions of shapes and numbers, and those that read arrays.

Processor time, in rounds that take turns. A condition of shapes, on average over those of each contract, beside one
written by hand in a function of its own, `out.shape[0] == x.shape[0]`. One that reads an array, finite(x), of float32
from cache and from memory: beside a compiled sum of the same bytes, which reads them once, and NumPy.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from cbtop.compute.backends import cpu_backend
from cbtop.compute.ceilings import _read
from cbtop.compute.contracts import Checks, Condition
from cbtop.compute.contracts.passes import finite
from cbtop.compute.kernels import all_kernels
from cbtop.compute.kernels.base import Kernel

ROUNDS, ROUND_CALLS, ROUND_ELEMENTS = 11, 1_000, 1 << 22
SIZE = 32  # of the kernels' examples
SIZES = (32, 4_096, 1 << 25)  # float32: a call and no more, in L1, in memory
READING = {"finite", "all", "max", "min", "count"}
Calls = dict[str, Callable[[], object]]


def run() -> list[Figure]:
    cpu_backend(1)  # threads that wait spin, which is processor time, too
    return [_of_shapes(), *_of_arrays()]


def _of_shapes() -> Figure:
    """The median of the contracts, each the mean of its conditions."""
    x = out = np.zeros((1, SIZE), np.float32)
    own_ns, ratios = [], []
    for kernel in {kernel.contract.name: kernel for kernel in all_kernels()}.values():
        call, count = _shapes_of(kernel)
        taken = interleaved_cpu_ns({"own": call, "hand": lambda: _by_hand(out, x)}, ROUND_CALLS, ROUNDS)
        own_ns.append(statistics.median(taken["own"]) / count)
        ratios.append(Ratio.of(taken["own"], taken["hand"]).median / count)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    ratio = Ratio(median, low, high)
    return Figure("a condition of shapes and numbers", statistics.median(own_ns), "ns", "one by hand", ratio)


def _by_hand(out: Any, x: Any) -> bool:
    return bool(out.shape[0] == x.shape[0])


def _shapes_of(kernel: Kernel) -> tuple[Callable[[], object], int]:
    """What evaluates the preconditions of a kernel that read no array, and how many these are."""
    contract, arguments = kernel.contract, kernel.examples(np.random.default_rng(1), SIZE)
    chosen = [one for one in contract.preconditions if not _reads(one)]
    checks = Checks(chosen, contract.arguments, contract.conditions)
    return (lambda: checks.failed(arguments)), len(chosen)


def _reads(condition: Condition) -> bool:
    calls = (node.func for node in ast.walk(condition.expression.tree) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id in READING for called in calls)


def _of_arrays() -> Iterator[Figure]:
    sums = np.zeros(1, np.int64)
    for size in SIZES:
        x = np.ones((1, size), np.float32)
        words = x.reshape(-1).view(np.int64)
        calls: Calls = {
            "own": lambda x=x: finite(x),  # type: ignore[misc]
            "reading": lambda words=words: _read(words, sums, 1, 0),  # type: ignore[misc]
            "NumPy": lambda x=x: np.isfinite(x).all(),  # type: ignore[misc]
        }
        taken = interleaved_cpu_ns(calls, max(min(ROUND_ELEMENTS // size, ROUND_CALLS), 1), ROUNDS)
        own = taken.pop("own")
        what = f"finite(x) of {size:,}"
        yield Figure(f"{what}, an element", 1e3 * statistics.median(own) / size, "ps")
        for peer, each in taken.items():
            yield Figure(what, statistics.median(own), "ns", f"{peer}'s time", Ratio.of(own, each))
