"""The class of a kernel. A kernel has a reference, a fast version, its work and example inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbtop.compute.contracts import Contract
from cbtop.compute.cuda.launches import CudaKernel

FLOAT_BYTES = 4  # bytes of a float32, which is the type of all activations and norms

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The operations and bytes of one call with n elements, each as per_call + n * per_element.

    `dtype` is the type that the kernel multiplies.
    """

    flops_per_call: float = 0.0
    flops_per_element: float = 0.0
    bytes_per_call: float = 0.0
    bytes_per_element: float = 0.0
    dtype: str = "float32"


def everything(arguments: Arguments, turn: int) -> Arguments:
    """Return all arguments unchanged, because the reference is fast enough to compute all outputs."""
    return arguments


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation. `reference` (in NumPy) defines the result, and `implementation` (in Numba) computes it.

    Both take the same arguments, and write to the arguments at the positions `outputs`. They return and allocate
    nothing.

    - `work` computes the KernelWork from shapes. Its parameters depend on the kernel.
    - `contract`: the conditions before and after a call, and how far the two versions may differ, in float32.
    - `examples` makes arguments with about `size` elements per dimension.
    - `narrow` reduces arguments to fewer rows, so that the reference is quick. Its parameter `turn` selects the rows.
    - `parallel`: whether the kernel may use all threads of the backend. Other kernels run on one thread.
    - `parts`: the kernels that a fused kernel consists of, in order, each with its arguments.
    - `by_token`: positions of the arguments that have a row for each token. Empty if tokens cannot be computed one by
      one.
    - `cuda`: the version for a GPU, or None.
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
        """Yield the arguments of single-token calls, as views. There is one call per token."""
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
    """Return the arguments of a call, with copies of the arguments at the indices `places`."""
    copied = list(arguments)
    for place in places:
        copied[place] = copied[place].copy()
    return tuple(copied)


def check_floats(x: Any) -> None:
    """Raise ValueError if `x` is not float32, because vectorised code would misinterpret its bytes."""
    if x.dtype != np.float32:
        raise ValueError(f"activations are {x.dtype}; float32 are wanted: give x.astype(np.float32)")


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return random float32 numbers of a normal distribution, for examples."""
    return rng.standard_normal(shape, dtype=np.float32)
