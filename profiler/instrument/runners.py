"""Follows engines that run their model through a runner object. Each run is a step with the model's bricks.

Rules
- Each engine has one file in this folder. It has the names of its classes, and a function that describes a run. It
  does not import the engine.
- An unexpected runner is reported in one line, and runs on uninstrumented.
- The model's own calls are not steps, because the engine also calls the model to warm up and to capture graphs.
- If an engine compiles its model, no modules are called. Then only captured graphs that contain a whole call of the
  model have bricks. For this, the model is attached when it is loaded, and its modules name the captured kernels.
"""

from __future__ import annotations

import functools
import sys
import weakref
from _thread import get_ident
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument.attachment import Attachment, attach_to_runner, installed, leave_alone
from cbtop.profiler.instrument.awaited import once_imported
from cbtop.profiler.instrument.capturing import capture_here, engine_runs
from cbtop.profiler.instrument.compiled_code import Pieces
from cbtop.profiler.instrument.functions import TimedFunctions, timed
from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.module_tree import modules_by_path
from cbtop.profiler.instrument.open_step import Generation, OpenStep, unit
from cbtop.profiler.instrument.phases import VERIFY, Call
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.trouble import in_words, log_once, log_own_error
from cbtop.protocol import clock
from cbtop.protocol.signals import reraise_host_error, suppressed
from cbtop.protocol.vocabulary import COMPILED_MODEL, BrickCategory, BrickId

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Engine:
    """The facts about an engine that cbtop needs. The engine's file in this folder defines it."""

    name: str
    model_of: Callable[[Any], nn.Module]
    # Returns whether runs call modules, and a line to log ("" for no line).
    bricks: Callable[[Any], tuple[bool, str]]
    # A function that gets the arguments of a run. Returns a description of the run, or None if the run is not a step.
    describe: Callable[..., Call | None]
    # Returns whether the engine chooses tokens after a run, still in the same step.
    samples_later: Callable[[Any], bool]
    # Describes a run without requests. Returns None unless the graph captured in it contains a whole call of the
    # model.
    describe_capture: Callable[..., Call | None] = lambda runner, *args, **kwargs: None
    # Returns the methods that launch a module's kernels outside of compiled code, as (owner, name, brick). If the
    # brick is None, the module's brick gets the kernels.
    opaque_methods: Callable[[Any], Iterable[tuple[Any, str, BrickDefinition | None]]] = lambda module: ()
    # Logs how the engine's classes differ from what cbtop expects. None: the error is logged.
    say_differences: Callable[[], None] | None = None


PREPARE_INPUTS = BrickDefinition("PrepareInputs", BrickCategory.OTHER, backend="torch")

# By runner; None: not shown.
_attachments: weakref.WeakKeyDictionary[Any, Attachment | None] = weakref.WeakKeyDictionary()


_UNKNOWN: Any = object()  # marks a runner that is not in `_attachments`
_functions = TimedFunctions()
# C functions that begin and end plain steps, if the hot path is compiled. `_begin_run` returns None, and `_end_run`
# False, if Python must do it.
_begin_run: Callable[[ModelSteps, Call, int], OpenStep | None] | None = None
_end_run: Callable[[OpenStep, int], bool] | None = None
if chosen() is not HotPath:
    from cbtop.profiler import _hot_path

    _begin_run, _end_run = _hot_path.begin_run, _hot_path.end_run


def once_there(
    engine: Engine, module: str, kind: str, wrappers: Mapping[str, Callable[[Function], Function]]
) -> None:
    """When `module` is imported, wrap methods of its class `kind`. `wrappers` has a wrapper for each method's name.

    The first method must exist. The rest are wrapped if they exist.
    """

    def wrap() -> None:
        try:
            owner = getattr(sys.modules[module], kind)
            vars(owner)[next(iter(wrappers))]
            for name, wrapper in wrappers.items():
                _functions.replace(owner, name, wrapper)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            reraise_host_error(error)
            if engine.say_differences is None:
                _say_other(engine, error)
            else:
                engine.say_differences()

    once_imported(module, wrap)


