"""Call compiled code by its address, so that one loop over threads can run the rows of every format.

If a compiled function calls another one, Numba compiles the called function again as part of the caller. An int8
product takes seconds to compile, and both the loop for one thread and the loop for several call it. Code that is
called by its address is compiled only once.
"""

# Nothing checks whether the code at an address was compiled for the types of the arguments. So only `address_of`
# returns addresses, and only contiguous arrays are passed.

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numba
import numpy as np
from numba.core import types

from cbtop.compute.jit.compile import jit_parallel, prange
from cbtop.compute.jit.vectors import Codegen, _intrinsic

_numba: Any = numba
_code_and_description = attrgetter("library", "fndesc")


def address_of(function: Any, *arguments: Any) -> int:
    """Return the address of the machine code of a function under @jit, for arguments of the same types as
    `arguments`.

    Compiles the function if needed.
    """
    kinds = tuple(_numba.typeof(one) for one in arguments)
    function.compile(kinds)
    machine_code, description = _code_and_description(function.overloads[kinds])
    address: int = machine_code.get_pointer_to_function(description.llvm_func_name)
    return address


@_intrinsic
def call_rows(
    typing: Any, address: Any, weights: Any, bias: Any, x: Any, beside: Any, out: Any, chunk: Any, chunks: Any
) -> tuple[Any, Codegen] | None:
    """Call the code at `address` with the other arguments.

    The code computes the rows of one chunk of `linear` or `linear_int8`.
    """
    kinds = weights, bias, x, beside, out, chunk, chunks
    if any(one.layout != "C" for one in kinds[:5]):
        return None  # If the code does not fit, Numba raises an error with the types.

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, *rest = values
        kind = context.call_conv.get_function_type(types.none, kinds)
        function = builder.inttoptr(address, kind.as_pointer())
        context.call_conv.call_function(builder, function, types.none, kinds, rest)
        return context.get_dummy_value()

    return types.none(types.int64, *kinds), generate


@jit_parallel
def on_threads(function: Any, weights: Any, bias: Any, x: Any, beside: Any, out: Any, chunks: Any) -> None:
    """Call the code at the address `function` on several threads, once for each chunk number below `chunks`.

    All functions that are called this way have the same parameters, so this loop is compiled only once. Compiling it
    takes as long as compiling several of the functions.
    """
    for chunk in prange(chunks):
        call_rows(function, weights, bias, x, beside, out, np.int64(chunk), chunks)
