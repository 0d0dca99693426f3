"""Multiply activations by the rows of one or several matrices, on one or several threads.

Several matrices share one loop over threads, because waking the threads takes as long as a small product. Each thread
computes the same share of every matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbtop.compute.jit.addresses import address_of, call_rows, on_threads
from cbtop.compute.jit.compile import jit_parallel, prange
from cbtop.compute.kernels.activation import swiglu, swiglu_columns
from cbtop.compute.settings import crossovers


@dataclass(slots=True)
class CompiledRows:
    """The compiled rows of one format.

    `function(weights, bias, x, beside, out, chunk, chunks)` computes the rows in chunk number `chunk` of `chunks`,
    `unit` rows at a time.

    `x` and `beside` are the prepared activations: either x and a scratch row for each thread, or codes and factors.
    """

    function: Any
    unit: int = 1
    _addresses: dict[str, int] = field(default_factory=dict, init=False)

    def address(self, weights: Any, bias: Any, x: Any, beside: Any, out: Any) -> int:
        """Return the address of the machine code that was compiled for arguments of these types.

        Code for other types would misinterpret the arguments.
        """
        kinds = weights.dtype.char + bias.dtype.char + x.dtype.char + beside.dtype.char + out.dtype.char
        address = self._addresses.get(kinds)
        if address is None:
            address = self._addresses[kinds] = address_of(self.function, weights, bias, x, beside, out, 0, 1)
        return address


# Each product is passed as four arguments. Tuples would make each call 0.3 us longer, which is 4 % of a small call.
@jit_parallel
def _three(
    first: Any, weights: Any, bias: Any, out: Any,
    second: Any, second_weights: Any, second_bias: Any, second_out: Any,
    third: Any, third_weights: Any, third_bias: Any, third_out: Any,
    x: Any, beside: Any, chunks: Any,
) -> None:  # fmt: skip
    for chunk in prange(chunks):
        call_rows(first, weights, bias, x, beside, out, np.int64(chunk), chunks)
        call_rows(second, second_weights, second_bias, x, beside, second_out, np.int64(chunk), chunks)
        call_rows(third, third_weights, third_bias, x, beside, third_out, np.int64(chunk), chunks)


# `first` and `second` describe one matrix each. They are tuples: the address of the compiled code, the weights, the
# bias and the output. In this function, tuples make a call only 0.1 us longer.
@jit_parallel
def _gated(first: Any, second: Any, x: Any, beside: Any, out: Any, unit: Any, chunks: Any) -> None:
    a, weights, bias, gate = first
    b, up_weights, up_bias, up = second
    groups = weights.shape[0] // unit
    for chunk in prange(chunks):
        call_rows(a, weights, bias, x, beside, gate, np.int64(chunk), chunks)
        call_rows(b, up_weights, up_bias, x, beside, up, np.int64(chunk), chunks)
        # The rows of this chunk begin and end here. `call_rows` divides rows in the same way.
        begin, end = chunk * groups // chunks * unit, (chunk + 1) * groups // chunks * unit
        swiglu_columns(gate, up, out, np.uint64(begin), np.uint64(end))


def multiply_one(rows: CompiledRows, weights: Any, bias: Any, x: Any, beside: Any, out: Any, threads: int) -> None:
    """Set out = x @ weights.T + bias for one matrix."""
    if threads == 1 or weights.size * out.shape[0] < crossovers().product_bytes:
        rows.function(weights, bias, x, beside, out, 0, 1)
    else:
        address = rows.address(weights, bias, x, beside, out)
        on_threads(address, weights, bias, x, beside, out, threads)


Part = tuple[CompiledRows, Any, Any, Any]  # a part is a matrix: its row functions, weights, bias and output


def multiply_three(q: Part, k: Part, v: Part, x: Any, beside: Any, threads: int) -> None:
    """Set out = x @ weights.T + bias for each of several matrices."""
    rows, a, a_bias, a_out = q
    b_rows, b, b_bias, b_out = k
    c_rows, c, c_bias, c_out = v
    if threads == 1 or (a.size + b.size + c.size) * a_out.shape[0] < crossovers().product_bytes:
        rows.function(a, a_bias, x, beside, a_out, 0, 1)
        b_rows.function(b, b_bias, x, beside, b_out, 0, 1)
        c_rows.function(c, c_bias, x, beside, c_out, 0, 1)
        return
    first, second = rows.address(a, a_bias, x, beside, a_out), b_rows.address(b, b_bias, x, beside, b_out)
    third = c_rows.address(c, c_bias, x, beside, c_out)
    _three(first, a, a_bias, a_out, second, b, b_bias, b_out, third, c, c_bias, c_out, x, beside, threads)


def multiply_gated(gate: Part, up: Part, x: Any, beside: Any, out: Any, threads: int) -> None:
    """Compute both products, then set out = silu(gate's product) * up's product."""
    rows, a, a_bias, a_out = gate
    b_rows, b, b_bias, b_out = up
    if threads == 1 or (a.size + b.size) * out.shape[0] < crossovers().product_bytes:
        rows.function(a, a_bias, x, beside, a_out, 0, 1)
        b_rows.function(b, b_bias, x, beside, b_out, 0, 1)
        swiglu(a_out, b_out, out)
        return
    first, second = rows.address(a, a_bias, x, beside, a_out), b_rows.address(b, b_bias, x, beside, b_out)
    _gated((first, a, a_bias, a_out), (second, b, b_bias, b_out), x, beside, out, rows.unit, threads)
