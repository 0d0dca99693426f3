"""Vectorised exp() and tanh() of a float32 for activations and soft caps, and powers of two for a softmax."""

# math.exp in a loop remains a call of the scalar library function, which is 3.6-8x slower than this polynomial.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit_inlined
from cbtop.compute.jit.vectors import larger, multiply, multiply_add, power_of_two, rounded, splat, subtract

EXPONENTIAL_FLOPS = 19  # number of operations of `exponential`, without those that limit its argument
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # ln 2 as the sum of two numbers, from Cephes expf, so that k * LN2_HIGH is exact
LN2_LOW = np.float32(-2.12194440e-4)
SMALLEST = np.float32(-87.0)  # for arguments below this, the result is not a normal float32
LARGEST = np.float32(88.0)
# From Cephes expf.c: the minimax polynomial of exp(r) - 1 - r over |r| < ln(2)/2, divided by r².
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
TANGENT_FLOPS = EXPONENTIAL_FLOPS + 16
# From Cephes tanhf.c: the minimax polynomial of tanh(x) / x - 1, divided by x², over |x| < 0.625.
T0, T1, T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
T3, T4 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)
SMALL_TANGENT = np.float32(0.625)
POWER_FLOPS = 12
# For a power below this number, 2 ** power is less than every normal float32, so the result is set to 0.
NOTHING = np.float32(-127)
# 1 + r times this polynomial is 2^r within 1e-7 for |r| <= 1/2. It is a minimax polynomial, found by least squares
# with Lawson's weights.
P0, P1, P2 = np.float32(1.32647272e-3), np.float32(9.67151264e-3), np.float32(5.550733743e-2)
P3, P4 = np.float32(2.402224209e-1), np.float32(6.931469776e-1)


@jit_inlined
def exponential(value: Any) -> Any:
    """Return exp(value) with a relative error below 2e-7.

    The argument is limited, so that the result is a normal float32.
    """
    value = min(max(value, SMALLEST), LARGEST)
    k = np.floor(np.float32(value * LOG2_E + np.float32(0.5)))
    r = np.float32(np.float32(value - k * LN2_HIGH) - k * LN2_LOW)
    polynomial = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    power_of_two = np.int32(np.int32(np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(polynomial * r * r + r + np.float32(1)) * power_of_two


@jit_inlined
def powers_of_two(values: Any) -> Any:
    """Return 2 to the power of each lane of a Floats16, with a relative error below 2e-7.

    No lane may be above 127. The result is 0 below -126.5.
    """
    values = larger(values, splat(NOTHING))
    k = rounded(values)
    r = subtract(values, k)
    polynomial = multiply_add(splat(P0), r, splat(P1))
    polynomial = multiply_add(polynomial, r, splat(P2))
    polynomial = multiply_add(polynomial, r, splat(P3))
    polynomial = multiply_add(polynomial, r, splat(P4))
    power = power_of_two(k)
    return multiply_add(multiply(polynomial, r), power, power)


@jit_inlined
def tangent(value: Any) -> Any:
    """Return tanh(value) with a relative error below 3e-7."""
    square = np.float32(value * value)
    small = np.float32((((T0 * square + T1) * square + T2) * square + T3) * square + T4) * square * value + value
    power = exponential(np.float32(np.float32(2) * value))
    large = np.float32(1) - np.float32(2) / (power + np.float32(1))
    return small if abs(value) < SMALL_TANGENT else large
