"""Swaps in and out the wrappers that time a model's modules. Also checks whether the model has changed.

Rules
- Timed calls of modules are swapped in when a recorded step begins. They are swapped out when a step begins that is
  not recorded.
- Only recorded steps check whether the model, its autocast or its adapters have changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import get_autocast_dtype, is_autocast_enabled

from cbtop.profiler.instrument.adapters import state_of_adapters
from cbtop.profiler.instrument.eager_stamps import Timing
from cbtop.profiler.instrument.kernel_bursts import bursts_of
from cbtop.profiler.instrument.module_tree import dictionary_of, first_trained
from cbtop.profiler.instrument.multiplied import AUTOCAST_DEVICES, Mode
from cbtop.profiler.instrument.step_contents import StepContents
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.torch_internals import (
    has_made_optimizer,
    submodules,
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

# The model is checked for changes in one of this many recorded steps. A check takes as long as timing all modules.
LOOK_EVERY = 8
MOST_FIRST_FORWARDS = 64  # if a first training step has more forward passes, the further ones are not recognised
MODULES_PER_STEP = 200  # average number of modules that a recorded step checks; checking this many takes 0.3 ms


class TimedModel(ABC):
    """The modules of one model that are timed in the model's steps, and the object that times them."""

    __slots__ = (
        "__weakref__",
        "_adapted",
        "_asked",
        "_device",
        "_first_forwards",
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
        self.model = model
        self.changed = changed  # a function that plans the model again if the model has changed
        self.give_up = give_up
        self.bursts = bursts_of(profiler)
        self.contents = StepContents(self)
        # if this is not None, it records the kernels of some steps through CUPTI
        self.kernel_steps: KernelSteps | None = None
        # Time when `kernel_steps` will record the next step, in ns of the host's clock. 0 means never. C code reads
        # this.
        self.kernels_due_ns = 0
        self.calls: Sequence[BrickCall] = ()
        # The calls that name the kernels of captured graphs. If modules are not timed (see `Plan.is_timed`), `calls`
        # is empty, but `named` is not.
        self.named: Sequence[BrickCall] = ()
        self.guard: Guard | None = None  # searches recorded steps for values that are not finite
        self.own: OwnOperations | None = None  # operations that the model runs outside of its children's calls
        self.training: Any = None  # the model's TrainingSteps, if an optimizer changes its weights
        self._first_forwards = 0  # number of calls so far that may be forward passes of the first training step
        self.in_python = False  # whether Python handles the model's calls even if the hot path is compiled
        # True if each call of the model's runner is a step; False if each call of the model itself is a step
        self.is_of_runner = False
        self.on_device: dict[Hashable, Hashable] = {}  # brick that the host times -> the same brick on the device
        # A function that is called with a description of how the device's times are measured.
        self.measured: Callable[[str], None] = lambda how: None
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model
        # A function that is called if autocast's type or the state of the adapters has changed since the last step.
        # It gets both.
        self.follow_mode: Callable[[torch.dtype | None, object], None] = lambda autocast, adapters: None
        self._asked: tuple[torch.dtype | None, object] = (None, None)
        self._device = ""  # the device on which autocast is checked
        self._adapted: ref[nn.Module] | None = None  # the layer whose adapters are checked for changes
        self.trains = False  # whether the process trains: it computes gradients between the model's steps
        self.weight_version: int | None = None  # how often the first weight that requires a gradient has been changed
        self.looks = 0  # number of recorded steps that have begun
        self.look_every = LOOK_EVERY  # the model is checked for changes in one of this many recorded steps
        # Whether the wrappers that time calls are in place now; None if perhaps only some are.
        self.calls_are_in: bool | None = False
        self.recorded_steps: set[object] = set()  # the recorded steps that are running

    def time_on(self, timing: Timing) -> None:
        """From now on, time the model's steps and bricks by the method `timing`."""
        self.timing, self.labelled = timing.path, timing.labelled
        #: The path that times calls of modules and functions. If the hot path is compiled, this is the compiled
        #: object.
        self.path: HotPath | Path = getattr(timing.path, "hot_path", timing.path)
        self.times = timing if timing.backend and not timing.by_kernels else self.path
        self.profiler_steps = self.profiler.parts.steps.on(timing.path)

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Stop showing this model after `error` in cbtop's code."""

    def follow(self, recorded: object | None) -> None:
        """For the step `recorded`, put the wrappers that time calls in place.

        If `recorded` is None, remove the wrappers, unless a recorded step is still running.
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
        """Update the bricks for this step if autocast or the adapters have changed.

        This is called once per step and not for each brick, because the call takes 0.2 us (0.35 us under autocast).
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

    def ask_of(self, device: str, adapted: nn.Module | None, mode: Mode) -> None:
        """From now on, check autocast on `device` and the adapters of the layer `adapted`.

        `mode` has the current state of both.
        """
        self._device = device if device in AUTOCAST_DEVICES else ""
        self._adapted = None if adapted is None else ref(adapted)
        self._asked = mode.autocast, mode.adapters

    def look_through(self, modules: int) -> None:
        """Set how often the model is checked for changes.

        If the model has more `modules`, fewer steps check it. So the mean time of checks per step stays the same.
        """
        # C code expects a multiple of LOOK_EVERY.
        self.look_every = LOOK_EVERY * max(1, modules // (MODULES_PER_STEP * LOOK_EVERY))

    def look_again(self) -> None:
        """Check whether the model has changed, unless recorded steps are running."""
        if not self.recorded_steps and not self.is_of_runner:
            with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
                self.changed()

    def may_begin_training(self) -> bool:
        """Return whether a call with gradients may be a forward pass of the first training step. That step has not
        ended yet.

        This is true in training mode, if the process has made an optimizer. After MOST_FIRST_FORWARDS such calls,
        cbtop assumes that the model does not train.
        """
        if self._first_forwards >= MOST_FIRST_FORWARDS or self.path is not self.times or not self.training_mode():
            return False
        root = self.root()
        if root is None or not has_made_optimizer() or first_trained(root) is None:
            return False
        self._first_forwards += 1
        # C code would begin the next forward pass as a step of inference, so Python must handle it.
        self.in_python = self.guard is not None or self.is_of_runner or self._first_forwards < MOST_FIRST_FORWARDS
        return True

    def training_mode(self) -> bool | None:
        """Return whether the model is in training mode, or None if the model was freed."""
        root = self.root()
        if root is None:
            return None
        # The wrapper of torch.compile has no training mode; use the mode of the model inside it.
        inside = submodules(root).get("_orig_mod")
        mode: bool | None = dictionary_of(root if inside is None else inside).get("training")
        return mode

    def look_for_gradients(self) -> None:
        """Check the first weight that requires a gradient.

        If this weight is being trained, announce that the process trains. A weight in training has a gradient, or
        torch has counted that an optimizer changed the weight in place. Looking only at the gradient does not
        suffice, because most programs clear gradients before the next step.
        """
        root = self.root()
        if root is None:
            return
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            weight = first_trained(root)
            if weight is None or not weight.is_leaf:
                return  # this tensor was computed, so it has no gradient; reading its gradient would make torch warn
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
