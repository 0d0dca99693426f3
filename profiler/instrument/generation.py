"""The functions of `generate`: a step stays open until its token is chosen, and begins as its inputs are prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.instrument.open_step import Generation, unit
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol.clock import perf_counter_ns

Function = Callable[..., Any]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def generates(original: Function, met: Callable[[object], None] = lambda model: None) -> Function:
    """Wrap `generate`: call `met` before it, and end its steps after it."""
    met = _unless_it_fails(met)

    def generate(*args: Any, **kwargs: Any) -> Any:
        depth = None
        try:
            model = args[0] if args else None
            met(model)
            depth = _begin_generate(model)
            return original(*args, **kwargs)
        finally:
            try:
                _end_generate(depth)
            except BaseException:  # from a signal handler: steps that have already ended are not ended twice
                _end_generate(depth)
                raise

    return generate


def _unless_it_fails(function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see the rules
            log_own_error(error, "some steps of generate lack their sampling")
        return None

    return guarded


@_unless_it_fails
def _begin_generate(model: object) -> int:
    """Begin a call of `generate`. Returns the number of such calls around it."""
    generations = unit().generations
    generations.append(Generation(model))
    return len(generations) - 1


@_unless_it_fails
def _end_generate(depth: int | None) -> None:
    if depth is not None:
        unit().end_generate(depth)


@_unless_it_fails
def _is_assisted() -> None:
    generation = unit().generation
    if generation is not None:
        generation.is_assisted = True


@_unless_it_fails
def _begin_sampling() -> Any:
    """Begin choosing a token. Returns the step it is for."""
    waiting = _waiting()
    if waiting is not None:
        waiting.begin_sampling()
    return waiting


@_unless_it_fails
def _end_sampling(args: tuple[Any, ...]) -> None:
    """End choosing a token. `args` are the arguments of stopping criteria: the chosen tokens come second."""
    waiting = _waiting()
    if waiting is not None:
        words = args[1] if len(args) > 1 else None
        with without_torch_function():  # so that the host's do not see our calls
            length = words.shape[-1] if isinstance(words, Tensor) else None
        waiting.end_sampling(length)


@_unless_it_fails
def _prepares_now() -> int:
    """End the last step, even without a token, because the next inputs are being prepared. Returns the time."""
    waiting = _waiting()
    if waiting is not None:
        waiting.close()
    return perf_counter_ns()


@_unless_it_fails
def _prepared(start_ns: int | None) -> None:
    """Count the preparation from `start_ns` until now towards the next step, which has not begun."""
    generation = unit().generation
    if generation is not None and start_ns is not None:
        generation.prepared = start_ns, perf_counter_ns() - start_ns


def prepares(original: Function) -> Function:
    """Wrap a function that prepares inputs: its time is counted in the next step."""

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        start_ns = _prepares_now()
        result = original(*args, **kwargs)
        _prepared(start_ns)
        return result

    return prepare_inputs


def assists(original: Function) -> Function:
    """Wrap a function that generates with a draft model: mark its `generate` as assisted."""

    def assisted_decoding(*args: Any, **kwargs: Any) -> Any:
        _is_assisted()
        return original(*args, **kwargs)

    return assisted_decoding


def scores(original: Function) -> Function:
    """Wrap a function that processes scores: sampling begins when it is called."""

    def process_scores(*args: Any, **kwargs: Any) -> Any:
        step = None if is_dynamo_compiling() else _begin_sampling()
        try:
            return original(*args, **kwargs)
        finally:
            if step is not None:
                step.is_running = False  # the scores are there

    return process_scores


def chooses(original: Function) -> Function:
    """Wrap a function that checks whether to stop: sampling has ended when it returns."""

    def is_done(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_dynamo_compiling():
            _end_sampling(args)
        return result

    return is_done


def _waiting() -> Any:
    """Return the step of the innermost `generate` whose model has returned."""
    here = unit()
    step = here.open[-1] if here.open else None
    return (
        step
        if step is not None and step.waits and not step.is_running and step.generation is here.generation
        else None
    )
