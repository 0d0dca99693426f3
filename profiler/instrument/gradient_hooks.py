"""Reads gradients where torch uses them: before clipping, before an optimizer's step, in a gradient scaler.

Rules
- If cbtop's code fails, it stops reading gradients, and the host continues.
- Autograd builds no graph of cbtop's operations. The host's `__torch_function__` and modes do not see them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.dynamo import without_dynamo
from cbtop.profiler.instrument.functions import TimedFunctions
from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.gradients import gradients_here
from cbtop.profiler.instrument.loss_scale import ScalerHistory
from cbtop.profiler.instrument.module_tree import dictionary_of
from cbtop.profiler.instrument.optimizer_gradients import OptimizerGradients
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.training import training_here
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import TrainingPart

L2 = 2.0
# Possible types of the closure that an optimizer's step takes.
FUNCTIONS = FunctionType, MethodType, functools.partial
Wrapper = Callable[[Function], Function]


class GradientHooks:
    """Follows the gradients of all optimizers, and all gradient scalers, of this process."""

    def __init__(self) -> None:
        # id of an optimizer -> the object that follows its gradients
        self._optimizers: dict[int, tuple[ref[Any], OptimizerGradients]] = {}
        self._scalers: dict[int, ScalerHistory] = {}
        self._has_failed = False

    def follow(
        self, functions: TimedFunctions, times: Callable[[TrainingPart], Wrapper], *, is_compiled: bool
    ) -> None:
        """Look at scales, and at gradients before they are clipped. `times` wraps functions, to time them as a part
        of a training step.

        If a model is compiled, functions that its code may call are not replaced.
        """
        times_clipping, times_unscaling = times(TrainingPart.CLIP), times(TrainingPart.OPTIMIZER)
        functions.replace(
            torch.amp.GradScaler, "unscale_", lambda original: self._unscales(times_unscaling(original))
        )
        functions.replace(torch.amp.GradScaler, "update", self._updates)
        if is_compiled:
            return
        clip_grad = torch.nn.utils.clip_grad
        functions.replace(clip_grad, "clip_grad_norm_", lambda original: self._by_norm(times_clipping(original)))
        functions.replace(clip_grad, "clip_grad_value_", lambda original: self._by_value(times_clipping(original)))
        functions.replace(clip_grad, "_clip_grads_with_norm_", self._scales_to_norm)

    def leave(self) -> None:
        """Forget all optimizers, scalers and errors."""
        self._optimizers.clear()
        self._scalers.clear()
        self._has_failed = False

    def optimizer_begins(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Read the gradients before a step of `optimizer`. Does nothing if the step itself computes them."""
        if not _computes_gradients(args, kwargs) and not _is_in_backward():
            self._guarded(self._look, optimizer)

    def optimizer_ended(self, optimizer: Any, phase: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Count a step of `optimizer`. After a backward, it ends a training step of `phase`."""
        if _is_in_backward():
            return
        if _computes_gradients(args, kwargs):
            self._guarded(self._look, optimizer)
        self._guarded(self._count, optimizer, phase)

    def skipped(self) -> None:
        """Forget the gradients of the current step, which a gradient scaler has skipped."""
        gradients_here().forget()

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """Store that `scaler` scales the gradients of `optimizer`."""
        self._guarded(self._join, scaler, optimizer)

    def _reads(self, look: Callable[..., None], *args: Any) -> None:
        """Call `look`, which reads tensors."""
        with without_torch_function(), torch.no_grad():
            self._guarded(look, *args)

    def _guarded(self, look: Callable[..., None], *args: Any) -> None:
        if self._has_failed:
            return
        try:
            without_dynamo(look, *args)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._has_failed = True
            log_own_error(error, "gradients are not shown")

    def _of(self, optimizer: Any) -> OptimizerGradients:
        known = self._optimizers.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            self._optimizers = {key: one for key, one in self._optimizers.items() if one[0]() is not None}
            known = self._optimizers[id(optimizer)] = ref(optimizer), OptimizerGradients(optimizer)
        return known[1]

    def _look(self, optimizer: Any) -> None:
        training, here = training_here(), gradients_here()
        model = training.steps if training.clock.has_backward else here.latest_model()
        if model is None or not model.training or not model.profiler.enabled:
            here.forget()
            return
        begun_ns = clock.perf_counter_ns()
        gradients = self._of(optimizer)
        # Usually nothing is due. Then even entering the contexts would take longer than all other work here.
        if gradients.is_due():
            with without_torch_function(), torch.no_grad():
                gradients.look(model)
        training.own_ns += clock.perf_counter_ns() - begun_ns

    def _count(self, optimizer: Any, phase: str) -> None:
        training, here = training_here(), gradients_here()
        has_backward = training.clock.has_backward
        if has_backward and training.steps is not None:
            here.latest_phase, here.latest_model = phase, ref(training.steps)
        self._of(optimizer).ended(here.latest_phase, here.latest_model(), is_first=has_backward)

    def _join(self, scaler: Any, optimizer: Any) -> None:
        self._history_of(scaler).optimizer = self._of(optimizer)

    def _history_of(self, scaler: Any) -> ScalerHistory:
        known = self._scalers.get(id(scaler))
        if known is None or known.scaler() is not scaler:
            self._scalers = {key: one for key, one in self._scalers.items() if one.scaler() is not None}
            known = self._scalers[id(scaler)] = ScalerHistory(ref(scaler))
        return known

    def _unscales(self, original: Function) -> Function:
        """Wrap GradScaler.unscale_. A norm from earlier clipping is forgotten, because it was the norm of scaled
        gradients.
        """

        @functools.wraps(original)
        def unscale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            gradients_here().forget()
            return original(scaler, *args, **kwargs)

        return unscale

    def _updates(self, original: Function) -> Function:
        """Wrap GradScaler.update, which changes the scale."""

        @functools.wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(scaler, *args, **kwargs)
            self._reads(self._before_update, scaler)
            result = original(scaler, *args, **kwargs)
            is_given = any(one is not None for one in (*args, *kwargs.values()))
            self._reads(self._after_update, scaler, is_given)
            return result

        return update

    def _before_update(self, scaler: Any) -> None:
        self._history_of(scaler).before_update(dictionary_of(scaler).get("_scale"))

    def _after_update(self, scaler: Any, is_given: bool) -> None:
        scale = dictionary_of(scaler).get("_scale")
        if is_given:
            self._history_of(scaler).before_update(scale)
        else:
            self._history_of(scaler).after_update(scale)

    def _by_norm(self, original: Function) -> Function:
        """Wrap a function that clips by a norm. Its third argument is the order of the norm."""

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(*args, **kwargs)
            order = args[2] if len(args) > 2 else kwargs.get("norm_type", L2)
            here = gradients_here()
            here.is_l2 = type(order) in (int, float) and order == L2
            try:
                return original(*args, **kwargs)
            finally:
                here.is_l2 = False

        return clip

    def _by_value(self, original: Function) -> Function:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling():
                gradients_here().clips_by_value()
            return original(*args, **kwargs)

        return clip

    def _scales_to_norm(self, original: Function) -> Function:
        """Wrap a function that scales gradients down to a norm.

        Its arguments are the parameters, the largest allowed norm, and the current norm.
        """

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling():
                parameters = args[0] if args else kwargs.get("parameters")
                total = args[2] if len(args) > 2 else kwargs.get("total_norm")
                self._reads(self._clips, parameters, total)
            return original(*args, **kwargs)

        return clip

    def _clips(self, parameters: Any, total: Any) -> None:
        model = training_here().steps
        if model is not None and model.training and model.profiler.enabled:
            gradients_here().clips(parameters, total)


def _is_in_backward() -> bool:
    """Return whether a backward is running. If so, a hook of a weight has called the optimizer, which has only this
    weight.
    """
    return training_here().clock.is_inside(TrainingPart.BACKWARD)


def _computes_gradients(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an optimizer's step with these arguments computes the gradients itself (by a closure)."""
    return any([isinstance(one, FUNCTIONS) for one in (*args[1:], *kwargs.values())])
