"""The private names of torch that the instrumentation uses, each named once. Checked with torch 2.11 and 2.13.

A few more are named where they are called, because a function in between would cost each call, and in
`call_attribute`, which processes load that call no module. What a build without CUDA lacks is read when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import _C, Tensor, cuda, nn
from torch._C import (
    DisableTorchFunction,
    _get_dispatch_mode,
    _has_torch_function_unary,
    _is_tracing,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)

#: `with without_torch_function():` the host's `__torch_function__` does not see our calls.
without_torch_function = DisableTorchFunction
#: Whether a tensor's class has a `__torch_function__` of the host's.
has_torch_function = _has_torch_function_unary
#: Whether `torch.jit.trace` runs.
is_tracing = _is_tracing
#: The number of `__torch_dispatch__` modes that are active.
dispatch_modes = _len_torch_dispatch_stack
#: Returns the active mode of one of the keys below, or None.
dispatch_mode = _get_dispatch_mode
#: The keys of the modes in which tensors have no contents, or are traced by `make_fx`.
SYMBOLIC_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY)

#: Returns the precision of float32 by backend and operator; None in a torch before 2.9.
precision_of_float32: Callable[[str, str], str] | None = getattr(_C, "_get_fp32_precision_getter", None)

#: Return what a module itself holds, by name: a C function, so that walking thousands of modules stays fast.
submodules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")

#: Returns how often a tensor was changed in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def compiled_versions(code: CodeType) -> list[Any]:
    """Return what Dynamo has compiled of `code`."""
    return list(_C._dynamo.eval_frame._debug_get_cache_entry_list(code))


# --- CUDA -------------------------------------------------------------------------------------------------------


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that uses CUDA, and so cannot use it."""
    return bool(cuda._is_in_bad_fork())


def current_device() -> int:
    """Return the index of the caller's CUDA device, without making a context."""
    return int(_C._cuda_getDevice())


def is_stream_captured() -> bool:
    """Whether the caller's current stream is captured into a graph."""
    return bool(stream_functions()[0]())


def raw_stream_of(index: int) -> Callable[[], int]:
    """Return a C function that returns the caller's current stream on the device `index`."""
    return functools.partial(stream_functions()[1], index)


def stream_functions() -> tuple[Callable[[], bool], Callable[[int], int]]:
    """Return the C functions that tell whether the current stream is captured, and the current stream of a device."""
    return _C._cuda_isCurrentStreamCapturing, _C._cuda_getCurrentRawStream


def device_exchange() -> tuple[Callable[[int], int], Callable[[int], int]]:
    """Return two C functions: one makes a device current and returns the previous one, the other restores it."""
    return _C._cuda_exchangeDevice, _C._cuda_maybeExchangeDevice
