"""Times the calls of a module. The module gets no hook and does not change.

In recorded steps, the table of call_attribute.py has a `CallWrapper`, which torch calls instead of the module. In
other steps, torch calls the host's replacement, or else the module.

Rules
- A `CallWrapper` refers to its module weakly, so that `del model` frees it.
- Dynamo traces `forward` without reading the attribute. If it traces a `CallWrapper` after all, the wrapper sees that
  Dynamo is compiling and times nothing. Dynamo never compiles cbtop's frames (`keep_dynamo_out`).
"""

from __future__ import annotations

import inspect
import weakref
from _thread import get_ident
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument.call_attribute import forget, of_host, plain_call, put, standing
from cbtop.profiler.instrument.capturing import Capture, captures
from cbtop.profiler.instrument.torch_internals import (
    SYMBOLIC_MODES,
    compiled_versions,
    dispatch_mode,
    dispatch_modes,
    has_torch_function,
    submodules,
    without_torch_function,
)
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol.signals import reraise_host_error

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.path import Path


KeyIn = Callable[[Any, Any, Any], Hashable]  # (reference to the module, mode, image size) -> brick
# At most this many bricks of one module. A convolution has a brick for each size of its images. For further sizes,
# its work is unknown.
MAX_KEYS = 64


def is_symbolic() -> bool:
    """Return whether calls are traced into a graph, or run on tensors without contents. These are not timed."""
    if not dispatch_modes():
        return False
    return any([dispatch_mode(key) is not None for key in SYMBOLIC_MODES])


def is_compiled(module: nn.Module) -> bool:
    """Whether Dynamo has compiled the call of `module`, or will compile it."""
    if "_orig_mod" in submodules(module) or of_host(module) is not None:
        return True
    forward = getattr(type(module), "forward", None)  # the class of a scripted module does not have this attribute
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and bool(compiled_versions(code))


class CallWrapper:
    """Is called instead of a module. Subclasses add work before and after the call.

    `instead` is what the wrapper calls: the wrapper of another model, or a callable that `module.compile()` has set.
    None: the module itself.
    """

    __slots__ = ("__weakref__", "instead", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.instead: Any = of_host(module)

    @property
    def is_gone(self) -> bool:
        """Whether this wrapper's model was freed. The module may still exist in another model."""
        return False

    def plain(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module as torch would do without cbtop."""
        instead = self.instead  # read it only once, because another thread may change it
        if instead is not None:
            return instead(*args, **kwargs)
        return self.module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]  # alive while it is called

    def swap_in(self) -> None:
        """Start replacing the module's call, unless it is replaced already."""
        module = self.module()
        if module is not None:
            there = standing(module)
            if there is None:
                self.instead = of_host(module)
                put(module, self)
            elif there is not self and self not in _chain(there):
                while isinstance(there, CallWrapper) and there.is_gone:
                    there = there.instead
                self.instead = there
                put(module, self)

    def swap_out(self) -> None:
        """Stop replacing the module's call."""
        module = self.module()
        if module is None:
            return
        there = standing(module)
        if there is self:
            put(module, self.instead if isinstance(self.instead, CallWrapper) else None)
            return
        for other in _chain(there):  # several models share this module, and each has a wrapper for it
            if other.instead is self:
                other.instead = self.instead

    def remove(self) -> None:
        """Stop replacing the module's call. Its next call is reported as a first call."""
        self.swap_out()
        module = self.module()
        if module is not None and standing(module) is None:
            forget(module)


def _chain(there: object) -> list[CallWrapper]:
    """Return `there` and the wrappers that it calls. Each model has one wrapper for the module."""
    found = []
    while isinstance(there, CallWrapper):
        found.append(there)
        there = there.instead
    return found


def follow_host(module: nn.Module) -> None:
    """Make the last wrapper of `module` call the value that the host has now set."""
    chain = _chain(standing(module))
    if chain:
        chain[-1].instead = of_host(module)


class TimedSteps(Protocol):
    """The parts of a model's steps that the wrappers use."""

    path: HotPath | Path
    model: str


class BrickCall(CallWrapper):
    """Times each call of a module as one brick or layer, and counts the elements of its first tensor argument.

    If `asks` is set, it is called before the module. `key_in` returns the brick for a mode (autocast and adapters),
    because the mode decides which number type is multiplied. Without `key_in`, the brick is always the same.

    Only calls in steps of this wrapper's model are timed. If models share the module, each model's wrapper times the
    calls in its steps. Calls outside of steps are not timed (a layer by itself, a recomputation in a backward). If
    the hot path is compiled, C code does the same.
    """

    __slots__ = (
        "_key",
        "_key_in",
        "_keys",
        "_mode",
        "_model",
        "_path",
        "_steps",
        "asks",
        "may_be_first",
    )

    def __init__(
        self, module: nn.Module, key: Hashable, steps: TimedSteps, key_in: KeyIn | None = None, mode: Hashable = None
    ) -> None:
        # The same as CallWrapper.__init__, written out because attaching makes thousands of wrappers.
        self.module = weakref.ref(module)
        self.instead = of_host(module)
        self._key = key
        self._key_in = key_in
        self._mode = mode
        # (mode, size) -> key of the brick. None if there is only one key. `key_in` keeps these keys alive, so C code
        # may borrow references to them.
        self._keys: dict[Hashable, Hashable] | None = None
        self.asks: Callable[[], None] | None = None
        self.may_be_first = False  # whether this may be the first matrix product in a step
        self._model, self._path, self._steps = steps.model, steps.path, weakref.ref(steps)

    @property
    def is_gone(self) -> bool:
        return self._steps() is None

    @property
    def key(self) -> Hashable:
        """The brick or layer under which the calls are recorded."""
        return self._key

    def follow(self, mode: Hashable) -> None:
        """Use the brick for `mode` from now on."""
        if self._key_in is not None:
            if self._keys is not None and len(self._keys) >= MAX_KEYS:
                self._keys.clear()
            self._key = self._known_key(mode, None)

    def _known_key(self, mode: Hashable, size: Hashable) -> Hashable:
        if self._keys is None:
            self._keys = {(self._mode, None): self._key}
        found = self._keys.get((mode, size))
        if found is None:
            assert self._key_in is not None
            found = self._keys[mode, size] = self._key_in(self.module, mode, size)
        return found

    def _key_of(self, args: Any, kwargs: Any) -> Hashable:
        """Return the brick of a call, which may depend on the sizes of the arguments."""
        return self._key

    def noted_by(self, capture: Capture) -> NotedCall | None:
        """Return a wrapper that records the module's calls in `capture`. None if the module was freed."""
        module = self.module()
        return None if module is None else NotedCall(module, self._key, capture)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.plain(*args, **kwargs)
        timer = None
        try:
            step: Any = self._path.position.step
            if step is not None and step.model == self._model:
                if self.asks is not None:
                    self.asks()
                timer = self._path.start_brick(self._key_of(args, kwargs))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "some calls are not timed")
        if timer is None:
            return self.plain(*args, **kwargs)
        try:
            result = self.plain(*args, **kwargs)
        except BaseException:
            self._path.stop_brick(timer, 0, True)
            raise
        try:
            self._path.stop_brick(timer, elements_of(args, kwargs))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "some calls are not timed")
        return result


