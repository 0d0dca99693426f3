"""Activation functions of neural networks, and conversions between float32 and float16 (IEEE binary16).

`silu`, `gelu`, `sigmoid`, `relu`, `tanh` take a number or an array, and return float32. Kernels compute with the same
code: the functions `each_silu`, … are for code that Numba compiles, and compute one float32.
"""

# - Arguments that are NaN or infinite are computed by NumPy, because compiled code assumes finite numbers (fastmath).
# - The relative error is below 4e-7 of torch in float64. That of `gelu` is up to 1e-5 below 0, because the error
#   of the exponent grows with it.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbtop.compute.jit.compile import copy_of, half_to_float, jit, jit_inlined
from cbtop.compute.jit.exponential import exponential, tangent
from cbtop.compute.jit.halves import float_to_half

Floats = NDArray[np.float32]

# gelu(x) is about x / (1 + exp(-LINEAR * x - CUBIC * x³)). Hendrycks and Gimpel 2016 give this formula with tanh.
LINEAR = np.float32(2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715 * 2 * np.sqrt(2 / np.pi))


@jit_inlined
def each_sigmoid(value: Any) -> Any:
    """Return 1 / (1 + exp(-value)) of a float32."""
    return np.float32(1) / (np.float32(1) + exponential(np.float32(-value)))


@jit_inlined
def each_silu(value: Any) -> Any:
    """Return value / (1 + exp(-value)) of a float32."""
    return value / (np.float32(1) + exponential(np.float32(-value)))


@jit_inlined
def each_gelu(value: Any) -> Any:
    """Return the Gaussian error linear unit of a float32, by the formula with tanh."""
    power = np.float32(-value * (LINEAR + CUBIC * value * value))
    return value / (np.float32(1) + exponential(power))


@jit_inlined
def each_relu(value: Any) -> Any:
    """Return the larger one of a float32 and 0."""
    return max(value, np.float32(0))


each_tanh = tangent


def silu(x: ArrayLike) -> Floats:
    """Return x / (1 + exp(-x)), the sigmoid linear unit (swish)."""
    return _of(_silu_all, _silu_reference, x)


def gelu(x: ArrayLike) -> Floats:
    """Return x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³))), as `gelu(x, approximate="tanh")` of torch."""
    return _of(_gelu_all, _gelu_reference, x)


def sigmoid(x: ArrayLike) -> Floats:
    """Return 1 / (1 + exp(-x)), the logistic function."""
    return _of(_sigmoid_all, _sigmoid_reference, x)


def relu(x: ArrayLike) -> Floats:
    """Return the larger one of x and 0."""
    return _of(_relu_all, _relu_reference, x)


def tanh(x: ArrayLike) -> Floats:
    """Return the hyperbolic tangent."""
    return _of(_tanh_all, np.tanh, x)


def f16_to_f32(x: ArrayLike) -> Floats:
    """Return float16 values, or their bits in uint16, as float32. The conversion is exact.

    Raises TypeError for another type.
    """
    array = np.asarray(x)
    if array.dtype not in (np.float16, np.uint16):
        raise TypeError(f"an array of {array.dtype}; float16, or its bits in uint16, is expected")
    out = np.empty(array.shape, np.float32)
    _f16_to_f32_all(np.ascontiguousarray(array).reshape(-1).view(np.uint16), out.reshape(-1))
    return out


def f32_to_f16(x: ArrayLike) -> NDArray[np.float16]:
    """Return the nearest float16 values, ties to even.

    Infinities, and values that float16 cannot hold (from 65,520), become NaN. The reason: an infinite key in a cache
    can lead to a weight of 0, which looks valid.
    """
    array = np.asarray(x, np.float32)
    out = np.empty(array.shape, np.uint16)
    _f32_to_f16_all(np.ascontiguousarray(array).reshape(-1), out.reshape(-1))
    return out.view(np.float16)


def _of(loop: Callable[[Any, Any], None], reference: Callable[[Any], Any], x: ArrayLike) -> Floats:
    """Return a function of each element of `x`. NaN and infinities are computed by `reference`, in float64."""
    array = np.asarray(x, np.float32)
    out = np.empty(array.shape, np.float32)
    loop(np.ascontiguousarray(array).reshape(-1), out.reshape(-1))
    is_odd = ~np.isfinite(array)
    if is_odd.any():
        with np.errstate(all="ignore"):
            out[is_odd] = reference(array[is_odd].astype(np.float64))
    return out


def _silu_reference(wide: Any) -> Any:
    return wide * _sigmoid_reference(wide)


def _gelu_reference(wide: Any) -> Any:
    return 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))


def _sigmoid_reference(wide: Any) -> Any:
    return 0.5 * (1 + np.tanh(wide / 2))  # this form cannot overflow


def _relu_reference(wide: Any) -> Any:
    return np.maximum(wide, 0)


def _each_element(x: Any, out: Any) -> None:
    """Set each element of `out` to the function of the element of `x`. `each_silu` is replaced in copies."""
    for i in range(np.uint64(x.size)):
        out[i] = each_silu(x[i])


_silu_all = jit(copy_of(_each_element, "_silu_all", each_silu=each_silu))
_gelu_all = jit(copy_of(_each_element, "_gelu_all", each_silu=each_gelu))
_sigmoid_all = jit(copy_of(_each_element, "_sigmoid_all", each_silu=each_sigmoid))
_relu_all = jit(copy_of(_each_element, "_relu_all", each_silu=each_relu))
_tanh_all = jit(copy_of(_each_element, "_tanh_all", each_silu=each_tanh))
_f16_to_f32_all = jit(copy_of(_each_element, "_f16_to_f32_all", each_silu=half_to_float))
_f32_to_f16_all = jit(copy_of(_each_element, "_f32_to_f16_all", each_silu=float_to_half))