class RunnerCall:
    """Describes one run of a runner as a step (see `Called`)."""

    waits = True

    def __init__(self, what: Call) -> None:
        self._what = what

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> Call:
        return self._what

    def may_wait(self, generation: Generation | None) -> bool:
        return True


def runs(original: Function, engine: Engine) -> Function:
    """Wrap a function that runs the model, to make each run a step."""

    @functools.wraps(original)
    def run(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        called_ns = clock.perf_counter_ns()
        step = _begun(runner, engine, args, kwargs, called_ns)
        if step is None:
            return original(runner, *args, **kwargs)
        try:
            result = original(runner, *args, **kwargs)
            step.ended()
            returned_ns, is_later = clock.perf_counter_ns(), False
            try:
                is_later = engine.samples_later(result)
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, f"steps of {engine.name} lack their sampling")
            if not is_later:
                _end(step, returned_ns)
        except BaseException:  # the runner or a signal handler has raised this
            step.close(*sys.exc_info())
            raise
        return result

    return run


def loads(original: Function, engine: Engine) -> Function:
    """Wrap a function that loads the model. The model is attached at the runner's first run.

    The first call of the model itself may be a warm-up, so it would be too early. If the engine compiles the model,
    it is attached at once, because only the compilation tells where kernels come from.
    """

    @functools.wraps(original)
    def load_model(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        try:
            leave_alone(engine.model_of(runner))
            if installed() is not None and not engine.bricks(runner)[0]:
                attachment = _attachment_of(runner, engine)
                if attachment is not None:
                    _name_opaque_methods(attachment, engine)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            reraise_host_error(error)
            _leave(runner, engine, error)
        return result

    return load_model


def runs_without_requests(original: Function, engine: Engine) -> Function:
    """Wrap a function that runs the model to warm up or to capture graphs."""

    @functools.wraps(original)
    def run(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = None
        try:
            attachment = _attachments.get(runner)
            call = engine.describe_capture(runner, *args, **kwargs)
            if attachment is not None and attachment.is_attached and call is not None:
                found = attachment.steps, call
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, f"bricks in captured graphs of {engine.name} are not shown")
        thread = get_ident()
        engine_runs[thread] = found
        try:
            return original(runner, *args, **kwargs)
        finally:
            engine_runs.pop(thread, None)

    return run


def compiles_pieces(original: Function) -> Function:
    """Wrap a method that compiles one piece of the model. Its first argument is a graph module of `torch.fx`."""
    pieces = Pieces()

    @functools.wraps(original)
    def compile_piece(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        return pieces.compiled(lambda: original(self, graph, *args, **kwargs), graph)

    return compile_piece


def samples(original: Function) -> Function:
    """Wrap a function that chooses tokens. Its calls are the brick Sampling of the open step."""
    return timed(
        original, "Sampling", brick_of=lambda args, kwargs: (BrickId.SAMPLING, unit().open[-1].call.sequences)
    )


def prepares_inputs(original: Function) -> Function:
    """Wrap a function that prepares the inputs of a run. Its calls are the brick PrepareInputs of the open step."""
    return timed(
        original, PREPARE_INPUTS.name, brick_of=lambda args, kwargs: (PREPARE_INPUTS, unit().open[-1].call.tokens)
    )


def ends(original: Function, accepted: Callable[[Any], int | None]) -> Function:
    """Wrap a function that ends the step of the last run.

    `accepted` gets the function's result. It returns the number of the step's tokens, or None if unknown.
    """

    @functools.wraps(original)
    def end(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        step = _waiting(runner, clock.perf_counter_ns())
        if step is None:
            return original(runner, *args, **kwargs)
        try:
            result = original(runner, *args, **kwargs)
        except BaseException:
            step.close(*sys.exc_info())
            raise
        returned_ns = clock.perf_counter_ns()
        try:
            tokens = accepted(result) if step.call.phase == VERIFY else None
            if tokens is not None:
                step.active.tokens = tokens
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, "accepted tokens are not counted")
        _end(step, returned_ns)
        return result

    return end


def _begun(
    runner: Any, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], called_ns: int
) -> OpenStep | None:
    """Begin the step of a run that was called at `called_ns`. Returns None if the run is not a step."""
    attachment = _attachment_of(runner, engine)
    if attachment is None:
        return None
    try:
        what = engine.describe(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        reraise_host_error(error)
        _leave(runner, engine, error)
        return None
    if what is None:
        return None
    steps = attachment.steps
    step = None if _begin_run is None else _begin_run(steps, what, called_ns)
    return steps.begun(RunnerCall(what), args, kwargs, called_ns) if step is None else step


def _end(step: OpenStep, returned_ns: int) -> None:
    """End a step. The last call of the host in it returned at `returned_ns`."""
    if _end_run is None or not _end_run(step, returned_ns):
        step.active.returned_ns = returned_ns
        step.close()


def _waiting(runner: Any, called_ns: int) -> OpenStep | None:
    """Return the step of the runner's last run if it is still open, else None.

    The host called the wrapped function at `called_ns`.
    """
    attachment = None
    try:
        attachment = _attachments.get(runner)
        step = None if attachment is None else attachment.steps.open_in(unit())
        if step is None or step.is_running:
            return None
        step.active.own_ns += clock.perf_counter_ns() - called_ns
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        reraise_host_error(error)
        if attachment is not None:
            attachment.steps.failed(error)
        return None
    return step


def _attachment_of(runner: Any, engine: Engine) -> Attachment | None:
    """Return the attachment of a runner's model, or None if the model is not shown. The first run attaches."""
    profiler = installed()
    if profiler is None:
        return None
    try:
        attachment = _attachments.get(runner, _UNKNOWN)
        if attachment is _UNKNOWN:
            shows_bricks, limits = engine.bricks(runner)
            model = engine.model_of(runner)
            name = engine.name if shows_bricks else f"{engine.name}{COMPILED_MODEL}"
            attachment = attach_to_runner(model, profiler, name, shows_bricks=shows_bricks)
            _attachments[runner] = attachment
            if limits:
                log_once(f"{engine.name} {limits}")
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        reraise_host_error(error)
        _leave(runner, engine, error)
        return None
    return attachment if attachment is not None and attachment.is_attached else None


def _name_opaque_methods(attachment: Attachment, engine: Engine) -> None:
    """Record calls of the engine's `opaque_methods` while graphs are captured.

    They belong to the brick and layer of their module.
    """
    root = attachment.root()
    if root is None:
        return
    keys = {id(call.module()): call.key for call in attachment.steps.named}
    modules = modules_by_path(root)
    for path, module in modules.items():
        for owner, name, brick in engine.opaque_methods(module):
            key = brick or keys.get(id(module))
            parts = path.split(".")
            around = [keys.get(id(modules.get(".".join(parts[:count])))) for count in range(1, len(parts))]
            layer = next((one for one in around if isinstance(one, tuple)), None)
            setattr(owner, name, _noted(getattr(owner, name), [one for one in (layer, key) if one is not None]))


def _noted(original: Callable[..., Any], keys: list[Hashable]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        capture, spans = capture_here(), []
        if capture is not None and capture.open:
            try:
                spans = [capture.begin(key, None) for key in keys]
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                capture.failed(error)
        try:
            return original(*args, **kwargs)
        finally:
            if capture is not None:
                for span in reversed(spans):
                    try:
                        capture.end(span)
                    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                        capture.failed(error)

    return noted


def _leave(runner: Any, engine: Engine, error: Exception) -> None:
    _say_other(engine, error)
    with suppressed(TypeError):  # without a weak reference to the runner, its next run tries again
        _attachments[runner] = None


def _say_other(engine: Engine, error: Exception) -> None:
    log_once(f"{engine.name} is other than expected, and is not shown: {in_words(error)}")
