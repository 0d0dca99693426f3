"""exp() and tanh() of a float32 that vectorise; softmax, activations and soft caps share them."""

# math.exp inside a loop stays a scalar library call, 3.6-8x slower than this polynomial.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined
from cbtop.compute.jit.vectors import larger, multiply, multiply_add, power_of_two, rounded, splat

EXPONENTIAL_FLOPS = 19  # as written below, the clamping not counted
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # Cephes expf: ln 2 in two parts, so that k * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)
SMALLEST = np.float32(-87.0)  # below, the result leaves the normal float32 range
LARGEST = np.float32(88.0)
# Cephes expf.c: minimax polynomial of exp(r) - 1 - r over |r| < ln(2)/2, divided by r².
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
TANGENT_FLOPS = EXPONENTIAL_FLOPS + 16
# Cephes tanhf.c: minimax polynomial of tanh(x) / x - 1, divided by x², over |x| < 0.625.
T0, T1, T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
T3, T4 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)
SMALL_TANGENT = np.float32(0.625)


@jit
def exponential(value: Any) -> Any:
    """exp(value) within 2e-7 relative; held to the normal range at both ends."""
    value = min(max(value, SMALLEST), LARGEST)
    k = np.floor(np.float32(value * LOG2_E + np.float32(0.5)))
    r = np.float32(np.float32(value - k * LN2_HIGH) - k * LN2_LOW)
    polynomial = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    power_of_two = np.int32(np.int32(np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(polynomial * r * r + r + np.float32(1)) * power_of_two


@jit_inlined
def exponential_of_negative(values: Any) -> Any:
    """Of each lane of a Floats16, none above 0, as `exponential`."""
    values = larger(values, splat(SMALLEST))
    k = rounded(multiply(values, splat(LOG2_E)))
    r = multiply_add(k, splat(np.float32(-LN2_LOW)), multiply_add(k, splat(np.float32(-LN2_HIGH)), values))
    polynomial = multiply_add(splat(C0), r, splat(C1))
    polynomial = multiply_add(polynomial, r, splat(C2))
    polynomial = multiply_add(polynomial, r, splat(C3))
    polynomial = multiply_add(polynomial, r, splat(C4))
    polynomial = multiply_add(polynomial, r, splat(C5))
    below = multiply_add(multiply(polynomial, r), r, r)
    power = power_of_two(k)
    return multiply_add(below, power, power)


@jit
def tangent(value: Any) -> Any:
    """tanh(value) within 3e-7 relative."""
    square = np.float32(value * value)
    small = np.float32((((T0 * square + T1) * square + T2) * square + T3) * square + T4) * square * value + value
    power = exponential(np.float32(np.float32(2) * value))
    large = np.float32(1) - np.float32(2) / (power + np.float32(1))
    return small if abs(value) < SMALL_TANGENT else large
