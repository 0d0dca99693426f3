"""Compare a decoder's kernels other than products with NumPy and, if installed, torch, for 128 to 32,768 float32
numbers.

One thread is used. Processor time is measured, in rounds that take turns. NumPy and torch are called in the usual
way, in float32.

Softmax is the one inside attention: pieces of 64 scores, without the division by their sum. The transposition writes
keys and values into their cache. Adding reads two rows and writes one, as NumPy does in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from cbtop.compute.backends import cpu_backend, torch_on
from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.vectors import LANES, load_floats, store_floats
from cbtop.compute.kernels.activation import swiglu
from cbtop.compute.kernels.attention_loops import LOWEST, _rise, _weigh
from cbtop.compute.kernels.kv_caches import POSITIONS, empty_caches
from cbtop.compute.kernels.kv_write import kv_write
from cbtop.compute.kernels.kv_write import reference as kv_write_reference
from cbtop.compute.kernels.layer_norm import layer_norm
from cbtop.compute.kernels.residual_add import residual_add
from cbtop.compute.kernels.rms_norm import rms_norm
from cbtop.compute.kernels.rope import angle_table, rope
from cbtop.compute.memory import line_aligned_zeros

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
        for name, calls in CASES.items():
            taken = interleaved_cpu_ns(calls(size, torch), max(ROUND_ELEMENTS // size, 1), ROUNDS)
            own = taken.pop("own")
            for peer, each in taken.items():
                yield Figure(
                    f"{name} of {size:,}", float(np.median(own)), "ns", f"{peer}'s speed", Ratio.of(each, own)
                )


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


def _layer_norms(size: int, torch: Any) -> Calls:
    x, weight, bias, out = _row(size), _row(size)[0], _row(size)[0], np.zeros((1, size), np.float32)

    def norm() -> Any:
        apart = x - x.mean(axis=1, keepdims=True)
        return apart / np.sqrt((apart * apart).mean(axis=1, keepdims=True) + np.float32(EPSILON)) * weight + bias

    calls: Calls = {"own": lambda: layer_norm(x, weight, bias, EPSILON, out), "NumPy": norm}
    if torch is not None:
        a, b, c = (torch.from_numpy(one) for one in (x, weight, bias))
        calls["torch"] = lambda: torch.nn.functional.layer_norm(a, (size,), b, c, EPSILON)
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
    """Rotate heads of HEAD_DIM numbers (RoPE).

    Each number is paired with one of the other half of the head. NumPy and torch write a new array.
    """
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


@jit
def _weigh_all(scores: Any, scratch: Any) -> None:
    """For each piece i, set scratch[i] to powers of two of the scores, followed by the running maximum and sum."""
    zero, positions, state = np.uint64(0), np.uint64(POSITIONS), np.uint64(POSITIONS)
    for piece in range(np.uint64(scores.shape[0])):
        for p in range(zero, positions, np.uint64(LANES)):  # Copy vectors of scores, as attention does.
            store_floats(scratch, piece, p, load_floats(scores, piece, p))
        for i in range(np.uint64(2)):
            scratch[piece, state + i] = (
                scratch[piece - np.uint64(1), state + i] if piece else np.float32(LOWEST) * np.float32(1 - i)
            )
        _rise(scratch, piece, zero, positions, zero, state, state)
        _weigh(scratch, piece, state)


def _softmaxes(size: int, torch: Any) -> Calls:
    x = _row(size)
    scores, scratch = x.reshape(-1, POSITIONS), line_aligned_zeros((size // POSITIONS, POSITIONS + LANES), np.float32)

    def softmax() -> Any:
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    calls: Calls = {"own": lambda: _weigh_all(scores, scratch), "NumPy": softmax}
    if torch is not None:
        a = torch.from_numpy(x)
        calls["torch"] = lambda: torch.softmax(a, 1)
    return calls


def _transpositions(size: int, torch: Any) -> Calls:
    """Write keys and values of one head of HEAD_DIM into caches. Each has `size` numbers."""
    k, v = (_row(size).reshape(-1, HEAD_DIM) for _ in range(2))
    tokens = len(k)
    k_cache, v_cache = empty_caches(1, tokens, HEAD_DIM, np.float32)
    calls: Calls = {
        "own": lambda: kv_write(k, v, 0, k_cache, v_cache),
        "NumPy": lambda: kv_write_reference(k, v, 0, k_cache, v_cache),
    }
    if torch is not None:
        a, b, values = (torch.from_numpy(one) for one in (k, v, v_cache))
        lanes = min(tokens, k_cache.shape[3])
        keys = torch.from_numpy(k_cache).transpose(2, 3)[0, : -(-tokens // lanes), :lanes]

        def write() -> None:
            keys.copy_(a.view(-1, lanes, HEAD_DIM))
            values[0, :tokens].copy_(b)

        calls["torch"] = write
    return calls


def _additions(size: int, torch: Any) -> Calls:
    x, delta = _row(size), np.zeros((1, size), np.float32)
    calls: Calls = {"own": lambda: residual_add(x, delta), "NumPy": lambda: np.add(x, delta, out=x)}
    if torch is not None:
        a, b = torch.from_numpy(x), torch.from_numpy(delta)
        calls["torch"] = lambda: a.add_(b)
    return calls


CASES: dict[str, Callable[[int, Any], Calls]] = {
    "RMSNorm": _norms,
    "LayerNorm": _layer_norms,
    "SwiGLU": _gates,
    "RoPE": _rotations,
    "Softmax": _softmaxes,
    "Transposition": _transpositions,
    "Addition": _additions,
}
