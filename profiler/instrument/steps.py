"""Steps of a model that is called: when each begins and ends, and when its bricks are timed.

Rules
- The outermost call of a model, or of a part of it that holds a stack, is a step. In `generate` of transformers it
  stays open until the token has been chosen, and begins where the last one ended: its inputs are prepared in it.
- Of a model that an engine's runner runs, the runner's call is the step: the model's own calls are none.
- Each thread, task and greenlet has its own open steps (`Unit`).
- Calls of modules are swapped in where a step is recorded, and out again at the next that is not.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.compiler import is_compiling

from cbtop.profiler.instrument import phases
from cbtop.profiler.instrument.phases import VERIFY, describe
from cbtop.profiler.instrument.wrapping import BrickCall, Call
from cbtop.profiler.positions import finder
from cbtop.protocol.vocabulary import BrickId

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.profiler import BrickProfiler
    from cbtop.profiler.steps import Step


class Generation:
    """One call of `generate`."""

    __slots__ = ("is_assisted", "last_end_ns", "length")

    def __init__(self) -> None:
        self.is_assisted = False  # a draft proposes tokens
        self.last_end_ns: int | None = None  # of its last step
        self.length: int | None = None  # of its sequences, when the last token was chosen


class Unit:
    """What is open in one thread, task or greenlet: steps, and calls of `generate` one inside another."""

    __slots__ = ("__weakref__", "generations", "open")

    def __init__(self) -> None:
        self.open: list[OpenStep] = []
        self.generations: list[Generation] = []

    @property
    def generation(self) -> Generation | None:
        """The innermost."""
        return self.generations[-1] if self.generations else None

    @property
    def profiler(self) -> BrickProfiler | None:
        """Who times what runs here now; None outside of recorded steps."""
        return self.open[-1].profiler if self.open and self.open[-1].is_recorded else None

    def end_generate(self) -> None:
        """Close what waited for a token that was never chosen."""
        ended = self.generations.pop()
        while self.open and self.open[-1].generation is ended:
            self.open[-1].close()


unit: Callable[[], Unit] = finder(Unit)


class Called(Protocol):
    """What is called as a step: a model, or a runner with its model."""

    def plain(self, /, *args: Any, **kwargs: Any) -> Any:
        """The call as it is without us."""

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        """What the call with these arguments does."""

    def may_wait(self, generation: Generation | None) -> bool:
        """Whether a token may be chosen after the call, in the same step."""


class OpenStep:
    """A step from the model's call to its end."""

    def __init__(self, steps: ModelSteps, unit: Unit, called: Called, args: Any, kwargs: Any) -> None:
        self.steps = steps
        self.profiler = steps.profiler
        self.is_running = True  # the model's call has not returned yet
        self.is_recorded = False
        self.generation = generation = unit.generation
        self.waits = called.may_wait(generation)  # for its token to be chosen
        self._unit = unit
        self._sampling: Any = None
        self.call = called.describe(args, kwargs, generation)
        self._step: Step = steps.profiler.step(self.call.phase, self.call.tokens, steps.model)

    def begin(self) -> None:
        self._step.__enter__()
        if self.waits and self.generation is not None and self.generation.last_end_ns is not None:
            self._step.start_ns = self.generation.last_end_ns
        self._unit.open.append(self)
        self.is_recorded = self.profiler.recording
        self.steps.follow(recorded=self.is_recorded)

    def begin_sampling(self) -> None:
        """The scores are looked at: from here on a token is chosen."""
        if self._sampling is None and self.is_recorded:
            self._sampling = self.profiler.start_brick(BrickId.SAMPLING)

    def end_sampling(self, length: int | None) -> None:
        """A token of each sequence, or several of one, has been chosen: the sequences are `length` long now."""
        if self._sampling is not None:
            self.profiler.stop_brick(self._sampling, self.call.sequences)
            self._sampling = None
        if self.generation is not None:
            before, self.generation.length = self.generation.length, length
            if length is not None and before is not None:
                self.accept(self.call.sequences * max(0, length - before))
        self.close()

    def accept(self, tokens: int) -> None:
        """So many tokens have come of it: those of a draft that were accepted, and one of each sequence."""
        if self.call.phase == VERIFY:
            self._step.tokens = tokens

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End it, and what is still open inside."""
        opened = self._unit.open
        while opened and opened[-1] is not self:
            opened[-1].close()
        if not opened:
            return
        opened.pop()
        self._step.__exit__(kind, error, trace)
        if self.generation is not None:
            self.generation.last_end_ns = self.steps.now_ns()
        if self.is_recorded:
            self.steps.ended()


class ModelSteps:
    """The steps of one model, and the calls that are timed in them."""

    def __init__(self, profiler: BrickProfiler, model: str, give_up: Callable[[Exception], None]) -> None:
        self.profiler = profiler
        self.model = model
        self.give_up = give_up
        self.calls: Sequence[BrickCall] = ()
        self.is_of_runner = False  # the model's own calls are no steps
        self._are_in = False
        self.after_fork()

    def after_fork(self) -> None:
        """In a child nobody holds the lock, and of the steps that ran those of this thread are left."""
        self._lock = threading.Lock()
        self._running = sum(step.steps is self and step.is_recorded for step in unit().open)

    def now_ns(self) -> int:
        return self.profiler._path.now_ns()

    def open_in(self, here: Unit) -> OpenStep | None:
        """The step of this model that is open there."""
        return next((step for step in reversed(here.open) if step.steps is self), None)

    def run_model(self, call: ModelCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model: as a step, unless it is a runner's, whose warm-ups call it outside of any."""
        if not self.is_of_runner:
            return self.run(call, args, kwargs)
        if self.open_in(unit()) is None:
            self.follow(recorded=False)
        return call.plain(*args, **kwargs)

    def run(self, call: Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model as a step; inside a step of its own it is only called."""
        here = unit()
        mine = self.open_in(here)
        if mine is not None:
            if mine.is_running:
                return call.plain(*args, **kwargs)
            mine.close()  # it waited for a token, and the next call has come
        try:
            step = OpenStep(self, here, call, args, kwargs)
            step.begin()
        except Exception as error:  # noqa: BLE001 - trouble of ours is not the host's
            self.give_up(error)
            return call.plain(*args, **kwargs)
        try:
            result = call.plain(*args, **kwargs)
        except BaseException:
            step.is_running = False
            step.close(*sys.exc_info())
            raise
        step.is_running = False
        if not step.waits:
            step.close()
        return result

    def follow(self, *, recorded: bool) -> None:
        """Swap the calls in for a step that is recorded, and out for one that is not, where no other is running."""
        with self._lock:
            if recorded:
                self._running += 1
            if recorded is self._are_in or (not recorded and self._running):
                return
            self._are_in = recorded
            for call in self.calls:
                if recorded:
                    call.swap_in()
                else:
                    call.swap_out()

    def ended(self) -> None:
        with self._lock:
            self._running -= 1


class ModelCall(Call):
    """Stands in for a call that is a step of its own where none of this model is open."""

    __slots__ = ("_steps", "can_generate", "has_cache")

    def __init__(self, module: nn.Module, steps: ModelSteps) -> None:
        super().__init__(module)
        self._steps = steps
        self.can_generate = hasattr(type(module), "generate")
        self.has_cache = _takes_a_cache(module)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or torch.jit.is_tracing():
            return self.plain(*args, **kwargs)
        return self._steps.run_model(self, args, kwargs)

    def describe(self, args: Any, kwargs: Any, generation: Generation | None) -> phases.Call:
        is_assisted = generation is not None and generation.is_assisted
        return describe(args, kwargs, has_cache=self.has_cache, is_assisted=is_assisted)

    def may_wait(self, generation: Generation | None) -> bool:
        return generation is not None and self.can_generate


def _takes_a_cache(module: nn.Module) -> bool:
    """Whether a cache is an argument of `module`, or of what it only wraps, and its attention looks back."""
    flags = [getattr(inner, "is_causal", getattr(inner, "is_decoder", None)) for inner in module.modules()]
    known = [flag for flag in flags if isinstance(flag, bool)]
    if known and not any(known):
        return False
    inner: nn.Module | None = module
    while inner is not None:
        parameters = inspect.signature(type(inner).forward).parameters
        if not parameters.keys().isdisjoint(_CACHE_ARGUMENTS):
            return True
        children = list(inner.children())
        inner = children[0] if len(children) == 1 else None  # what only wraps another passes on what it is given
    return False


_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state", "past_key_value", "layer_past")
