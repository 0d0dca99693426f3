"""The machine that a decoder runs on: its memory, and the copies between this memory and Python."""

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
    """Makes the arrays of a decoder once. Kernels write into them."""

    #: Whether each kernel records its own launch, with its shape. A brick's definition then names no kernels.
    names_launches: bool
    #: Largest number of tokens in one pass, so that no buffer grows with a prompt.
    most_together: int

    def check(self) -> None:
        """Raise ComputeError if the machine can no longer run."""

    def turn(self) -> AbstractContextManager[None]:
        """Return the context manager of a pass. Entering it waits for other passes if only one can run at a time."""

    def array(self, values: Any) -> Any:
        """Return a host array in memory that kernels read."""

    def zeros(self, shape: Any, dtype: Any) -> Any: ...

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return arrays of zeros for the keys and values of each layer."""

    def attention_scratch(self, model: Model, context: int) -> Any: ...

    def scratch(self, columns: int) -> Any:
        """Return the scratch of products that take unrounded activations."""

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return the scratch of products that take int8 activations."""

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Return `values` in memory that kernels read: in `array`, or in inputs that have already been sent."""

    def position(self, value: int) -> Any:
        """Return the first position of a pass, in the form that kernels take."""

    def host(self, array: Any) -> Any:
        """Return the contents of an array in memory that Python reads."""


def activations(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Return zeros for the activations of tokens.

    On a Zen 4 the activations begin 16 bytes after the start of a cache line. Products of BF16 then read weights at
    0.97 to 0.99 of the memory bandwidth, instead of 0.65 if activations begin at a line. Products of F16 read at 0.94
    to 0.98, instead of 0.91 to 0.95.
    """
    if not LOOKS_AHEAD:
        return np.zeros(shape, dtype)
    return line_aligned_zeros((shape,) if isinstance(shape, int) else shape, dtype, 16)


class Host:
    """The CPU, with a number of threads."""

    names_launches = False
    most_together = 128  # the activations of 128 tokens stay in the CPU cache

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def check(self) -> None:
        """Raise ComputeError in a fork of a process whose kernels have run on threads."""
        refuse_threads_of_fork(self._threads)

    def turn(self) -> AbstractContextManager[None]:
        """Return `backends.turn`, or a context that does not wait if the machine runs on one thread."""
        return turn() if self._threads > 1 else nullcontext()

    def array(self, values: Any) -> Any:
        """Return `values` unchanged, because kernels can read them."""
        return values

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return a NumPy array of zeros, aligned so that float products read it fastest."""
        return activations(shape, dtype)

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return caches in the layout of the attention kernels."""
        return caches_of_layers(layers, kv_heads, context, head_dim, dtype)

    def attention_scratch(self, model: Model, context: int) -> Any:
        """Return the scratch of the attention kernels for each thread."""
        return scratch_for(self._threads, model.head_dim)

    def scratch(self, columns: int) -> Any:
        """Return one row of zeros for each thread."""
        return np.zeros((self._threads, columns), np.float32)

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return an Int8Scratch."""
        return Int8Scratch.of(tokens, columns, self._threads)

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Write the values into `array`."""
        array[:] = values
        return array

    def position(self, value: int) -> Any:
        """Return `value` unchanged."""
        return value

    def host(self, array: Any) -> Any:
        """Return `array` unchanged, because Python can read it."""
        return array
