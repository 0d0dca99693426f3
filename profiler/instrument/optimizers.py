"""Follows the optimizers of torch, and times the functions of a training loop (see training.py).

torch calls hooks before and after each optimizer step. `backward`, `zero_grad`, clipping and the data loader have no
such hooks, so these functions are replaced while a model is attached. So is the `step` of each class of optimizers,
because torch's own work around its hooks takes 0.1 to 0.2 ms.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec
from weakref import WeakSet, ref

import torch
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.communication import GradientSync, Replicas
from cbtop.profiler.instrument.dynamo import without_dynamo
from cbtop.profiler.instrument.functions import TimedFunctions
from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.gradient_hooks import GradientHooks
from cbtop.profiler.instrument.module_tree import dictionary_of, first_trained, modules_of
from cbtop.profiler.instrument.torch_internals import has_made_optimizer, without_torch_function
from cbtop.profiler.instrument.training import (
    OptimizerCall,
    ThreadTraining,
    TrainingSteps,
    end_step,
    training_here,
)
from cbtop.profiler.instrument.training_kernels import GpuTrainingSteps
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock
from cbtop.protocol.messages import Training
from cbtop.protocol.vocabulary import TRAIN, TrainingPart

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.timed_model import TimedModel

Arguments = ParamSpec("Arguments")
LOADER = "torch.utils.data.dataloader"
# A model is trained by hand if this many backwards gave it gradients, and the process has made no optimizer. A
# program may look at gradients once before it makes its optimizer.
BACKWARDS_BY_HAND = 3
MOST_NAMED = 8  # this many optimizers have their own phase; the others share the last phase


class Optimizers:
    """The optimizers of this process, and the models that they train."""

    def __init__(self, models: Callable[[], list[TimedModel]]) -> None:
        self._models = models
        self.replicas = Replicas(models)
        # Keys are ids of optimizers, because looking up an optimizer itself may run the host's code.
        self._known: dict[int, _Optimizer] = {}
        self._handles: list[Any] = []
        self._functions: TimedFunctions | None = None  # None if the `step` of optimizers must not be replaced
        self._gradients = GradientHooks()

    def follow(self, functions: TimedFunctions, *, is_compiled: bool) -> None:
        """Register hooks for optimizer steps, and time the functions of a training loop.

        If a model is compiled, functions that its code may call are not replaced. Otherwise Dynamo would compile this
        code again.
        """
        if self._handles:
            return
        from torch.optim import optimizer

        self._handles = [
            optimizer.register_optimizer_step_pre_hook(self._begins),
            optimizer.register_optimizer_step_post_hook(self._ended),
        ]
        functions.replace(torch.autograd, "backward", functools.partial(_backward, optimizers=self))
        functions.replace(torch.amp.GradScaler, "step", self._scaled)
        functions.replace(optimizer.Optimizer, "zero_grad", _times(TrainingPart.ZERO_GRAD))
        self._functions = None if is_compiled else functions
        if not is_compiled:
            functions.replace(torch.autograd, "grad", _times(TrainingPart.BACKWARD))
        self._gradients.follow(functions, _times, is_compiled=is_compiled)
        once_imported(LOADER, lambda: functions.replace(sys.modules[LOADER]._BaseDataLoaderIter, "__next__", _waits))

    def leave(self) -> None:
        """Undo `follow`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._functions = None
        self._known.clear()
        self._gradients.leave()

    def backward_ended(self) -> None:
        """Show the steps of models that the program trains without an optimizer of torch (see training.py)."""
        _unless_it_fails(self._train_by_hand)()

    def _train_by_hand(self) -> None:
        untrained = [model for model in self._models() if model.training is None and model.training_mode()]
        if not untrained or has_made_optimizer():
            return
        for model in untrained:
            root = model.root()
            with without_torch_function():  # hides cbtop's reads from the host's `__torch_function__`
                weight = None if root is None else first_trained(root)
                is_trained = weight is not None and weight.is_leaf and weight.grad is not None
            model.backwards += is_trained
            if model.backwards >= BACKWARDS_BY_HAND:
                _train(model)
                if model.training:
                    model.training.is_by_hand = True

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_dynamo_compiling():
            begun_ns = clock.perf_counter_ns()
            self._gradients.optimizer_begins(optimizer, args, kwargs)
            _begin_optimizer(begun_ns)

    def _ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        try:
            here, now_ns = training_here(), clock.perf_counter_ns()
            here.clock.end(now_ns)
            if here.stepping:
                here.stepping[-1].ended = optimizer, args, kwargs
            else:
                self._step_ended(here, now_ns, optimizer, args, kwargs)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "training steps are not shown")
            _drop()

    def _timed_step(self, original: Function) -> Function:
        """Wrap the `step` of a class of optimizers."""

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not _begin_step():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._returned()

        return step

    def _returned(self) -> None:
        """A call of an optimizer's `step` has returned, or raised an exception."""
        try:
            here, now_ns = training_here(), clock.perf_counter_ns()
            call = here.stepping.pop()
            while here.clock.depth > call.depth:
                here.clock.end(now_ns)
            if call.ended is not None:
                self._step_ended(here, now_ns, *call.ended)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "training steps are not shown")
            _drop()

    def _step_ended(self, here: ThreadTraining, now_ns: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Handle the end of a step of `optimizer` at `now_ns`. The other arguments are those of the step."""
        phase = self._trained_by(optimizer)
        self._gradients.optimizer_ended(optimizer, phase, args, kwargs)
        # In a backward, a hook of a weight has called this optimizer, which has only this weight.
        if here.clock.is_in is TrainingPart.BACKWARD:
            here.phase_after_backward = TRAIN
        elif here.clock.has_backward:
            end_step(here, phase, now_ns)
        else:
            here.clock.leave_out(now_ns, clock.perf_counter_ns())

    def _trained_by(self, optimizer: Any) -> str:
        """Return the phase of the steps of `optimizer`. Also mark the models that it trains."""
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = self._meet(optimizer)
        new = [model for model in self._models() if model not in known.looked_at]
        if new:
            groups = dictionary_of(optimizer).get("param_groups", ())
            its = {id(weight) for group in groups for weight in group["params"]}
            for model in new:
                known.looked_at.add(model)
                root = model.root()
                if root is not None and not its.isdisjoint(map(id, _weights_of(root))):
                    _train(model)
        return known.phase

    def _meet(self, optimizer: Any) -> _Optimizer:
        """Make an entry for a new optimizer. It gets the number of a freed optimizer, if there is one."""
        self._known = {key: one for key, one in self._known.items() if one.optimizer() is not None}
        taken = {one.number for one in self._known.values()}
        number = next(one for one in range(len(taken) + 1) if one not in taken)
        shown = min(number, MOST_NAMED - 1)
        phase = f"{TRAIN} {type(optimizer).__name__} {shown + 1}" if number else TRAIN
        # torch has wrapped the function that calls its hooks. A subclass may inherit it.
        owner = next((kind for kind in type(optimizer).__mro__ if hasattr(vars(kind).get("step"), "hooked")), None)
        if self._functions is not None and owner is not None:
            self._functions.replace(owner, "step", self._timed_step)
        return _Optimizer(ref(optimizer), number, phase, WeakSet())

    def _scaled(self, original: Function) -> Function:
        """Wrap GradScaler.step.

        It unscales the gradients, which counts as a part of the optimizer's step. It skips the optimizer if a
        gradient is infinite. A skipped step of the optimizer also ends a training step.
        """

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(scaler, optimizer, *args, **kwargs)
            is_begun = _begin(TrainingPart.OPTIMIZER)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            except BaseException:
                if is_begun:
                    _end()
                raise
            if training_here().clock.has_backward:
                self._gradients.skipped()
                self._ended(optimizer, (), {})
            elif is_begun:
                _end()
            self._gradients.scaler_steps(scaler, optimizer)
            return result

        return step


class _Optimizer(NamedTuple):
    """An optimizer that cbtop follows. The parameters of the models in `looked_at` were already compared with its
    own.
    """

    optimizer: ref[Any]
    number: int
    phase: str
    looked_at: WeakSet[TimedModel]


def _weights_of(root: nn.Module) -> list[Any]:
    """Return the parameters of `root`. Runs no code of the host."""
    return [weight for module in modules_of(root) for weight in dictionary_of(module).get("_parameters", {}).values()]


def _train(model: TimedModel) -> None:
    """From now on, show the steps of `model` as training steps, unless stamps time its device."""
    if model.training is None and model.path is model.times:
        model.training = TrainingSteps(model) if model.kernel_steps is None else GpuTrainingSteps(model)
        model.training.mode = model.training_mode()
        model.in_python = True
        if model.guard is not None:
            # An optimizer has just run its first step. Let the guard count a training step, too.
            model.guard.count_earlier(TRAIN)
        if not model.trains:
            model.trains = True
            model.profiler.announce(Training())


def _backward(original: Function, optimizers: Optimizers) -> Function:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(tensors, *args, **kwargs)
        hooks = _backward_begins(tensors, optimizers.replicas)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            _backward_ended(hooks)
            optimizers.backward_ended()

    return backward


def _roots_of(tensors: Any) -> list[Any]:
    """Return the tensors at which a backward begins. [] if they must not be read.

    A generator is left alone, because it can be read only once. Compiled autograd would compile cbtop's hooks, so the
    list is then empty, too.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        return []
    found = list(tensors) if type(tensors) in (list, tuple) else [tensors]
    return [one for one in found if issubclass(type(one), torch.Tensor)]


class _Hooks(NamedTuple):
    """cbtop's hooks for one backward: their handles, and the wait for the gradients of other ranks."""

    handles: list[Any]
    sync: GradientSync | None


def _backward_begins(tensors: Any, replicas: Replicas) -> _Hooks | None:
    """Begin a backward. Returns its hooks, or None if cbtop's code failed."""
    try:
        here = training_here()
        here.clock.begin(TrainingPart.BACKWARD, clock.perf_counter_ns())
        handles: list[Any] = []
        if here.calls is not None:
            handles = without_dynamo(here.calls.backward_begins, _roots_of(tensors))
        return _Hooks(handles, without_dynamo(replicas.begin, here, lambda: _roots_of(tensors)))
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "the backward of bricks is not shown")
    return None


