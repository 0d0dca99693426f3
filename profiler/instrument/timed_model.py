"""Puts in place and removes the wrappers that time a model's modules. Also checks whether the model has changed.

Rules
- The wrappers are put in place when a recorded step begins, and removed when a step begins that is not recorded.
- Only recorded steps check whether the model, its autocast or its adapters have changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import get_autocast_dtype, is_autocast_enabled

from cbtop.profiler.instrument.adapters import active_adapters, state_of_adapters
from cbtop.profiler.instrument.eager_stamps import Timing
from cbtop.profiler.instrument.kernel_bursts import bursts_of
from cbtop.profiler.instrument.module_tree import dictionary_of, first_trained
from cbtop.profiler.instrument.multiplied import AUTOCAST_DEVICES, Mode
from cbtop.profiler.instrument.step_contents import StepContents
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.torch_internals import (
    child_named,
    has_made_optimizer,
    version_of,
    without_torch_function,
)
from cbtop.profiler.instrument.wrapping import BrickCall
from cbtop.protocol.messages import Training

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.definitions import OwnOperations
    from cbtop.profiler.hot_path import HotPath
    from cbtop.profiler.instrument.guard import Guard
    from cbtop.profiler.instrument.kernel_steps import KernelSteps
    from cbtop.profiler.path import Path
    from cbtop.profiler.profiler import BrickProfiler

# One recorded step in this many checks the model for changes. A check takes as long as timing all modules.
LOOK_EVERY = 8
MAX_ADAPTERS = 8  # the steps of this many different adapters have a phase each
MOST_FIRST_FORWARDS = 64  # at most this many calls are taken for forward passes of the first training step
MODULES_PER_STEP = 200  # number of modules that a recorded step checks on average; this takes 0.3 ms


class TimedModel(ABC):
    """The timed modules of one model, and the object that times them."""

    __slots__ = (
        "__weakref__",
        "_adapted",
        "_adapters",
        "_asked",
        "_device",
        "_first_forwards",
        "backwards",
        "bursts",
        "calls",
        "calls_are_in",
        "changed",
        "contents",
        "follow_mode",
        "give_up",
        "guard",
        "in_python",
        "is_of_runner",
        "kernel_steps",
        "kernels_due_ns",
        "labelled",
        "look_every",
        "looks",
        "measured",
        "model",
        "named",
        "on_device",
        "own",
        "path",
        "profiler",
        "profiler_steps",
        "recorded_steps",
        "root",
        "takes_turns",
        "times",
        "timing",
        "training",
        "trains",
        "weight_version",
    )

    def __init__(
        self,
        profiler: BrickProfiler,
        model: str,
        changed: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self.profiler = profiler
        self.time_on(Timing(profiler.parts.paths.host))
        self.model: str = model  # mypy may read users of this attribute first
        self.changed = changed  # a function that plans the model again after changes
        self.give_up = give_up
        self.bursts = bursts_of(profiler)
        self.contents = StepContents(self)
        # records the kernels of some steps through CUPTI; None: not used
        self.kernel_steps: KernelSteps | None = None
        # When `kernel_steps` will record the next step, in ns of the host's clock. 0 means never. C code reads this.
        self.kernels_due_ns = 0
        self.calls: Sequence[BrickCall] = ()
        # The calls that name the kernels of captured graphs. They exist even if modules are not timed (see
        # `Plan.is_timed`) and `calls` is empty.
        self.named: Sequence[BrickCall] = ()
        self.guard: Guard | None = None  # looks for values that are not finite in recorded steps
        self.own: OwnOperations | None = None  # operations that the model runs outside of its children's calls
        self.training: Any = None  # the model's TrainingSteps, if an optimizer changes its weights
        self.backwards = 0  # number of backwards that gave the model gradients while the process had no optimizer
        self._first_forwards = 0  # number of calls that may have been forward passes of the first training step
        self.in_python = False  # whether Python handles the model's calls, although the hot path is compiled
        # True: calls of the model's runner are the steps; False: calls of the model itself
        self.is_of_runner = False
        self.on_device: dict[Hashable, Hashable] = {}  # a brick that the host times -> the same brick on the device
        # Called with a description of how the device's times are measured.
        self.measured: Callable[[str], None] = lambda how: None
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model
        # Called when autocast's type or the state of the adapters has changed since the last step, with both of them.
        self.follow_mode: Callable[[torch.dtype | None, object], None] = lambda autocast, adapters: None
        self._asked: tuple[torch.dtype | None, object] = (None, None)
        self._device = ""  # the device to check for autocast
        self._adapted: ref[nn.Module] | None = None  # the layer to check for changed adapters
        self.takes_turns = False  # whether the model has several adapters
        self._adapters: set[str] = set()  # the adapters of its steps; only used with several
        self.trains = False  # whether the process trains (it computes gradients between the model's steps)
        self.weight_version: int | None = None  # how often the first weight that requires a gradient was changed
        self.looks = 0  # number of recorded steps
        self.look_every = LOOK_EVERY  # one recorded step in this many checks the model for changes
        # Whether the wrappers that time calls are in place. None: perhaps only some.
        self.calls_are_in: bool | None = False
        self.recorded_steps: set[object] = set()  # the recorded steps that are running

    def time_on(self, timing: Timing) -> None:
        """From now on, time the model's steps and bricks by `timing`."""
        self.timing, self.labelled = timing.path, timing.labelled
        #: The path that times calls of modules and functions. It is the compiled object if the hot path is compiled.
        self.path: HotPath | Path = getattr(timing.path, "hot_path", timing.path)
        self.times = timing if timing.backend and not timing.by_kernels else self.path
        self.profiler_steps = self.profiler.parts.steps.on(timing.path)

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Stop showing this model after `error` in cbtop's code."""

    def follow(self, recorded: object | None) -> None:
        """Put the wrappers that time calls in place, because `recorded` is a recorded step.

        If `recorded` is None, remove them, unless a recorded step is still running.
        """
        if recorded is None and self.calls_are_in is False:
            return
        with swaps.lock:
            if recorded is not None:
                self.recorded_steps.add(recorded)
            elif self.recorded_steps:
                return
            if self.calls_are_in is (recorded is not None):
                return
            if recorded is None and self.timing.held_steps is not None:
                self.timing.held_steps.settle()
            self.calls_are_in = None
            if recorded is not None:
                swaps.swap_in(ref(self, swapped_in.pop), self.times)
                for call in self.calls:
                    call.swap_in()
                if self.guard is not None:
                    self.guard.swap_in()
            else:
                if self.guard is not None:
                    self.guard.swap_out()
                for call in self.calls:
                    call.swap_out()
                swaps.swap_out(ref(self))
            self.calls_are_in = recorded is not None

    def ask(self) -> None:
        """Choose the bricks of this step again if autocast or the adapters have changed.

        This takes 0.2 us (0.35 us under autocast), so it is done once per step and not for each brick.
        """
        try:
            device, autocast, adapters = self._device, None, None
            if device and is_autocast_enabled(device):
                autocast = get_autocast_dtype(device)
            if self._adapted is not None:
                layer = self._adapted()
                adapters = None if layer is None else state_of_adapters(layer)
            if (autocast, adapters) != self._asked:
                self._asked = autocast, adapters
                self.follow_mode(autocast, adapters)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self.failed(error)

    def ask_of(self, device: str, adapted: nn.Module | None, mode: Mode, *, takes_turns: bool) -> None:
        """From now on, check `device` for autocast, and the layer `adapted` for changed adapters. `mode` is their
        current state.

        If the model `takes_turns` with several adapters, Python handles its calls, because C code does not look at
        adapters.
        """
        self.takes_turns = takes_turns
        self.in_python |= takes_turns
        self._device = device if device in AUTOCAST_DEVICES else ""
        self._adapted = None if adapted is None else ref(adapted)
        self._asked = mode.autocast, mode.adapters

    def with_adapter(self, phase: str) -> str:
        """Return `phase` with the names of the step's adapters. For a model with several.

        After MAX_ADAPTERS different ones, all further ones share a phase, because phases are few.
        """
        layer = None if self._adapted is None else self._adapted()
        if layer is None:
            return phase
        name = active_adapters(layer)
        if name not in self._adapters:
            if len(self._adapters) >= MAX_ADAPTERS:
                return f"{phase}, other adapters"
            self._adapters.add(name)
        return f"{phase}, {name}"

    def look_through(self, modules: int) -> None:
        """Set how often the model is checked for changes.

        A model with more `modules` is checked more rarely, so that the mean time per step stays the same.
        """
        # C code expects a multiple of LOOK_EVERY.
        self.look_every = LOOK_EVERY * max(1, modules // (MODULES_PER_STEP * LOOK_EVERY))

    def look_again(self) -> None:
        """Check whether the model has changed, unless recorded steps are running."""
        if not self.recorded_steps and not self.is_of_runner:
            with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
                self.changed()

    def may_begin_training(self) -> bool:
        """Return whether a call with gradients may be a forward pass of the first training step, which has not ended
        yet.

        This is so in training mode, if the process has made an optimizer. After MOST_FIRST_FORWARDS such calls, cbtop
        assumes that the model does not train.
        """
        if self._first_forwards >= MOST_FIRST_FORWARDS or self.path is not self.times or not self.training_mode():
            return False
        root = self.root()
        if root is None or not has_made_optimizer() or first_trained(root) is None:
            return False
        self._first_forwards += 1
        # C code would count the next forward pass as inference, so Python must handle it.
        self.in_python = (
            self.takes_turns
            or self.guard is not None
            or self.is_of_runner
            or self._first_forwards < MOST_FIRST_FORWARDS
        )
        return True

    def training_mode(self) -> bool | None:
        """Return whether the model is in training mode, or None if the model was freed."""
        root = self.root()
        if root is None:
            return None
        # The wrapper of torch.compile has no training mode, so use the mode of the model inside.
        inside = child_named(root, "_orig_mod")
        mode: bool | None = dictionary_of(root if inside is None else inside).get("training")
        return mode

    def look_for_gradients(self) -> None:
        """Look at the first weight that requires a gradient, and announce that the process trains if this weight is
        trained.

        It is trained if it has a gradient, or if torch has counted a change in place. The gradient alone is not
        enough, because most programs clear gradients before the next step.
        """
        root = self.root()
        if root is None:
            return
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            weight = first_trained(root)
            if weight is None or not weight.is_leaf:
                return  # computed, so it has no gradient, and torch would warn if it were read
            before, self.weight_version = self.weight_version, version_of(weight)
            if weight.grad is not None or before not in (None, self.weight_version):
                self.trains = True
                self.profiler.announce(Training())

    def remove(self) -> None:
        """Stop timing all calls of the model."""
        if self.kernel_steps is not None:
            self.kernel_steps.end_window()
        with swaps.lock:
            swaps.swap_out(ref(self))
            if self.guard is not None:
                self.guard.remove()
            for call in self.calls:
                call.remove()
            self.calls = self.named = ()
            self.calls_are_in = False
