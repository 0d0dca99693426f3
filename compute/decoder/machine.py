"""The machine that a decoder runs on: its memory, and the copies between it and Python."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from cbtop.compute.backends import refuse_threads_of_fork, turn
from cbtop.compute.decoder.base import Model
from cbtop.compute.jit.cpu import LOOKS_AHEAD
from cbtop.compute.kernels.attention_loops import scratch_for
from cbtop.compute.kernels.kv_caches import caches_of_layers
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.memory import line_aligned_zeros


class Machine(Protocol):
    """Makes the arrays of a decoder, once. Kernels fill them."""

    #: Whether kernels record themselves, and their shape, when they are launched; a brick's definition then names
    # none.
    names_launches: bool
    #: Tokens that pass together: no buffer grows with a prompt.
    most_together: int

    def check(self) -> None:
        """Raise ComputeError if the machine can no longer run."""

    def turn(self) -> AbstractContextManager[None]:
        """Return the context of a pass, which waits for other passes if only one can run at a time."""

    def array(self, values: Any) -> Any:
        """Return an array of the host in memory that kernels read."""

    def zeros(self, shape: Any, dtype: Any) -> Any: ...

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return the keys and values of each layer, zeros."""

    def attention_scratch(self, model: Model, context: int) -> Any: ...

    def scratch(self, columns: int) -> Any:
        """Return the scratch of products that take activations unrounded."""

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return the scratch of products that take activations in int8."""

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Return whole numbers in memory that kernels read: in `array`, or in inputs that were already sent."""

    def position(self, value: int) -> Any:
        """Return the first position of a pass, as kernels take it."""

    def host(self, array: Any) -> Any:
        """Return the contents of an array in memory that Python reads."""


def activations(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Return zeros for the activations of tokens.

    On a Zen 4 they begin 16 bytes after the start of a cache line. Products of BF16 then read weights from memory at
    0.97 to 0.99 of its bandwidth, and at 0.65 if activations begin with a line; F16 at 0.94 to 0.98, and 0.91 to
    0.95.
    """
    if not LOOKS_AHEAD:
        return np.zeros(shape, dtype)
    return line_aligned_zeros((shape,) if isinstance(shape, int) else shape, dtype, 16)


class Host:
    """The CPU, with a number of threads."""

    names_launches = False
    most_together = 128  # their activations stay in the CPU cache

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def check(self) -> None:
        """Raise ComputeError in a fork of a process whose kernels have run on threads."""
        refuse_threads_of_fork(self._threads)

    def turn(self) -> AbstractContextManager[None]:
        """Return `backends.turn` if the machine runs on several threads."""
        return turn() if self._threads > 1 else nullcontext()

    def array(self, values: Any) -> Any:
        """Return `values`, which kernels can read."""
        return values

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return zeros of NumPy, aligned so that float products read them fastest."""
        return activations(shape, dtype)

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return caches in attention's layout."""
        return caches_of_layers(layers, kv_heads, context, head_dim, dtype)

    def attention_scratch(self, model: Model, context: int) -> Any:
        """Return attention's scratch for each thread."""
        return scratch_for(self._threads, model.head_dim)

    def scratch(self, columns: int) -> Any:
        """Return a row for each thread."""
        return np.zeros((self._threads, columns), np.float32)

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return an Int8Scratch."""
        return Int8Scratch.of(tokens, columns, self._threads)

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Write the values into `array`."""
        array[:] = values
        return array

    def position(self, value: int) -> Any:
        """Return it as it is."""
        return value

    def host(self, array: Any) -> Any:
        """Return `array`, which Python can read."""
        return array
