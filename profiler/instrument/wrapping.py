"""Timing the calls of a module without a hook and without touching its `forward`.

`torch.nn.Module.__call__` calls what `_compiled_call_impl` of the module is, if it is anything. There stands a `Call`
while steps are recorded, and what stood there before while they are not.

Rules
- The attribute is torch's, and private, see `call_attribute`.
- `Module.__getstate__` leaves it out. Where a class has one of its own, a copy or a pickle of a `Call` is None:
  a copy of a module that called the original's weights would be wrong without a word. What nn.DataParallel makes of
  a module's `__dict__` is made to call its own (`as_without_us`).
- A `Call` holds its module weakly, so that `del model` frees it, and nothing that changes.
- Dynamo goes past the attribute to `forward`. Where it comes here all the same, that is the first question; a frame
  of ours it never compiles for itself (`keep_dynamo_out`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument.call_attribute import ATTRIBUTE
from cbtop.profiler.instrument.capturing import Capture, capture_here
from cbtop.protocol.signals import let_through

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.path import Path


def is_symbolic() -> bool:
    """Whether calls are traced into a graph, or run on tensors without contents: their times are none of a model."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any([torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY)])


def is_compiled(module: nn.Module) -> bool:
    """Whether Dynamo has compiled the call of `module` before, by whatever way it got there."""
    there = _there(module)
    if hasattr(module, "_orig_mod") or (there is not None and not isinstance(there, Call)):
        return True
    forward = getattr(type(module), "forward", None)  # a scripted module's class has none
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and bool(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


class Call:
    """Stands in for a module's call; what it does beside calling it, its kinds say.

    `instead` is what stood in the attribute before: the host's own `module.compile()`, or nothing.
    """

    __slots__ = ("__weakref__", "instead", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.instead: Any = module.__dict__.get(ATTRIBUTE)

    @property
    def is_gone(self) -> bool:
        """Whether the model that it is called for is no more, while another has the module."""
        return False

    def plain(self, /, *args: Any, **kwargs: Any) -> Any:
        """The module's call, as it is without us."""
        if self.instead is not None:
            return self.instead(*args, **kwargs)
        return self.module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]  # it is being called: it lives

    def swap_in(self) -> None:
        """Stand in from now on, also for what the host has put there since; not twice among several models' calls."""
        module = self.module()
        if module is not None:
            there = _there(module)
            if self not in _chain(there):
                while isinstance(there, Call) and there.is_gone:
                    there = there.instead
                self.instead = there
                _put(module, self)

    def swap_out(self) -> None:
        """Let stand there what would without us; but None, where it is ours, so that the class is not asked."""
        module = self.module()
        if module is None:
            return
        there = _there(module)
        if there is self:
            _put(module, self.instead)
            return
        for other in _chain(there):  # a module that several models share
            if other.instead is self:
                other.instead = self.instead

    def remove(self) -> None:
        """Leave no attribute behind."""
        self.swap_out()
        module = self.module()
        if module is not None:
            forget(module)

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # whoever reads the pickle needs nothing of ours


class SteadyCall(Call):
    """Stands in a module's attribute whether steps are recorded or not, and calls what otherwise would stand there.

    For modules whose class has a `__call__` of its own, as decoder layers of transformers 5.17: that calls torch's,
    which Dynamo then goes into, and where it finds another kind of attribute there it compiles anew.
    """

    __slots__ = ("stands",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stands: Any = self.instead

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.plain(*args, **kwargs)
        stands = self.stands
        if stands is not None:
            return stands(*args, **kwargs)
        return self.module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]  # it is being called: it lives

    def swap_in(self) -> None:
        """Stand there from now on, also for what the host has put there since."""
        module = self.module()
        if module is None:
            return
        there = module.__dict__.get(ATTRIBUTE)
        if isinstance(there, SteadyCall):
            return
        self.instead = _without_us(there)
        timed = _chain(self.stands)
        if timed and not isinstance(there, Call):
            timed[-1].instead = there
        else:
            self.stands = there
        module.__dict__[ATTRIBUTE] = self


def stand_steadily(module: nn.Module) -> None:
    """Let the attribute of `module` be of one kind from now on, where Dynamo looks at it."""
    if type(module).__call__ is not torch.nn.Module.__call__:
        SteadyCall(module).swap_in()


def _there(module: nn.Module) -> Any:
    """What stands in for a module's call now; None: nothing."""
    there = module.__dict__.get(ATTRIBUTE)
    return there.stands if isinstance(there, SteadyCall) else there


def _put(module: nn.Module, stands: Any) -> None:
    there = module.__dict__.get(ATTRIBUTE)
    if isinstance(there, SteadyCall):
        there.stands = stands
    else:
        module.__dict__[ATTRIBUTE] = stands


def _chain(there: object) -> list[Call]:
    """The calls of ours, of one model each, that stand in for a module: each calls the next."""
    found = []
    while isinstance(there, Call):
        found.append(there)
        there = there.instead
    return found


def _without_us(there: object) -> Any:
    """What would stand in where `there` does, were it not for us."""
    chain = _chain(there)
    return chain[-1].instead if chain else there


def as_without_us(replica: nn.Module) -> None:
    """Let stand in the attribute of a module that has another's attributes what would without us.

    Or None: the class is not asked.
    """
    replica.__dict__[ATTRIBUTE] = _without_us(replica.__dict__.get(ATTRIBUTE))


def forget(module: nn.Module) -> None:
    """Let the class be asked again, unless something of the host's stands there."""
    stands = _there(module)
    if stands is None:
        module.__dict__.pop(ATTRIBUTE, None)
    elif not isinstance(stands, Call):
        module.__dict__[ATTRIBUTE] = stands


class Timed(Protocol):
    """The steps of one model."""

    path: HotPath | Path
    model: str


class BrickCall(Call):
    """Times each call of its module as one brick or layer; its elements are those of the first tensor it is given.

    Only in steps of its model: another's, which shares the module, are timed by that one's call, and what runs in no
    step (a layer by itself, what a backward pass computes again) is part of no sample.
    On a compiled hot path calls are made in C, which does the same.
    """

    __slots__ = ("_key", "_model", "_path", "_start", "_steps", "_stop")

    def __init__(self, module: nn.Module, key: Hashable, steps: Timed) -> None:
        super().__init__(module)
        self._key = key
        self._model, self._path, self._steps = steps.model, steps.path, weakref.ref(steps)
        self._start, self._stop = steps.path.start_brick, steps.path.stop_brick

    @property
    def is_gone(self) -> bool:
        return self._steps() is None

    @property
    def key(self) -> Hashable:
        """Its brick, or layer."""
        return self._key

    def noted_by(self, capture: Capture) -> NotedCall | None:
        """What stands in for the module, too, while a graph is captured; None where that is no more."""
        module = self.module()
        return None if module is None else NotedCall(module, self._key, capture)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.plain(*args, **kwargs)
        step: Any = self._path.position.step
        if step is None or step.model != self._model:
            return self.plain(*args, **kwargs)
        timer = self._start(self._key)
        try:
            if self.instead is None:
                result = self.module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]
            else:
                result = self.instead(*args, **kwargs)
        except BaseException:
            self._stop(timer, 0, True)
            raise
        if timer is not None:
            self._stop(timer, elements_of(args, kwargs))
        return result


