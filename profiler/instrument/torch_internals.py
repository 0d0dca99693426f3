"""The private names of torch that the instrumentation uses. Checked with torch 2.11 and 2.13.

Some private names are in other files: in hot code, because this saves a function call, and in `call_attribute`,
because every process with torch loads that file. A build of torch without CUDA lacks some names, so these are read
inside functions.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_ident
from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import _C, Tensor, _foreach_norm, cuda, nn, optim
from torch._C import (
    DisableTorchFunction,
    _DisableTorchDispatch,
    _get_dispatch_mode,
    _has_torch_function_unary,
    _is_tracing,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack

#: A context that hides cbtop's calls from the host's `__torch_function__`: `with without_torch_function():`.
without_torch_function = DisableTorchFunction
#: Returns whether a tensor's class overrides `__torch_function__`.
has_torch_function = _has_torch_function_unary
#: A context in which no `__torch_dispatch__` mode sees operations: `with without_dispatch():`.
without_dispatch = _DisableTorchDispatch
#: Returns the transform of functorch (such as `vmap`) that is running in this thread, or None.
_transform: Callable[[], object] = peek_interpreter_stack
#: Returns whether `torch.jit.trace` is running.
is_tracing = _is_tracing
#: Returns the number of active `__torch_dispatch__` modes.
dispatch_modes = _len_torch_dispatch_stack
#: Returns the active dispatch mode with the given key (see SYMBOLIC_MODES), or None.
dispatch_mode = _get_dispatch_mode
# : : The keys of two sorts of modes: modes in which tensors have no contents, and the mode of `make_fx`, which
# traces.
SYMBOLIC_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY)

#: Returns torch's precision setting for float32, by backend and operator. It is None in torch before 2.9.
precision_of_float32: Callable[[str, str], str] | None = getattr(_C, "_get_fp32_precision_getter", None)

#: Return the children, parameters or buffers of one module, by name. They are C functions, fast enough for thousands
#: of modules.
submodules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")

#: Returns how often a tensor was changed in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")

#: Returns the norm of each tensor of a list: `foreach_norm(tensors, order, dtype=...)`.
foreach_norm: Callable[..., list[Tensor]] = _foreach_norm
#: Returns whether torch's profiler records the operations of this thread.
is_profiled: Callable[[], bool] = _profiler_enabled


counting: set[int] = set()  # ids of the threads in which cbtop's own mode counts operations


def child_named(module: nn.Module, name: str) -> nn.Module | None:
    """Return the child `name` of `module`, or None. The children of a scripted or traced module have no `get`."""
    children = submodules(module)
    return children[name] if name in children else None  # noqa: SIM401 - see above


def modes_of_host() -> int:
    """Return the number of active `__torch_dispatch__` modes, without cbtop's own."""
    modes = int(dispatch_modes())
    return modes - 1 if counting and get_ident() in counting else modes


def is_transforming() -> bool:
    """Return whether a transform of functorch (such as `vmap` or `grad`) runs in this thread."""
    return _transform() is not None


def compiled_versions(code: CodeType) -> list[Any]:
    """Return Dynamo's cache entries for `code`, one for each compiled version."""
    return list(_C._dynamo.eval_frame._debug_get_cache_entry_list(code))


def is_compile_used() -> bool:
    """Return whether this process has called `torch.compile`. Also True if torch does not tell."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)
    return backends is None or any([backend is not None for backend in backends.values()])


# --- optimizers -------------------------------------------------------------------------------------------------


def has_made_optimizer() -> bool:
    """Return whether the process has made an optimizer.

    torch wraps `step` of an optimizer's class when the first optimizer is made.
    """
    kinds: list[type] = [optim.Optimizer]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
    return False


# --- CUDA -------------------------------------------------------------------------------------------------------


def is_in_bad_fork() -> bool:
    """Whether this process cannot use CUDA, because it is a fork of a process that uses CUDA."""
    return bool(cuda._is_in_bad_fork())


def allocations_of(device: int) -> int:
    """Return how often torch has allocated memory on the CUDA device `device` in this process."""
    return int(memory_of(device)["allocation"]["all"]["allocated"])


def memory_of(device: int) -> dict[str, Any]:
    """Return the counters of torch's allocator for the CUDA device `device` in this process."""
    found: dict[str, Any] = _C._cuda_memoryStats(device)
    return found


def current_device() -> int:
    """Return the index of the caller's current CUDA device, without making a context."""
    return int(_C._cuda_getDevice())


def is_stream_captured() -> bool:
    """Whether the caller's current stream is being captured into a graph."""
    return bool(stream_functions()[0]())


def raw_stream_of(index: int) -> Callable[[], int]:
    """Return a C function that returns the caller's current stream on the CUDA device `index`."""
    return functools.partial(stream_functions()[1], index)


def stream_functions() -> tuple[Callable[[], bool], Callable[[int], int]]:
    """Return two C functions. One tells whether the current stream is being captured, the other returns the current
    stream of a given device.
    """
    return _C._cuda_isCurrentStreamCapturing, _C._cuda_getCurrentRawStream


def device_exchange() -> tuple[Callable[[int], int], Callable[[int], int]]:
    """Return two C functions. The first makes a device current and returns the previous one. The second restores
    it.
    """
    return _C._cuda_exchangeDevice, _C._cuda_maybeExchangeDevice
