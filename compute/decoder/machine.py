"""What a decoder runs on: where its arrays lie, and who reads and writes them for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from cbtop.compute.backends import refuse_threads_of_fork, turn
from cbtop.compute.decoder.base import Model
from cbtop.compute.jit.cpu import LOOKS_AHEAD
from cbtop.compute.kernels import attention
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.memory import line_aligned_zeros


class Machine(Protocol):
    """Arrays of a decoder are made here, once; their contents are the kernels'."""

    #: Whether kernels record themselves when they are launched, with how: a brick's definition names none then.
    names_launches: bool
    #: Tokens that pass together: no buffer grows with a prompt.
    most_together: int

    def check(self) -> None:
        """ComputeError where it cannot run any more."""

    def turn(self) -> AbstractContextManager[None]:
        """Of a pass: where several cannot run at a time it waits for the others."""

    def array(self, values: Any) -> Any:
        """What lies on the host, where kernels read it."""

    def zeros(self, shape: Any, dtype: Any) -> Any: ...

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """Of each layer: keys and values, zeros."""

    def attention_scratch(self, model: Model, context: int) -> Any: ...

    def scratch(self, columns: int) -> Any:
        """Of products that take activations as they are."""

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """Of products that take activations in int8."""

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """Whole numbers where kernels read them: in `array`, or where they are already."""

    def position(self, value: int) -> Any:
        """The first position of a pass, as kernels take it."""

    def host(self, array: Any) -> Any:
        """What kernels have written, where Python reads it."""


def activations(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Zeros, where what is computed for a token is to lie.

    On a Zen 4 they begin 16 bytes behind a line of the cache: products of BF16 read weights from memory at 0.97 to
    0.99 of its bandwidth then, and at 0.65 where activations begin with a line; F16 at 0.94 to 0.98 and 0.91 to 0.95.
    """
    if not LOOKS_AHEAD:
        return np.zeros(shape, dtype)
    return line_aligned_zeros((shape,) if isinstance(shape, int) else shape, dtype, 16)


class Host:
    """The CPU, on some threads."""

    names_launches = False
    most_together = 128  # what they work on stays in the cache

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def check(self) -> None:
        """ComputeError in a fork of a process whose kernels have run on threads."""
        refuse_threads_of_fork(self._threads)

    def turn(self) -> AbstractContextManager[None]:
        """As `backends.turn` has it, where it runs on several threads."""
        return turn() if self._threads > 1 else nullcontext()

    def array(self, values: Any) -> Any:
        """It lies there."""
        return values

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """NumPy's, from where products of floats read them soonest."""
        return activations(shape, dtype)

    def caches(self, layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
        """As attention has them."""
        return attention.caches_of_layers(layers, kv_heads, context, head_dim, dtype)

    def attention_scratch(self, model: Model, context: int) -> Any:
        """Of each thread."""
        return attention.scratch_for(self._threads, model.head_dim)

    def scratch(self, columns: int) -> Any:
        """A row for each thread."""
        return np.zeros((self._threads, columns), np.float32)

    def int8_scratch(self, model: Model, tokens: int, columns: int) -> Any:
        """As Int8Scratch has it."""
        return Int8Scratch.of(tokens, columns, self._threads)

    def put(self, array: Any, values: Sequence[int]) -> Any:
        """In place."""
        array[:] = values
        return array

    def position(self, value: int) -> Any:
        """A whole number."""
        return value

    def host(self, array: Any) -> Any:
        """It lies there."""
        return array
