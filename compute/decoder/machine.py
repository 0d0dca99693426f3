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
    """Makes the arrays of a decoder. The decoder's kernels write into these arrays."""

    # : Whether each kernel records its own launch, with its shape. If it is true, the definition of a brick does not
    # name the kernels.
    names_launches: bool
    # : Largest number of tokens in one pass. A longer prompt takes several passes, so that buffers stay small.
    most_together: int

    def check(self) -> None:
        """Raise ComputeError if the machine cannot run any longer."""

    def turn(self) -> AbstractContextManager[None]:
        """Return the context manager of a pass.

        If only one pass can run at a time, entering the context waits until the other passes have ended.
        """

    def array(self, values: Any) -> Any:
        """Return a host array in memory that kernels can read."""

    def zeros(self, shape: Any, dtype: Any) -> Any: ...

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return arrays of zeros for the keys and values of each layer."""

    def attention_scratch(self, model: Model, context: int) -> Any: ...

    def scratch(self, columns: int) -> Any:
        """Return the scratch memory of products with unrounded activations."""

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return the scratch memory of products with int8 activations."""

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Return `values` in memory that kernels can read.

        The result is `array`, or a part of the inputs that were sent before.
        """

    def position(self, value: int) -> Any:
        """Return the first position of a pass, in the type that kernels take."""

    def host(self, array: Any) -> Any:
        """Return the contents of an array in memory that Python can read."""


def activations(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Return zeros for the activations of tokens.

    On a Zen 4, the activations begin 16 bytes after the start of a cache line. Products of BF16 then read weights at
    0.97 to 0.99 of the memory bandwidth, and products of F16 at 0.94 to 0.98. With activations at the start of a
    line, they reach only 0.65 (BF16) and 0.91 to 0.95 (F16).
    """
    if not LOOKS_AHEAD:
        return np.zeros(shape, dtype)
    return line_aligned_zeros((shape,) if isinstance(shape, int) else shape, dtype, 16)


class Host:
    """The processor of the host as the machine of a decoder, with a number of threads."""

    names_launches = False
    # largest number of tokens in one pass; the activations of 128 tokens stay in the cache of the processor
    most_together = 128

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def check(self) -> None:
        """Raise ComputeError in a fork of a process that has run kernels on threads, which a fork cannot use."""
        refuse_threads_of_fork(self._threads)

    def turn(self) -> AbstractContextManager[None]:
        """Return the context `backends.turn`, which lets one pass run at a time. With one thread, return a context
        that does not wait.
        """
        return turn() if self._threads > 1 else nullcontext()

    def array(self, values: Any) -> Any:
        """Return `values` unchanged, because kernels can read them."""
        return values

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return a NumPy array of zeros, with the alignment that makes float products fastest."""
        return activations(shape, dtype)

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Return caches in the layout of the attention kernels."""
        return caches_of_layers(layers, kv_heads, context, head_dim, dtype)

    def attention_scratch(self, model: Model, context: int) -> Any:
        """Return the scratch memory of the attention kernels, one piece for each thread."""
        return scratch_for(self._threads, model.head_dim)

    def scratch(self, columns: int) -> Any:
        """Return scratch memory for products: one row of zeros for each thread."""
        return np.zeros((self._threads, columns), np.float32)

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Return an Int8Scratch."""
        return Int8Scratch.of(tokens, columns, self._threads)

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Write `values` (tokens or positions) into `array`, and return `array`."""
        array[:] = values
        return array

    def position(self, value: int) -> Any:
        """Return `value` unchanged."""
        return value

    def host(self, array: Any) -> Any:
        """Return `array` unchanged, because Python can read it."""
        return array
