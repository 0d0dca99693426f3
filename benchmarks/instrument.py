"""What instrumenting an unedited model costs a decode step: a 12-layer llama, eager, one sequence, one thread.

Ratios of thread CPU time, round by round, to the same model bare; a second bare run is the control. Beside it forward
hooks, `record_function` around each leaf and Kineto (torch.profiler, CPU) on the same step. A step is one call with a
cache of 64 positions. Then the tokens/s that are shown, beside those by the wall's clock, of threads that generate.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.base import Figure, Ratio
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS = 31
STEPS = 8  # of a round: of so many recorded steps one looks whether the model is what it was
# What attaching pays once: wrappers are swapped in, nodes defined; classes change, which the interpreter learns anew.
WARM_UP = 6
MOST_STEPS = 60  # of a round, of which one is recorded
TOKENS = 64  # that a thread generates
LEARN_STEPS = 400  # in which the governor finds out what it may record
BARE, CONTROL = "bare model", "bare model again"


def run() -> list[Figure]:
    try:
        import torch
        import transformers  # noqa: F401 - whether it is there
    except ImportError:
        print("  torch and transformers are not installed: pip install -e '.[torch]'", file=sys.stderr)
        return []
    torch.set_num_threads(1)
    figures = [figure for hidden in (512, 64) for figure in _of_size(hidden)]
    return figures + [_tokens(threads) for threads in (1, 4)]


def _of_size(hidden: int) -> list[Figure]:
    step = _decoder(hidden)
    governed = GovernedProfiler(1.0, recorder=RingRecorder())
    end = _attached(step.model, governed)
    for _ in range(LEARN_STEPS):
        step()
    end()
    default = f"default, one step in {governed.governor.every}"
    disabled, every = BrickProfiler(enabled=False), BrickProfiler()
    ways: dict[str, Callable[[], Callable[[], None]]] = {
        BARE: lambda: _nothing,
        CONTROL: lambda: _nothing,
        "disabled": lambda: _attached(step.model, disabled),
        default: lambda: _attached(step.model, governed),
        "every step": lambda: _attached(step.model, every),
        "forward hooks, every step": lambda: _hooks(step.model),
        "record_function, every step": lambda: _record_functions(step.model),
        "Kineto, every step": _kineto,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, begin in ways.items():
            end = begin()
            for _ in range(WARM_UP):
                step()
            steps = min(MOST_STEPS, governed.governor.every) if name == default else STEPS
            begun_ns = time.thread_time_ns()
            for _ in range(steps):
                step()
            if turn:
                times[name].append((time.thread_time_ns() - begun_ns) / steps / 1000)
            end()
    size = f"hidden {hidden}, 12 layers"
    return [Figure(f"{BARE}, {size}", statistics.median(times[BARE]), "µs/step")] + [
        Figure(f"{name}, {size}", statistics.median(found), "µs/step", BARE, Ratio.of(found, times[BARE]))
        for name, found in times.items()
        if name != BARE
    ]


class _decoder:  # noqa: N801 - a function that keeps its model
    def __init__(self, hidden: int) -> None:
        import torch
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=1000,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        self.model = LlamaForCausalLM(config).eval()
        self._words = torch.ones(1, 1, dtype=torch.long)
        self._cache = DynamicCache(config=config)
        self._grad = torch.no_grad
        with self._grad():
            self.model(torch.ones(1, 64, dtype=torch.long), past_key_values=self._cache)

    def __call__(self) -> None:
        with self._grad():
            self.model(self._words, past_key_values=self._cache)
        self._cache.crop(-1)


def _nothing() -> None:
    pass


def _attached(model: Any, profiler: BrickProfiler) -> Callable[[], None]:
    from cbtop.profiler.instrument import attach

    return attach(model, profiler).detach


def _hooks(model: Any) -> Callable[[], None]:
    began: list[int] = []

    def before(module: Any, args: Any) -> None:
        began.append(time.perf_counter_ns())

    def after(module: Any, args: Any, result: Any) -> None:
        began.pop()

    return _hooked(model, before, after)


def _hooked(model: Any, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Let these run before and after each leaf, until what is given back is called."""
    handles = [
        handle
        for module in model.modules()
        if next(module.children(), None) is None
        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _record_functions(model: Any) -> Callable[[], None]:
    from torch.profiler import record_function

    open_: list[AbstractContextManager[Any]] = []

    def before(module: Any, args: Any) -> None:
        open_.append(record_function(type(module).__name__))
        open_[-1].__enter__()

    def after(module: Any, args: Any, result: Any) -> None:
        open_.pop().__exit__(None, None, None)

    return _hooked(model, before, after)


def _kineto() -> Callable[[], None]:
    from torch.profiler import ProfilerActivity, profile

    running = profile(activities=[ProfilerActivity.CPU])
    running.start()
    return running.stop


def _tokens(threads: int) -> Figure:
    """Tokens a second, as they are shown, of threads that generate; against the wall's clock."""
    import torch

    model = _decoder(64).model
    profiler = BrickProfiler()
    end = _attached(model, profiler)

    def generate() -> None:
        words = torch.ones(1, 8, dtype=torch.long)
        model.generate(words, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True)

    generate()
    shown, measured = [], []
    for _ in range(5):
        profiler.reset()
        running = [threading.Thread(target=generate) for _ in range(threads)]
        begun_ns = time.perf_counter_ns()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        wall_ns = time.perf_counter_ns() - begun_ns
        measured.append(threads * (8 + TOKENS - 1) / wall_ns * 1e9)  # a step's tokens are those that it is given
        shown.append(profiler.tokens_per_sec or 0.0)
    end()
    what = f"tokens/s shown, {threads} threads that generate"
    return Figure(what, statistics.median(shown), "tokens/s", "the wall's clock", Ratio.of(shown, measured))
