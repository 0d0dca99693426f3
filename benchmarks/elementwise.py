"""RMSNorm, SwiGLU and RoPE beside NumPy and, where it is installed, torch: one row of 128 to 32,768 float32.

One thread, processor time, in rounds that take turns. NumPy and torch are called as one writes them, in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio
from cbtop.compute.backends import cpu_backend, torch_on
from cbtop.compute.errors import ComputeError
from cbtop.compute.kernels.activation import swiglu
from cbtop.compute.kernels.rms_norm import rms_norm
from cbtop.compute.kernels.rope import angle_table, rope

SIZES = tuple(1 << exponent for exponent in range(7, 16, 2))
ROUNDS, ROUND_ELEMENTS, HEAD_DIM, EPSILON = 11, 1 << 20, 128, 1e-6
Calls = dict[str, Callable[[], object]]


def run() -> list[Figure]:
    cpu_backend(1)
    try:
        torch = torch_on(1)
    except ComputeError:
        torch = None
    return list(_figures(torch))


def _figures(torch: Any) -> Iterator[Figure]:
    for size in SIZES:
        for name, calls in (("RMSNorm", _norms), ("SwiGLU", _gates), ("RoPE", _rotations)):
            taken = _times(calls(size, torch), max(ROUND_ELEMENTS // size, 1))
            own = taken.pop("own")
            for peer, each in taken.items():
                yield Figure(
                    f"{name} of {size:,}", float(np.median(own)), "ns", f"{peer}'s speed", Ratio.of(each, own)
                )


def _times(calls: Calls, repeats: int) -> dict[str, list[float]]:
    """Nanoseconds a call, round by round; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            begun_ns = time.process_time_ns()
            for _ in range(repeats):
                call()
            if turn:
                found[name].append((time.process_time_ns() - begun_ns) / repeats)
    return found


def _row(size: int) -> Any:
    return np.random.default_rng(size).standard_normal((1, size), dtype=np.float32)


def _norms(size: int, torch: Any) -> Calls:
    x, weight, out = _row(size), _row(size)[0], np.zeros((1, size), np.float32)
    calls: Calls = {
        "own": lambda: rms_norm(x, weight, EPSILON, out),
        "NumPy": lambda: x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(EPSILON)) * weight,
    }
    if torch is not None:
        a, b = torch.from_numpy(x), torch.from_numpy(weight)
        calls["torch"] = lambda: torch.nn.functional.rms_norm(a, (size,), b, EPSILON)
    return calls


def _gates(size: int, torch: Any) -> Calls:
    gate, up, out = _row(size), _row(size), np.zeros((1, size), np.float32)
    calls: Calls = {
        "own": lambda: swiglu(gate, up, out),
        "NumPy": lambda: gate / (1 + np.exp(-gate)) * up,
    }
    if torch is not None:
        a, b = torch.from_numpy(gate), torch.from_numpy(up)
        calls["torch"] = lambda: torch.nn.functional.silu(a) * b
    return calls


def _rotations(size: int, torch: Any) -> Calls:
    """Heads of HEAD_DIM, halves rotated against each other; NumPy and torch write a new array."""
    half = HEAD_DIM // 2
    x, table = _row(size), angle_table(8, 1e4 ** -(np.arange(half) / half))
    heads, cos, sin = _row(size).reshape(-1, 2, half), table[0, 7], table[1, 7]

    def rotated(heads: Any, cos: Any, sin: Any, stack: Any) -> Any:
        first, second = heads[:, 0], heads[:, 1]
        return stack([first * cos - second * sin, first * sin + second * cos], 1)

    calls: Calls = {
        "own": lambda: rope(x, HEAD_DIM, 7, table, True),
        "NumPy": lambda: rotated(heads, cos, sin, np.stack),
    }
    if torch is not None:
        a, b, c = (torch.from_numpy(one) for one in (heads, cos, sin))
        calls["torch"] = lambda: rotated(a, b, c, torch.stack)
    return calls
