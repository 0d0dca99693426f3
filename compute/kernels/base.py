"""The form of a kernel: its reference, its fast version, its work, and example inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbtop.compute.contracts import Contract
from cbtop.compute.cuda.launches import CudaKernel

FLOAT_BYTES = 4  # all activations and norms are float32

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Operations and bytes of one call with n elements: per_call + n * per_element. `dtype`: the type that it
    multiplies."""

    flops_per_call: float = 0.0
    flops_per_element: float = 0.0
    bytes_per_call: float = 0.0
    bytes_per_element: float = 0.0
    dtype: str = "float32"


def everything(arguments: Arguments, turn: int) -> Arguments:
    """The `narrow` of a kernel with a reference cheap enough to run on all of its input."""
    return arguments


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation.

    `reference` (NumPy, the definition) and `implementation` (Numba) take the same arguments and write into those at
    the positions `outputs`; nothing is returned or allocated. `work` computes the KernelWork from shapes; its
    parameters are the kernel's own. `contract` says what holds before and after a call, and how far the two may
    differ, in float32. `examples` makes arguments of about `size` elements a dimension. `parallel` says whether it
    may use all threads of the backend; other kernels run on one. `narrow` reduces arguments to what the reference can
    do quickly: the same operation on fewer rows, different ones in each turn. `parts` gives the kernels that a fused
    kernel consists of, in order, each with its arguments.
    `cuda`: its version for a GPU, or None. `by_token` are the places of the arguments with a row for each token;
    empty if a token cannot be a call of its own.
    """

    name: str
    reference: Callable[..., None]
    implementation: Callable[..., None]
    work: Callable[..., KernelWork]
    outputs: tuple[int, ...]
    contract: Contract
    examples: Callable[[np.random.Generator, int], Arguments]
    narrow: Callable[[Arguments, int], Arguments] = everything
    parallel: bool = False
    parts: Callable[[Arguments], tuple[Part, ...]] | None = None
    by_token: tuple[int, ...] = ()
    cuda: CudaKernel | None = None

    def single_tokens(self, arguments: Arguments) -> Iterator[Arguments]:
        """Yield the arguments of a call for each token, as views."""
        names = self.contract.arguments
        start = names.index("start") if "start" in names else None
        for token in range(len(arguments[self.by_token[0]])):
            call = list(arguments)
            for place in self.by_token:
                call[place] = arguments[place][token : token + 1]
            if start is not None:
                call[start] += token
            yield tuple(call)


Part = tuple[Kernel, Arguments]


def with_copies(arguments: Arguments, places: Collection[int]) -> Arguments:
    """Return the arguments, with copies of those at `places`."""
    copied = list(arguments)
    for place in places:
        copied[place] = copied[place].copy()
    return tuple(copied)


def check_floats(x: Any) -> None:
    """Raise ValueError if `x` is not float32, because vector code would misread other numbers."""
    if x.dtype != np.float32:
        raise ValueError(f"activations are {x.dtype}; float32 are wanted: give x.astype(np.float32)")


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return normal random float32 of `shape`, for examples."""
    return rng.standard_normal(shape, dtype=np.float32)
