"""Follows transformers' `generate`. A step lasts from the preparation of its inputs until its token is chosen."""

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
    """Wrap `generate`: call `met` with the model before it, and end its steps after it."""
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
            except BaseException:  # a signal handler interrupted the first attempt: end the remaining steps
                _end_generate(depth)
                raise

    return generate


def _unless_it_fails(function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "some steps of generate lack their sampling")
        return None

    return guarded


@_unless_it_fails
def _begin_generate(model: object) -> int:
    """Begin a call of `generate`. Returns the number of running calls of `generate` around this call."""
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
    """Begin to choose a token. Returns the step that waits for the token, or None."""
    waiting = _waiting()
    if waiting is not None:
        waiting.begin_sampling()
    return waiting


@_unless_it_fails
def _end_sampling(args: tuple[Any, ...]) -> None:
    """End the choice of a token. `args` are the arguments of stopping criteria: `args[1]` are the chosen tokens."""
    waiting = _waiting()
    if waiting is not None:
        words = args[1] if len(args) > 1 else None
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            length = words.shape[-1] if isinstance(words, Tensor) else None
        waiting.end_sampling(length)


@_unless_it_fails
def _prepares_now() -> int:
    """End a step that still waits for its token, because the next inputs are prepared now. Returns the time in ns."""
    waiting = _waiting()
    if waiting is not None:
        waiting.close()
    return perf_counter_ns()


@_unless_it_fails
def _prepared(start_ns: int | None) -> None:
    """Count the preparation of inputs, from `start_ns` until now, as a part of the next step."""
    generation = unit().generation
    if generation is not None and start_ns is not None:
        generation.prepared = start_ns, perf_counter_ns() - start_ns


def prepares(original: Function) -> Function:
    """Wrap a function that prepares inputs. Its time is counted in the next step."""

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        start_ns = _prepares_now()
        result = original(*args, **kwargs)
        _prepared(start_ns)
        return result

    return prepare_inputs


def assists(original: Function) -> Function:
    """Wrap a function that generates with a draft model. Marks the running `generate` as assisted."""

    def assisted_decoding(*args: Any, **kwargs: Any) -> Any:
        _is_assisted()
        return original(*args, **kwargs)

    return assisted_decoding


def scores(original: Function) -> Function:
    """Wrap a function that processes scores. Sampling begins when the function is called."""

    def process_scores(*args: Any, **kwargs: Any) -> Any:
        step = None if is_dynamo_compiling() else _begin_sampling()
        try:
            return original(*args, **kwargs)
        finally:
            if step is not None:
                step.is_running = False  # the step waits for its token again

    return process_scores


def chooses(original: Function) -> Function:
    """Wrap a function that checks whether to stop. Sampling has ended when the function returns."""

    def is_done(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_dynamo_compiling():
            _end_sampling(args)
        return result

    return is_done


def _waiting() -> Any:
    """Return the step of the innermost `generate` if the step waits for its token, or None."""
    here = unit()
    step = here.open[-1] if here.open else None
    return (
        step
        if step is not None and step.waits and not step.is_running and step.generation is here.generation
        else None
    )
