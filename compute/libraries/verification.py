"""Verify a function of a library with its contract, on the CPU or the GPU: errors, planted faults, times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cbtop.compute.contracts.own import NO_BINDING, Drawn, OwnContract
from cbtop.compute.errors import ContractError
from cbtop.compute.libraries import is_installed
from cbtop.compute.own_bricks import OwnBrick, verify_brick
from cbtop.compute.own_contracts import EqualsReference, KeepsContract, in_order, inputs_of, on_host, resolved
from cbtop.compute.verification import Verified
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.vocabulary import BrickCategory

TIMED_CALLS = 7
GPU = "gpu"

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class LibraryCheck:
    """The result of one contract on one case, or the reason `skipped` why it was not checked.

    `function` is the bound one. `call_us` is the median time of one call in microseconds. The first call does not
    count. On a GPU it includes the wait for the result, and no copies.
    """

    domain: str
    function: str
    contract: str
    result: Verified | None = None
    call_us: float | None = None
    skipped: str = ""


def verify_library(domain: str, contract: OwnContract, backend: str) -> list[LibraryCheck]:
    """Return a result for each case of the contract. `backend`, cpu or gpu, selects the binding.

    The result is one skipped check if there is no binding or its library is not installed. Raises ContractError if an
    installed library lacks the function.
    """
    binding = contract.bindings[backend]
    if binding.startswith(NO_BINDING):
        return [LibraryCheck(domain, "", contract.name, skipped=binding.removeprefix(NO_BINDING))]
    if not is_installed(binding):
        skipped = f"{binding.partition(':')[0].partition('.')[0]} is not installed"
        return [LibraryCheck(domain, binding, contract.name, skipped=skipped)]
    function = bound(contract, resolved(binding))
    checks = EqualsReference(contract), KeepsContract(contract)
    call = _from_host(function) if backend == GPU else function
    brick = OwnBrick(binding, call, BrickDefinition(contract.name, BrickCategory.OTHER, checks=checks))
    given = [tuple(in_order(contract, inputs_of(contract, number))) for number in range(len(contract.cases))]
    names = [_named(case) for case in contract.cases]
    results = verify_brick(brick, zip(names, given, strict=True))
    times_us = [
        _time_us(function, arguments, backend) if one.passed else None
        for one, arguments in zip(results, given, strict=True)
    ]
    return [
        LibraryCheck(domain, binding, contract.name, one, call_us)
        for one, call_us in zip(results, times_us, strict=True)
    ]


def bound(contract: OwnContract, function: Call) -> Call:
    """Return `function` as the contract calls it: with the inputs, by way of `through` if there is one."""
    if not contract.through:
        return function
    through = resolved(contract.through)

    def call(*arguments: Any) -> Any:
        return through(function, *arguments)

    return call


def with_binding(contract: OwnContract, binding: str, backend: str = "cpu") -> OwnContract:
    """Return the contract with another function, `module:function`, in place of the binding for `backend`."""
    return replace(contract, bindings={**contract.bindings, backend: binding})


def require_gpu() -> None:
    """Raise ContractError if CuPy is not installed or finds no GPU."""
    try:
        import cupy

        found = cupy.cuda.is_available()
    except ImportError as error:
        raise ContractError(f"the functions of a GPU are CuPy's: {error}; pip install 'cbtop[cuda]'") from error
    if not found:
        raise ContractError("CuPy finds no NVIDIA GPU here; without --backend cuda the functions of the CPU run")


def _from_host(function: Call) -> Call:  # pragma: no cover - gpu
    """Return a function of NumPy's arrays that calls `function` with CuPy's, and copies the result back."""

    def call(*arguments: Any) -> Any:
        output = function(*map(_on_gpu, arguments))
        return tuple(map(on_host, output)) if isinstance(output, tuple | list) else on_host(output)

    return call


def _on_gpu(value: Any) -> Any:  # pragma: no cover - gpu
    import cupy

    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def _time_us(function: Call, arguments: Sequence[Any], backend: str) -> float:
    """Return the median time of TIMED_CALLS calls in microseconds. The verification made the first call."""
    wait: Call = lambda: None  # noqa: E731 - of a CPU
    if backend == GPU:  # pragma: no cover - gpu
        import cupy

        arguments, wait = [_on_gpu(one) for one in arguments], cupy.cuda.get_current_stream().synchronize
    times_us = []
    for _ in range(TIMED_CALLS):
        wait()
        begun_ns = time.perf_counter_ns()
        function(*arguments)
        wait()
        times_us.append((time.perf_counter_ns() - begun_ns) / 1000)
    return statistics.median(times_us)


def _named(case: Mapping[str, Drawn | float]) -> str:
    """Return the shapes and numbers of a case, such as `a 24×40, x 40`."""
    return ", ".join(
        f"{name} {'×'.join(map(str, value.shape)) if isinstance(value, Drawn) else value}"
        for name, value in case.items()
    )
