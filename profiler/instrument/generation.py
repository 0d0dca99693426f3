"""Follows transformers' `generate`. A step lasts from the preparation of its inputs until its token is chosen.

Three wrappers run in each step. Their own time counts as overhead. If the hot path is compiled, C code does the work
of the wrappers. It needs closures that contain only `original`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument.open_step import Generation, unit
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol.clock import perf_counter_ns

Function = Callable[..., Any]
if chosen() is not HotPath:
    from cbtop.profiler import _hot_path


def _compiled(wrapper: Function) -> Function:
    """Make calls of a wrapper run C code, if the hot path is compiled. Dynamo still sees the Python code."""
    return wrapper if chosen() is HotPath else _hot_path.compile_generation(wrapper)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def generates(original: Function, met: Callable[[object], None] = lambda model: None) -> Function:
    """Wrap `generate`. Each call begins with `met` for its model, and ends the steps that are still open at its
    end.
    """
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
            except BaseException:  # a signal handler interrupted this loop, so end the steps that are left
                _end_generate(depth)
                raise

    return generate


def _unless_it_fails(function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            sampling_failed(error)
        return None

    return guarded


@_unless_it_fails
def _begin_generate(model: object) -> int:
    """Begin a call of `generate`. Returns how many calls of `generate` are running around it."""
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
def _has_beams(arguments: tuple[Any, ...]) -> None:
    """Find the configuration among these arguments, and store its numbers of beams for the running `generate`."""
    generation = unit().generation
    configs = [one for one in arguments if type(one).__name__ == "GenerationConfig"]
    if generation is None or not configs:
        return
    beams, returned = configs[0].num_beams, configs[0].num_return_sequences
    if isinstance(beams, int) and beams > 1:
        generation.beams = beams, returned if isinstance(returned, int) and 0 < returned <= beams else 1


def end_sampling(args: tuple[Any, ...], returned_ns: int) -> None:
    """End the step that has waited for its token. The token was chosen at `returned_ns`.

    `args` are the arguments of the stopping criteria, and `args[1]` are the tokens of all sequences.
    """
    waiting = unit().waiting
    if waiting is not None:
        words = args[1] if len(args) > 1 else None
        with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
            length = words.shape[-1] if isinstance(words, Tensor) else None
        waiting.end_sampling(length, returned_ns)


def sampling_failed(error: Exception) -> None:
    """Log an error of cbtop. An error of the host's signal handler is raised again."""
    log_own_error(error, "some steps of generate lack their sampling")


def prepares(original: Function) -> Function:
    """Wrap a function that prepares inputs. Its time is counted in the next step."""

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        generation, start_ns, begun_ns = None, 0, 0
        try:
            start_ns = perf_counter_ns()
            here = unit()
            waiting = here.waiting
            if waiting is not None:
                # No token was chosen for the previous step, and it still waits for one. So end it.
                waiting.close()
                start_ns = perf_counter_ns()
            begun_ns = perf_counter_ns()
            generation = here.generation
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            sampling_failed(error)
        result = original(*args, **kwargs)
        if generation is not None:
            try:
                returned_ns = perf_counter_ns()
                generation.prepared = start_ns, returned_ns - start_ns
                generation.own_ns += begun_ns - start_ns + perf_counter_ns() - returned_ns
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                sampling_failed(error)
        return result

    return _compiled(prepare_inputs)


def assists(original: Function) -> Function:
    """Wrap a function that generates with a draft model. It marks the running `generate` as assisted."""

    def assisted_decoding(*args: Any, **kwargs: Any) -> Any:
        _is_assisted()
        return original(*args, **kwargs)

    return assisted_decoding


def searches(original: Function) -> Function:
    """Wrap a function that generates by beam search. The wrapper stores the numbers of beams for the running
    `generate`.
    """

    def beam_search(*args: Any, **kwargs: Any) -> Any:
        _has_beams((*args, *kwargs.values()))
        return original(*args, **kwargs)

    return beam_search


def scores(original: Function) -> Function:
    """Wrap a function that processes scores. Its call begins the sampling of a token."""

    def process_scores(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        step = None
        try:
            called_ns = perf_counter_ns()
            step = unit().waiting
            if step is not None:
                step.begin_sampling(called_ns)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            sampling_failed(error)
        try:
            return original(*args, **kwargs)
        finally:
            if step is not None:
                step.is_running = False  # the scores are ready, so the step waits for its token again

    return _compiled(process_scores)


def chooses(original: Function) -> Function:
    """Wrap a function that checks whether to stop. Its return ends the sampling of a token."""

    def is_done(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_dynamo_compiling():
            try:
                end_sampling(args, perf_counter_ns())
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                sampling_failed(error)
        return result

    return _compiled(is_done)
