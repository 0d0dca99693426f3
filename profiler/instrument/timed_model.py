"""A model with its recorded steps, in which the calls of modules are timed.

Rules
- Timed calls of modules are swapped in for a recorded step, and out again at the next step that is not recorded.
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
from cbtop.profiler.instrument.module_tree import first_trained
from cbtop.profiler.instrument.multiplied import AUTOCAST_DEVICES, Mode
from cbtop.profiler.instrument.step_contents import StepContents
from cbtop.profiler.instrument.swapping import swapped_in, swaps
from cbtop.profiler.instrument.torch_internals import version_of, without_torch_function
from cbtop.profiler.instrument.wrapping import BrickCall
from cbtop.protocol.messages import Training

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.hot_path import HotPath
    from cbtop.profiler.instrument.guard import Guard
    from cbtop.profiler.instrument.kernel_steps import KernelSteps
    from cbtop.profiler.path import Path
    from cbtop.profiler.profiler import BrickProfiler

LOOK_EVERY = 8  # recorded steps per check of the model; a check takes as long as timing all modules
MODULES_PER_STEP = 200  # modules that are checked per recorded step, on average; this takes 0.3 ms


class TimedModel(ABC):
    """The calls that are timed in the steps of one model, and the object that times them."""

    __slots__ = (
        "__weakref__",
        "_adapted",
        "_asked",
        "_device",
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
        "on_device",
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
        self.changed = changed  # plans the model again if it has changed
        self.give_up = give_up
        self.bursts = bursts_of(profiler)
        self.contents = StepContents(self)
        self.kernel_steps: KernelSteps | None = None  # records steps by their kernels, if not None
        self.kernels_due_ns = 0  # when `kernel_steps` is next due, on the host's clock; 0: never; C code reads this
        self.calls: Sequence[BrickCall] = ()
        self.guard: Guard | None = None  # looks for values that are not finite in recorded steps
        self.training: Any = None  # its TrainingSteps, if an optimizer changes its weights
        self.in_python = False  # whether Python code handles its calls, although the hot path is compiled
        self.is_of_runner = False  # True: each call of a runner is a step. False: each call of the model
        self.on_device: dict[Hashable, Hashable] = {}  # for a brick timed by the host: the same brick on the device
        self.measured: Callable[[str], None] = lambda how: None  # receives how the device's times are measured
        self.root: Callable[[], nn.Module | None] = lambda: None  # the model
        # Called with the type of autocast and the adapters, if they have changed since the last step.
        self.follow_mode: Callable[[torch.dtype | None, object], None] = lambda autocast, adapters: None
        self._asked: tuple[torch.dtype | None, object] = (None, None)
        self._device = ""  # the device whose autocast is checked
        self._adapted: ref[nn.Module] | None = None  # the layer whose adapters are checked
        self.trains = False  # whether gradients are computed between its steps
        self.weight_version: int | None = None  # version of the first weight that requires a gradient
        self.looks = 0  # number of recorded steps that have begun
        self.look_every = LOOK_EVERY  # number of recorded steps per check of the model
        self.calls_are_in: bool | None = False  # whether the timed calls are swapped in; None: perhaps only some are
        self.recorded_steps: set[object] = set()  # recorded steps that are running

    def time_on(self, timing: Timing) -> None:
        """Use `timing` for the model's steps and bricks from now on."""
        self.timing, self.labelled = timing.path, timing.labelled
        #: Times the calls of modules and functions. If the hot path is compiled, this is the hot path itself.
        self.path: HotPath | Path = getattr(timing.path, "hot_path", timing.path)
        self.times = timing if timing.backend and not timing.by_kernels else self.path
        self.profiler_steps = self.profiler.parts.steps.on(timing.path)

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Stop showing this model after `error` in cbtop's code."""

    def follow(self, recorded: object | None) -> None:
        """Swap the timed calls in for the step `recorded`.

        If `recorded` is None, swap the timed calls out unless a recorded step is running.
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

        This is called once per step, not for each brick, because it takes 0.2 us, or 0.35 us under autocast.
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
        """Check autocast on `device` and the adapters of `adapted` from now on. `mode` has their current state."""
        self._device = device if device in AUTOCAST_DEVICES else ""
        self._adapted = None if adapted is None else ref(adapted)
        self._asked = mode.autocast, mode.adapters

    def look_through(self, modules: int) -> None:
        """Set how often to check the model, so that the mean time per recorded step does not grow with `modules`."""
        self.look_every = LOOK_EVERY * max(1, modules // (MODULES_PER_STEP * LOOK_EVERY))  # a multiple, as C expects

    def look_again(self) -> None:
        """Check whether the model has changed."""
        if not self.recorded_steps and not self.is_of_runner:
            with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
                self.changed()

    def look_for_gradients(self) -> None:
        """Announce that the process trains, if the first weight that requires a gradient shows that.

        In training, the weight has a gradient, or torch has counted a change in place by an optimizer. The gradient
        alone is not enough, because most programs clear gradients before the next step.
        """
        root = self.root()
        if root is None:
            return
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            weight = first_trained(root)
            if weight is None or not weight.is_leaf:
                return  # a computed tensor has no gradient, and torch warns if it is read
            before, self.weight_version = self.weight_version, version_of(weight)
            if weight.grad is not None or before not in (None, self.weight_version):
                self.trains = True
                self.profiler.announce(Training())

    def remove(self) -> None:
        """Stop timing all calls of the model."""
        with swaps.lock:
            swaps.swap_out(ref(self))
            if self.guard is not None:
                self.guard.remove()
            for call in self.calls:
                call.remove()
            self.calls = ()
            self.calls_are_in = False
