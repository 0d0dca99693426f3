"""Finds which axis of a model's input has the sequences, if a module inside has `batch_first=False`.

Some programs keep their data in the order (tokens, sequences), and others transpose it inside the model. Only a call
tells them apart: the first such module of torch gets the shape of the model's input, or the transposed one.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.call_attribute import arguments_of_call
from cbtop.profiler.instrument.module_tree import attributes_of, modules_of
from cbtop.profiler.instrument.phases import first_tensor
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.instrument.wrapping import CallWrapper

# The modules of torch whose first argument has the order (tokens, sequences, features) if `batch_first` is False.
_MODULES = "torch.nn.modules.rnn", "torch.nn.modules.transformer", "torch.nn.modules.activation"
MAX_CALLS = 16  # If sequences and tokens are equally many in all of these calls, the axis stays unknown.


class HasAxis(Protocol):
    """The call of a model, which learns the axis of its sequences."""

    module: Any

    def set_axis(self, axis: int) -> None:
        """Set which axis of the input has the sequences."""


def find_axis(call: HasAxis) -> None:
    """Look at the next calls of a module inside the model of `call`, until one tells the axis of the sequences."""
    root = call.module()
    for module in modules_of(root):
        if module is not root and type(module).__module__ in _MODULES and _is_sequence_first(module):
            _Looking(module, call).swap_in()
            return


def axis_from(outer: Tensor | None, inner: Tensor | None) -> int | None:
    """Return the axis of sequences in a model's input `outer`, or None if it is unknown.

    `inner` is the input of a module inside, of shape (tokens, sequences, features).
    """
    if outer is None or inner is None or outer.dim() < 2 or inner.dim() != 3:
        return None
    shape, inside = tuple(outer.shape[:2]), tuple(inner.shape[:2])
    if shape[0] == shape[1] or inside not in (shape, shape[::-1]):
        return None
    return 1 if inside == shape else 0


class _Looking(CallWrapper):
    """Looks at the arguments of a module and of the model around it, and then removes itself."""

    __slots__ = ("_calls", "_of")

    def __init__(self, module: nn.Module, call: HasAxis) -> None:
        super().__init__(module)
        self._of = weakref.ref(call)
        self._calls = 0

    @property
    def is_gone(self) -> bool:
        return self._of() is None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            try:
                with without_torch_function():
                    self._look(args, kwargs)
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "the number of sequences is not shown")
                self.swap_out()
        return self.plain(*args, **kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._of()
        root = None if call is None else call.module()
        given = None if root is None else arguments_of_call(root)
        self._calls += given is not None
        axis = None if given is None else axis_from(first_tensor(*given), first_tensor(args, kwargs))
        if call is not None and axis is not None:
            call.set_axis(axis)
        if call is None or axis is not None or self._calls >= MAX_CALLS:
            self.swap_out()


def _is_sequence_first(module: nn.Module) -> bool:
    flags = attributes_of(modules_of(module), "batch_first")
    return False in flags and True not in flags
