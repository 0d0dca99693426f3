"""RoPE: rotates pairs of a head's dimensions by an angle that grows with the position.

reference    NumPy, float64
numba        in place. Angles are read from a table that is made once per model, so no sine is computed (4-6x as fast
             as NumPy)
cuda         one thread per pair; the position is read on the device, so that a graph can run at every position

Two layouts of the pairs: "normal" (llama) rotates neighbours (2i, 2i+1), NEOX (qwen2) rotates (i, i + n/2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, of_each
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def angle_table(positions: int, frequencies: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the cosines and sines of position * frequency, float32 (2, positions, pairs).

    There is one frequency for each pair.
    """
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    table = np.empty((2, *angles.shape), np.float32)
    # Round the table to float32 in parts, because a float64 table of a million positions would take 4 GB more.
    np.cos(angles, out=table[0])
    np.sin(angles, out=table[1])
    return table


def reference(x: Any, head_dim: int, start: int, table: Any, neox: bool) -> None:
    """Rotate x, float32 (tokens, heads * head_dim). Token t is at position start + t.

    `table` is from `angle_table`.
    """
    tokens, pairs = x.shape[0], table.shape[2]
    heads = x.reshape(tokens, -1, head_dim)  # this is a view of x and not a copy, because x is contiguous
    cos, sin = table[:, start : start + tokens, None, :].astype(np.float64)
    first, second = (
        (slice(0, pairs), slice(pairs, 2 * pairs)) if neox else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    )
    a, b = heads[..., first].astype(np.float64), heads[..., second].astype(np.float64)
    heads[..., first], heads[..., second] = a * cos - b * sin, a * sin + b * cos


@jit
def rope(x: Any, head_dim: int, start: int, table: Any, neox: bool) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    pairs = np.uint64(table.shape[2])
    stride, gap = (np.uint64(1), pairs) if neox else (np.uint64(2), np.uint64(1))
    for t in range(np.uint64(x.shape[0])):
        position = np.uint64(start) + t
        for head in range(np.uint64(x.shape[1] // head_dim)):
            first = head * np.uint64(head_dim)
            for i in range(pairs):
                cos, sin = table[np.uint64(0), position, i], table[np.uint64(1), position, i]
                a, b = x[t, first + stride * i], x[t, first + stride * i + gap]
                x[t, first + stride * i] = a * cos - b * sin
                x[t, first + stride * i + gap] = a * sin + b * cos


CUDA = CudaModule(
    "rope",
    r"""
KERNEL rope(float* x, int columns, int64_t size, float* other, int other_columns, int64_t other_size,
    const int* start, const float* table, int head_dim, int positions, int pairs, int neox STAMP)
{
    ENTER
    int64_t each = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (each < size + other_size) {
        if (each >= size) {
            each -= size;
            x = other;
            columns = other_columns;
        }
        const int pair = (int)(each % pairs), of_token = columns / head_dim;
        const int64_t head = each / pairs, token = head / of_token;
        const int64_t angle = (*start + token) * pairs + pair;
        const float cos = table[angle], sin = table[(int64_t)positions * pairs + angle];
        float* first = x + head * head_dim + (neox ? pair : 2 * pair);
        float* second = first + (neox ? pairs : 1);
        const float a = *first, b = *second;
        *first = a * cos - b * sin;
        *second = a * sin + b * cos;
    }
    LEAVE
}
""",
)


def launches(x: Any, head_dim: int, start: Any, table: Any, neox: bool) -> tuple[CudaLaunch, ...]:
    """Return one launch with a thread for each pair of each head."""
    size = _pairs_of(x, head_dim, table)
    return (_launch((x, size), (x, 0), head_dim, start, table, neox),)


def together(first: Arguments, second: Arguments) -> tuple[CudaLaunch, ...]:
    """Return one launch that rotates queries and keys. Both have the same positions and the same table."""
    (x, head_dim, *how), (other, *_) = first, second
    table = how[1]
    of_x, of_other = (_pairs_of(one, head_dim, table) for one in (x, other))
    return (_launch((x, of_x), (other, of_other), head_dim, *how),)


def _pairs_of(x: Any, head_dim: int, table: Any) -> int:
    tokens, columns = x.shape
    pairs: int = tokens * (columns // head_dim) * table.shape[2]
    return pairs


def _launch(
    first: tuple[Any, int], second: tuple[Any, int], head_dim: int, start: Any, table: Any, neox: bool
) -> CudaLaunch:
    of_each_x = [one for x, size in (first, second) for one in (x, np.int32(x.shape[1]), np.int64(size))]
    sizes = (np.int32(one) for one in (head_dim, *table.shape[1:], neox))
    return CudaLaunch(CUDA, "rope", *of_each(first[1] + second[1]), (*of_each_x, start, table, *sizes))


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are rotated values.

    A pair takes 4 multiplications and 2 additions, and reads two angles.
    """
    return KernelWork(flops_per_element=3.0, bytes_per_element=3.0 * FLOAT_BYTES)


def _examples(neox: bool) -> Any:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        head_dim = 2 * size
        table = angle_table(9, 1e4 ** (-np.arange(size) / size))
        return floats(rng, 5, 3 * head_dim), head_dim, 4, table, neox

    return examples


def _kernel(name: str, neox: bool) -> Kernel:
    cuda = CudaKernel((CUDA,), launches, together=together)
    return Kernel(name, reference, rope, work, (0,), contract("rope"), _examples(neox), by_token=(0,), cuda=cuda)


ROPE_NORMAL = _kernel("rope_normal", neox=False)
ROPE_NEOX = _kernel("rope_neox", neox=True)