class SizedCall(BrickCall):
    """Times each call of a convolution. Its work depends on the size of the image."""

    __slots__ = ("_axes", "_image_mode")

    def __init__(self, module: nn.Module, key: Hashable, steps: TimedSteps, key_in: KeyIn, axes: int) -> None:
        super().__init__(module, key, steps, key_in)
        self._axes = axes
        self._image_mode: Hashable = None

    def follow(self, mode: Hashable) -> None:
        # Only a call tells the size of the image. So _key_of applies the mode at each call.
        self._image_mode = mode

    # The compiled method ignores the size of the image, so always use the Python method.
    __call__ = BrickCall.__call__

    def _key_of(self, args: Any, kwargs: Any) -> Hashable:
        image = args[0] if args else kwargs.get("input")
        if not issubclass(type(image), Tensor) or is_symbolic():
            return self._key
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            size = tuple(image.shape[-self._axes :])
        keys = self._keys or {}
        is_new = (self._image_mode, size) not in keys
        return self._key if is_new and len(keys) >= MAX_KEYS else self._known_key(self._image_mode, size)


class NotedCall(CallWrapper):
    """Records the calls of a module in a `Capture`."""

    __slots__ = ("_capture", "_key")

    def __init__(self, module: nn.Module, key: Hashable, capture: Capture) -> None:
        super().__init__(module)
        self._key, self._capture = key, capture

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        capture, span = self._capture, None
        if is_dynamo_compiling() or captures.get(get_ident()) is not capture:
            return self.plain(*args, **kwargs)
        module, instead = self.module(), self.instead
        try:
            span = capture.begin(self._key, module)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)
        try:
            # the same as `plain`, but without its frame
            result = (plain_call(module) if instead is None else instead)(*args, **kwargs)
        # The module may raise an exception. For example, checkpointing ends a recomputed forward pass early by an
        # exception.
        except BaseException:
            self._end(span, 0)
            raise
        try:
            capture.returned(span, result)
            capture.end(span, elements_of(args, kwargs))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)
        return result

    def _end(self, span: Any, elements: Any) -> None:
        capture = self._capture
        try:
            capture.end(span, elements)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            capture.failed(error)


def elements_of(args: tuple[Any, ...], kwargs: dict[str, Any], failed: Exception | None = None) -> Any:
    """Return the number of elements of the first tensor among the arguments, or 0 without one.

    If they cannot be read, returns the exception. `failed` is the exception of an earlier attempt in C, if any.
    """
    try:
        if failed is not None:
            raise failed
        for value in args if not kwargs else (*args, *kwargs.values()):
            if issubclass(type(value), Tensor):  # compare types, because `isinstance` may run the host's `__class__`
                return _count(value)
    except Exception as error:  # noqa: BLE001 - a tensor class of the host: the call is timed without its elements
        reraise_host_error(error)
        return error
    return 0


def _count(tensor: Tensor) -> int | None:
    """Return the number of elements of a tensor, or None if it is symbolic. Runs no `__torch_function__` of the
    host.
    """
    if has_torch_function(tensor):
        with without_torch_function():
            count = tensor.numel()
    else:
        count = tensor.numel()
    return count if isinstance(count, int) else None  # converting a symbolic number to int would fix its value


if chosen() is not HotPath:
    from cbtop.profiler import _hot_path

    _hot_path.compile_module_calls(BrickCall, elements_of, Tensor, has_torch_function)
