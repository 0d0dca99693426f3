"""Slow and plain references of the contracts in this folder. They use none of the functions that they check."""

# The arithmetic is in float64, or in Python's integers. Arguments are arrays of NumPy.

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np

from cbtop.compute.libraries.through import BINS, HIGH, LOW, ZOOM

SWEEPS = 30  # Jacobi's method converges in about ten
MASK = (1 << 64) - 1
# Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3
PHILOX_MULTIPLIERS, PHILOX_KEYS = (
    (0xD2E7470EE14C6C93, 0xCA5A826395121157),
    (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
)
PHILOX_ROUNDS, THREEFRY_ROUNDS = 10, 20
THREEFRY_PARITY = 0x1BD11BDAA9FC1A22
THREEFRY_ROTATIONS = ((14, 16), (52, 57), (23, 40), (5, 37), (25, 33), (46, 12), (58, 22), (32, 32))


def product(a: Any, x: Any) -> Any:
    """Return a @ x, the sums in float64. `a` has two dimensions, `x` one or two."""
    wide = np.float64
    columns = x.reshape(len(x), -1).astype(wide)
    sums = [[(row * column).sum() for column in columns.T] for row in a.astype(wide)]
    return np.array(sums).reshape(len(a), *x.shape[1:])


def added(x: Any, y: Any) -> Any:
    """Return x + y, element by element."""
    return np.array([one + other for one, other in zip(x.flat, y.flat, strict=True)]).reshape(x.shape)


def positive_part(x: Any) -> Any:
    """Return each element, or 0 if it is negative."""
    return np.where(x < 0, 0, x)


def softmax(x: Any) -> Any:
    """Return the softmax of each row."""
    wide = np.exp(x.astype(np.float64))
    return wide / wide.sum(axis=1, keepdims=True)


def transposed(x: Any) -> Any:
    """Return the transposed matrix."""
    return np.array([[x[i, j] for i in range(x.shape[0])] for j in range(x.shape[1])])


def forward_substitution(a: Any, b: Any) -> Any:
    """Return x of L x = b, with the lower triangle L of `a`."""
    x = np.zeros(b.shape)
    for i in range(len(a)):
        x[i] = (b[i] - sum((a[i, j] * x[j] for j in range(i)), np.zeros(b.shape[1]))) / a[i, i]
    return x


def dft(x: Any) -> Any:
    """Return the unnormalised discrete Fourier transform over all axes."""
    return _fourier(x, -1)


def inverse_dft(x: Any) -> Any:
    """Return the inverse of `dft`."""
    return _fourier(x, 1) / x.size


def real_dft(x: Any) -> Any:
    """Return the first half of the transform of a real signal."""
    return _fourier(x, -1)[: len(x) // 2 + 1]


def _fourier(x: Any, sign: int) -> Any:
    found = x.astype(np.complex128)
    for axis, n in enumerate(x.shape):
        # The product of two indices is reduced exactly, so that the angle is accurate.
        angles = np.outer(np.arange(n), np.arange(n)) % n * (2 * np.pi / n)
        found = np.moveaxis(np.tensordot(np.exp(sign * 1j * angles), found, (1, axis)), 0, axis)
    return found


def convolved(image: Any, kernel: Any) -> Any:
    """Return the full convolution in two dimensions."""
    out = np.zeros([one + other - 1 for one, other in zip(image.shape, kernel.shape, strict=True)])
    for i, j in np.ndindex(*kernel.shape):
        out[i : i + image.shape[0], j : j + image.shape[1]] += kernel[i, j] * image.astype(np.float64)
    return out


def resized(image: Any) -> Any:
    """Return the image with ZOOM times its sides. The corners keep their places."""
    found = image.astype(np.float64)
    for axis in (0, 1):
        side = found.shape[axis]
        places = np.linspace(0, side - 1, ZOOM * side)
        found = np.apply_along_axis(lambda line, at=places: np.interp(at, np.arange(len(line)), line), axis, found)
    return found


def hue_saturation_value(image: Any) -> Any:
    """Return the pixels as hue, saturation and value, by the standard library."""
    return np.array([colorsys.rgb_to_hsv(*pixel) for pixel in image.reshape(-1, 3)]).reshape(image.shape)


def counts(x: Any) -> Any:
    """Return the number of values in each of BINS bins from LOW to HIGH. The last bin includes HIGH."""
    found = np.zeros(BINS, np.int64)
    for value in x.astype(np.float64):
        if LOW <= value <= HIGH:
            found[min(int((value - LOW) / (HIGH - LOW) * BINS), BINS - 1)] += 1
    return found


def compressed_rows(a: Any) -> tuple[Any, Any, Any]:
    """Return the start of each row, and the column and value of each element that is not zero."""
    begins, columns, values = [0], [], []
    for row in a:
        columns += [j for j, value in enumerate(row) if value]
        values += [value for value in row if value]
        begins.append(len(values))
    return np.array(begins), np.array(columns), np.array(values)


def compressed_blocks(a: Any) -> tuple[Any, Any, Any]:
    """Return the same as `compressed_rows` for the blocks of 2 x 2 that have an element other than zero."""
    begins, columns, values = [0], [], []
    for i in range(0, len(a), 2):
        for j in range(0, a.shape[1], 2):
            if a[i : i + 2, j : j + 2].any():
                columns.append(j // 2)
                values.append(a[i : i + 2, j : j + 2])
        begins.append(len(values))
    return np.array(begins), np.array(columns), np.array(values)


def cholesky(a: Any) -> Any:
    """Return the lower triangle L of a = L L*."""
    found = np.zeros(a.shape)
    for i, j in zip(*np.tril_indices(len(a)), strict=True):
        rest = a[i, j] - sum(found[i, k] * found[j, k] for k in range(j))
        found[i, j] = np.sqrt(rest) if i == j else rest / found[j, j]
    return found


def lu(a: Any) -> tuple[Any, Any, Any]:
    """Return P, L and U of a = P L U. The pivot is the largest element of its column."""
    n = len(a)
    upper, order, low = a.astype(np.float64), list(range(n)), np.zeros(a.shape)
    for k in range(n):
        pivot = k + int(np.abs(upper[k:, k]).argmax())
        for rows in (upper, low):
            rows[[k, pivot]] = rows[[pivot, k]]
        order[k], order[pivot] = order[pivot], order[k]
        low[k, k] = 1
        for i in range(k + 1, n):
            low[i, k] = upper[i, k] / upper[k, k]
            upper[i] -= low[i, k] * upper[k]
            upper[i, k] = 0
    permutation = np.zeros(a.shape)
    permutation[order, range(n)] = 1
    return permutation, low, upper


def gram_schmidt(a: Any) -> tuple[Any, Any]:
    """Return Q and R of a = Q R. The diagonal of R is positive."""
    columns = a.shape[1]
    q, r = np.array(a, np.float64), np.zeros((columns, columns))
    for j in range(columns):
        for _ in range(2):  # once again, against rounding
            for k in range(j):
                part = float((q[:, k] * q[:, j]).sum())
                r[k, j] += part
                q[:, j] -= part * q[:, k]
        r[j, j] = np.sqrt((q[:, j] ** 2).sum())
        q[:, j] /= r[j, j]
    return q, r


def singular_values(a: Any) -> tuple[Any, Any, Any, Any]:
    """Return the singular values in descending order, the matrix itself and two identities."""
    wide = a.astype(np.float64)
    side = min(a.shape)
    small = wide.T @ wide if a.shape[1] == side else wide @ wide.T
    return np.sqrt(_jacobi(small)[::-1]), wide, np.eye(side), np.eye(side)


def eigenvalues(a: Any) -> tuple[Any, Any, Any]:
    """Return the eigenvalues of a symmetric matrix in ascending order, the matrix itself and the identity."""
    return _jacobi(a.astype(np.float64)), a.astype(np.float64), np.eye(len(a))


def _jacobi(a: Any) -> Any:
    """Return the eigenvalues of a symmetric matrix in ascending order, by rotations."""
    a = a.copy()
    for _ in range(SWEEPS):
        for i, j in zip(*np.triu_indices(len(a), 1), strict=True):
            angle = np.arctan2(2 * a[i, j], a[j, j] - a[i, i]) / 2
            rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            a[[i, j]] = rotation @ a[[i, j]]
            a[:, [i, j]] = a[:, [i, j]] @ rotation.T
        if np.abs(np.triu(a, 1)).max() < 1e-14 * np.abs(a).max():
            break
    return np.sort(a.diagonal())


def philox(key: int, count: int) -> Any:
    """Return words of Philox 4x64-10. The counter of the first block is 1."""
    return _blocks(_philox_block, key, count)


def threefry(key: int, count: int) -> Any:
    """Return words of Threefry 4x64-20. The counter of the first block is 1."""
    return _blocks(_threefry_block, key, count)


def _blocks(block: Any, key: int, count: int) -> Any:
    words = [word for number in range(1, -(-count // 4) + 1) for word in block([number, 0, 0, 0], key)]
    return np.array(words[:count], np.uint64)


def _philox_block(counter: list[int], key: int) -> list[int]:
    keys = [key & MASK, key >> 64]
    for _ in range(PHILOX_ROUNDS):
        first, second = PHILOX_MULTIPLIERS[0] * counter[0], PHILOX_MULTIPLIERS[1] * counter[2]
        counter = [
            second >> 64 ^ counter[1] ^ keys[0], second & MASK, first >> 64 ^ counter[3] ^ keys[1], first & MASK,
        ]  # fmt: skip
        keys = [(one + step) & MASK for one, step in zip(keys, PHILOX_KEYS, strict=True)]
    return counter


def _threefry_block(counter: list[int], key: int) -> list[int]:
    keys = [key & MASK, key >> 64, 0, 0]
    keys.append(keys[0] ^ keys[1] ^ THREEFRY_PARITY)
    x = [(one + other) & MASK for one, other in zip(counter, keys, strict=False)]
    for number in range(THREEFRY_ROUNDS):
        left, right = THREEFRY_ROTATIONS[number % 8]
        # The partners of the two even words take turns.
        pairs = ((0, 1, left), (2, 3, right)) if number % 2 == 0 else ((0, 3, left), (2, 1, right))
        for even, odd, bits in pairs:
            x[even] = (x[even] + x[odd]) & MASK
            x[odd] = (x[odd] << bits & MASK | x[odd] >> (64 - bits)) ^ x[even]
        if number % 4 == 3:
            turn = number // 4 + 1
            x = [(one + keys[(turn + place) % 5]) & MASK for place, one in enumerate(x)]
            x[3] = (x[3] + turn) & MASK
    return x


def contracted(a: Any, b: Any) -> Any:
    """Return out[d, a] = sum over b and c of a[a, b, c] b[c, b, d]."""
    out = np.zeros((b.shape[2], a.shape[0]))
    for i, j, k in np.ndindex(*a.shape):
        out[:, i] += a[i, j, k] * b[k, j].astype(np.float64)
    return out


def one_axis_contracted(a: Any, b: Any) -> Any:
    """Return the sum over the last axis of `a` and the first one of `b`. Both have three axes."""
    out = np.zeros((*a.shape[:-1], *b.shape[1:]))
    for k in range(b.shape[0]):
        out += a[:, :, k, None, None].astype(np.float64) * b[k].astype(np.float64)
    return out