def _backward_ended(hooks: _Hooks | None) -> None:
    if hooks is None:
        return
    try:
        here = training_here()
        if hooks.sync is not None:
            hooks.sync.ended()
        if here.calls is not None:
            here.calls.backward_ended(hooks.handles)
        now_ns = clock.perf_counter_ns()
        here.clock.end(now_ns)
        if here.phase_after_backward and here.clock.is_in is None:
            end_step(here, here.phase_after_backward, now_ns)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "the backward of bricks is not shown")


def _unless_it_fails(function: Callable[Arguments, None]) -> Callable[Arguments, bool]:
    """Return a function that calls `function` and returns whether it succeeded."""

    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> bool:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "training steps are not shown")
            return False
        return True

    return guarded


@_unless_it_fails
def _begin(part: TrainingPart) -> None:
    training_here().clock.begin(part, clock.perf_counter_ns())


@_unless_it_fails
def _begin_step() -> None:
    """Begin a call of an optimizer's `step`."""
    here = training_here()
    call = OptimizerCall(here.clock.depth)
    here.clock.begin(TrainingPart.OPTIMIZER, clock.perf_counter_ns())
    here.stepping.append(call)


@_unless_it_fails
def _begin_optimizer(hook_ns: int) -> None:
    """Begin a step of an optimizer. cbtop's own work before the step began at `hook_ns`. This work belongs to no
    part.
    """
    training_clock, now_ns = training_here().clock, clock.perf_counter_ns()
    training_clock.leave_out(hook_ns, now_ns)
    training_clock.begin(TrainingPart.OPTIMIZER, now_ns)


@_unless_it_fails
def _end() -> None:
    training_here().clock.end(clock.perf_counter_ns())


@_unless_it_fails
def _drop() -> None:
    training_here().give_up()


@_unless_it_fails
def _data_ended() -> None:
    """Do not count the time since the last step, because the data of an epoch has ended. If a step has begun, do
    nothing.
    """
    here = training_here()
    if here.clock.is_in is None and here.steps is None:
        here.give_up()


def _times(part: TrainingPart) -> Callable[[Function], Function]:
    """Return a wrapper for functions. The time of their calls counts as `part` of the training step."""

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(*args, **kwargs)
            is_begun = _begin(part)
            try:
                return original(*args, **kwargs)
            finally:
                if is_begun:
                    _end()

        return timed

    return wrap


def _waits(original: Function) -> Function:
    """Wrap the data loader's `__next__`, which waits for data.

    When it raises, the data of the epoch has ended.
    """

    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        is_begun = _begin(TrainingPart.DATA_WAIT)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if is_begun:
                _end()
                _data_ended()
            raise
        if is_begun:
            _end()
        return result

    return wait
