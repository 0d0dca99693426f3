"""Counts the operations (on a CPU) or allocations (on a GPU) in the first steps of each kind.

Rules
- Only the first COUNTED steps of a kind, which are warm-up steps, run anything here. The first one also prepares
  caches, so its counts are used only until there is a second.
- Operations are counted only if every step is recorded. A dispatch mode of torch counts them during the model's call.
  It does not see inside compiled and scripted code, so a process with such code has no counts.
- The mode is C code, because a Python frame of cbtop would appear in the traceback of a failing operation. So nothing
  is counted without the compiled hot path.
- Views of tensors compute nothing and are not counted.
"""

from __future__ import annotations

from _thread import get_ident
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument.module_tree import modules_of, parameters_of
from cbtop.profiler.instrument.torch_internals import (
    allocations_of,
    counting,
    dispatch_modes,
    is_compile_used,
    modes_of_host,
    without_torch_function,
)
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.instrument.wrapping import is_compiled
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.structure_messages import MAX_OPERATIONS, OperationCount, StepAllocations, StepOperations
from cbtop.protocol.vocabulary import WARM_UP

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.path import Path
    from cbtop.profiler.profiler import BrickProfiler
    from cbtop.profiler.steps import Steps

COUNTED = 3
Operation = tuple[int, str, str]  # an operation: its node, its name, and the number type of its first result
Kind = tuple[str, str]  # phase and model


_modes_askers: list[Callable[[Callable[[], int]], object]] = []


def ask_for_modes(ask_by: Callable[[Callable[[], int]], object]) -> None:
    """Register `ask_by`, which sets the function that tells compiled code how many dispatch modes the host has.

    Usually this is a function of torch. While operations are counted, it is a Python function that leaves out cbtop's
    own mode. So steps that are not counted run no Python code for this.
    """
    _modes_askers.append(ask_by)
    ask_by(dispatch_modes)


class CountedModel(Protocol):
    """The parts of a model's steps that counting uses."""

    model: str
    path: HotPath | Path
    profiler: BrickProfiler
    profiler_steps: Steps
    root: Callable[[], nn.Module | None]


class StepContents:
    """The counts of operations or allocations in the steps of one model, by kind of step."""

    def __init__(self, steps: CountedModel) -> None:
        self._steps = steps
        self._operations: dict[Kind, list[Counter[Operation]]] = {}
        self._allocations: dict[Kind, list[int]] = {}

    def begin(self, name: str, *, is_recorded: bool) -> CountedStep | None:
        """Begin to count in the step called `name`, which begins now in this thread. Returns None if this step is not
        counted.
        """
        if not name.endswith(WARM_UP):
            return None
        kind = name.removesuffix(WARM_UP), self._steps.model
        if len(self._operations.get(kind, ())) >= COUNTED or len(self._allocations.get(kind, ())) >= COUNTED:
            return None
        root = self._steps.root()
        devices = set() if root is None else self._devices(root)
        if root is None or len(devices) != 1:
            return None
        (device,) = devices
        if device.type == "cuda":
            return CountedAllocations(device.index or 0, lambda count: self._allocated(kind, count))
        is_every = self._steps.profiler_steps.governor is None
        if device.type != "cpu" or not (is_every and is_recorded) or dispatch_modes() or _has_compiled(root):
            return None
        if chosen() is HotPath:
            return None
        return CountedOperations(self._steps, lambda counts: self._ran(kind, counts))

    @staticmethod
    def _devices(root: nn.Module) -> set[torch.device]:
        with without_torch_function():  # hides these reads from the host's function modes
            return {weight.device for weight in parameters_of(root)}

    def _ran(self, kind: Kind, counts: Counter[Operation]) -> None:
        steps = self._operations.setdefault(kind, [])
        steps.append(counts)
        steady = steps[1:] or steps
        operations = list(dict.fromkeys(one for step in steady for one in step))
        if len(operations) > MAX_OPERATIONS:
            return
        found = [
            OperationCount(*one, min(step[one] for step in steady), max(step[one] for step in steady))
            for one in operations
        ]
        self._steps.profiler.announce(StepOperations(*kind, len(steady), tuple(found)))

    def _allocated(self, kind: Kind, count: int) -> None:
        steps = self._allocations.setdefault(kind, [])
        steps.append(count)
        steady = steps[1:] or steps
        self._steps.profiler.announce(StepAllocations(*kind, len(steady), min(steady), max(steady)))


class CountedAllocations:
    """Counts how often memory of the GPU `device` is allocated in one step."""

    def __init__(self, device: int, ended: Callable[[int], None]) -> None:
        self._device = device
        self._ended = ended
        self._before = allocations_of(device)

    def end_step(self) -> None:
        """Stop counting, because the model's call has returned."""
        self._ended(max(0, allocations_of(self._device) - self._before))


class CountedOperations:
    """Counts the operations that one thread runs in one step."""

    def __init__(self, steps: CountedModel, ended: Callable[[Counter[Operation]], None]) -> None:
        self._ended = ended
        self._counts: Counter[Operation] = Counter()
        self._mode = _CountingMode(steps, self._counts)
        self._mode.__enter__()
        counting.add(get_ident())
        for ask_by in _modes_askers:
            ask_by(modes_of_host)

    def end_step(self) -> None:
        """Stop counting, because the model's call has returned."""
        counting.discard(get_ident())
        for ask_by in _modes_askers if not counting else ():
            ask_by(dispatch_modes)
        self._mode.__exit__(None, None, None)
        if not (self._mode.has_failed or is_compile_used()):
            self._ended(self._counts)


CountedStep = CountedAllocations | CountedOperations


class _CountingMode(TorchDispatchMode):  # type: ignore[misc]  # torch declares no type for this class
    """A mode of torch that counts a thread's operations. They run unchanged."""

    # Without this attribute, torch raises an error if the host calls a higher-order operator.
    supports_higher_order_operators = True

    def __init__(self, steps: CountedModel, counts: Counter[Operation]) -> None:
        from cbtop.profiler import _hot_path

        super().__init__()
        self.__torch_dispatch__ = _hot_path.count_operations(self)
        self._path = steps.path
        self._counts = counts
        self.has_failed = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile as usual. Without this, it would never compile code that is first called in this
        mode.
        """
        return True

    def ran(self, operation: Any, result: Any) -> None:
        """Count `operation`, which has returned `result`."""
        try:
            # A higher-order operation has no attribute `is_view`. It is not a view.
            if not getattr(operation, "is_view", False) and operation.name() != "aten::_unsafe_view":
                scope: Any = self._path.position.scope
                self._counts[max(NO_NODE, int(scope.node)), _name_of(operation), _dtype_of(result)] += 1
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.has_failed = True
            log_own_error(error, "the operations of a step are not known")


def _name_of(func: Any) -> str:
    """Return the short name of an operation: `add` for `aten::add.Tensor`. Names of other libraries keep their
    prefix.
    """
    return str(func.name()).partition(".")[0].removeprefix("aten::")


def _dtype_of(result: Any) -> str:
    first = result[0] if isinstance(result, tuple | list) and result else result
    return str(first.dtype).removeprefix("torch.") if isinstance(first, torch.Tensor) else ""


def _has_compiled(root: nn.Module) -> bool:
    """Return whether the process has used `torch.compile`, or the model has scripted parts."""
    if is_compile_used():
        return True
    return any([isinstance(module, torch.jit.ScriptModule) or is_compiled(module) for module in modules_of(root)])
