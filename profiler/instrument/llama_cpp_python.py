"""Follows llama-cpp-python under `cbtop run`: each call of llama_decode is a step with the bricks of its graphs.

Rules
- CONTRACT lists the methods and parameters of llama-cpp-python that this file needs, and SEEN_IN the versions that it
  was compared with. If a method has other parameters, nothing is wrapped, and one line says so.
- A context gets cbtop's callback when it is made, unless the program has set its own. The callback declines all
  nodes, except in recorded steps.
- A step is one call of `LlamaContext.decode`. With a device, llama_decode returns before the device has computed.
  Then the step waits for it, as the choice of a token does next.
- The choice of a token is the brick Sampling, outside of steps.
- The program's arguments decide the phase: encode if the context computes embeddings, decode for one token at a later
  position, prefill from position 0, else extend.
- This file does not need torch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.held_steps import Part
from cbtop.profiler.instrument.engine_methods import Contract, owners_of
from cbtop.profiler.instrument.llama_cpp import DECODE, ENCODE, PREFILL, GraphParts, bricks_of, ggml_functions
from cbtop.profiler.instrument.trouble import log_once, log_own_error
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol import clock
from cbtop.protocol.vocabulary import WARM_UP, BrickCategory, BrickId

SEEN_IN = ("0.3.36",)  # the versions of llama-cpp-python that CONTRACT was compared with
CONTEXT, HIGH_LEVEL = ("llama_cpp._internals", "LlamaContext"), ("llama_cpp.llama", "Llama")
# (module, class) -> {method to wrap: its first parameters after `self`}.
CONTRACT: Contract = {
    CONTEXT: {"__init__": ("model", "params"), "decode": ("batch",)},
    HIGH_LEVEL: {"sample": ()},
}
EXTEND = "extend"
SAMPLING = BrickDefinition("Sampling", BrickCategory.OTHER, BrickId.SAMPLING, backend="llama.cpp")

Function = Callable[..., Any]
_contexts: weakref.WeakKeyDictionary[Any, Context] = weakref.WeakKeyDictionary()  # by LlamaContext


def follow(profiler: BrickProfiler) -> None:
    """Wrap the methods in CONTRACT. llama_cpp must be imported."""
    owners = owners_of(CONTRACT, "llama-cpp-python", SEEN_IN, "it is not shown")
    if not owners:
        return
    wrappers = {
        CONTEXT: {"__init__": _constructs, "decode": _decodes},
        HIGH_LEVEL: {"sample": _samples},
    }
    for key, methods in wrappers.items():
        for name, wrapper in methods.items():
            original = vars(owners[key])[name]
            setattr(owners[key], name, functools.wraps(original)(wrapper(original, profiler)))


class Context:
    """A context of llama.cpp with cbtop's callback."""

    def __init__(self, library: ModuleType) -> None:
        from cbtop.profiler import _llama_cpp as compiled  # may not be built

        self._compiled = compiled
        self._parts = GraphParts()
        # Only a build with a device returns before the work is done.
        self.synchronize: Function | None = (
            library.llama_synchronize if library.llama_supports_gpu_offload() else None
        )
        name_of, operation_of, elements_of, rows_of = ggml_functions()
        self.function, self.user_data = compiled.create(name_of, operation_of, elements_of, rows_of, 1, -1)
        compiled.pause(self.user_data)

    def record(self) -> None:
        """Store the nodes of the graphs that this thread computes from now on."""
        self._compiled.resume(self.user_data)

    def recorded(self) -> list[Part]:
        """Stop storing nodes. Returns the bricks of the stored graphs."""
        self._compiled.pause(self.user_data)
        _, graphs = self._compiled.take(self.user_data)
        return [part for *_, nodes in sorted(graphs) for part in self._parts.of(bricks_of(nodes))]


def _guarded(do: Callable[..., Any], *args: Any) -> Any:
    """Call `do`. If it fails, log one line, and return None."""
    try:
        return do(*args)
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, "llama.cpp, or a part of it, is not shown")
        return None


def _constructs(original: Function, profiler: BrickProfiler) -> Function:
    def with_callback(self: Any, params: Any) -> Any:
        library = sys.modules["llama_cpp.llama_cpp"]
        if params.cb_eval:
            log_once("a context of llama.cpp has a callback of its own: its steps are shown, its bricks are not")
            return params
        context = Context(library)
        own = type(params).from_buffer_copy(params)
        own.cb_eval = library.ggml_backend_sched_eval_callback(context.function)
        own.cb_eval_user_data = context.user_data
        _contexts[self] = context
        return own

    def construct(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if "params" in kwargs:
            params = _guarded(with_callback, self, kwargs["params"])
            kwargs["params"] = kwargs["params"] if params is None else params
        original(self, *args, **kwargs)

    return construct


def described(context: Any, batch: Any) -> tuple[str, int, int, int]:
    """Return phase, tokens, sequences and cached positions of a LlamaBatch for a LlamaContext."""
    tokens = batch.n_tokens
    first = batch.pos[0] if tokens else 0
    sequences = 1 + batch.seq_id[tokens - 1][0] - batch.seq_id[0][0] if tokens else 0
    if context.params.embeddings:
        return ENCODE, tokens, sequences, 0
    if not first:
        return PREFILL, tokens, sequences, 0
    return DECODE if tokens == 1 else EXTEND, tokens, sequences, first


def _decodes(original: Function, profiler: BrickProfiler) -> Function:
    warm_ups = profiler.parts.steps.warm_ups

    def begin(self: Any, batch: Any) -> tuple[Any, str, Context | None, bool]:
        phase, tokens, sequences, cached = described(self, batch.batch)
        step = profiler.step(phase if warm_ups is None else warm_ups.named(phase, ""), tokens)
        step.sequences, step.cached = sequences, cached
        step.__enter__()
        context = _contexts.get(self)
        is_recorded = context is not None and profiler.recording
        if is_recorded and context is not None:
            step.wait()
            context.record()
        return step, phase, context, is_recorded

    def end(step: Any, phase: str, context: Context | None, is_recorded: bool, began_ns: int) -> None:
        parts = context.recorded() if is_recorded and context is not None else None
        step.__exit__(*sys.exc_info())
        if is_recorded:
            step.told(parts)
        if warm_ups is not None and step.name.endswith(WARM_UP):
            warm_ups.took(phase, "", clock.perf_counter_ns() - began_ns, step.tokens)

    def decode(self: Any, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        began_ns = clock.perf_counter_ns()
        begun = _guarded(begin, self, batch)
        if begun is None:
            return original(self, batch, *args, **kwargs)
        try:
            result = original(self, batch, *args, **kwargs)
            context = begun[2]
            if context is not None and context.synchronize is not None:
                _guarded(context.synchronize, self.ctx)
        finally:
            _guarded(end, *begun, began_ns)
        return result

    return decode


def _samples(original: Function, profiler: BrickProfiler) -> Function:
    def sample(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        timer = _guarded(profiler.start_brick, SAMPLING)
        try:
            return original(self, *args, **kwargs)
        finally:
            if timer is not None:
                _guarded(profiler.stop_brick, timer, 1)

    return sample