class NotedCall(Call):
    """Lets a capture note between which nodes of its graph the calls of a module lie."""

    __slots__ = ("_capture", "_key")

    def __init__(self, module: nn.Module, key: Hashable, capture: Capture) -> None:
        super().__init__(module)
        self._key, self._capture = key, capture

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or capture_here() is not self._capture:
            return self.plain(*args, **kwargs)
        capture, span = self._capture, None
        try:
            span = capture.begin(self._key, self.module())
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            capture.failed(error)
        result = self.plain(*args, **kwargs)
        try:
            capture.end(span, elements_of(args, kwargs))
        except Exception as error:  # noqa: BLE001 - as above
            capture.failed(error)
        return result


def elements_of(args: tuple[Any, ...], kwargs: dict[str, Any], failed: Exception | None = None) -> Any:
    """The elements of the first tensor among the arguments; 0 where there is none, and no number where it fails.

    `failed` is what it raised where it was asked before.
    """
    try:
        if failed is not None:
            raise failed
        for value in (*args, *kwargs.values()):
            if issubclass(type(value), Tensor):  # `isinstance` would ask objects of the host's what class they have
                return _count(value)
    except Exception as error:  # noqa: BLE001 - a tensor of the host's own kind: the call is timed, and not counted
        let_through(error)
        return error
    return 0


def _count(tensor: Tensor) -> int | None:
    """Its elements; None where they are a symbol. No `__torch_function__` of the host's sees that it was asked."""
    if torch._C._has_torch_function_unary(tensor):
        with torch._C.DisableTorchFunction():
            count = tensor.numel()
    else:
        count = tensor.numel()
    return count if isinstance(count, int) else None  # to make a symbol a number would bind it to that


if chosen() is not HotPath:
    from cbtop.profiler import _hot_path

    _hot_path.compile_module_calls(BrickCall, elements_of, Tensor, torch._C._has_torch_function_unary)
