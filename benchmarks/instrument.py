"""Measure the cost of instrumenting an unedited model for a decode step: an eager 12-layer llama, one sequence, one
thread.

Results are ratios of the thread's CPU time with cbtop to its CPU time without, each with its 95 % interval. They come
from short blocks that take turns (benchmarks/beside_bare.py). Variants with a ratio near 1 take turns first, those
with a far higher ratio after them.

Each block, even a bare one, begins with attaching cbtop and ends with nothing attached. This makes the interpreter
forget what it has learnt of classes. The control is one more bare block. If its interval does not contain 1, or is
wider than the effect, do not trust the other results. Intervals are narrower on a core of its own: `taskset -c 0
python -m benchmarks instrument`.

The peers are forward hooks, `record_function` around each leaf module, and Kineto (torch.profiler, CPU) on the same
step. A step is one call with a cache of 64 positions.

The cost of the default is derived from its plain steps, from the time that a recorded step adds to the steps around
it, and from the cost of deciding which steps to record. The last figure compares the displayed tokens/s of generating
threads with the wall clock.
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
from benchmarks.beside_bare import Variant, median_of, record_when_told, run_beside_bare, run_beside_plain
from cbtop.profiler.instrument.governor import LOOK_NS, LOOK_STEPS, GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

NEAR_SECONDS = {512: 100, 64: 40}  # for each hidden size: seconds for measuring the variants with ratios near 1
SECONDS = {512: 50, 64: 20}
RECORDED_SECONDS = {512: 40, 64: 15}
SETTLE_STEPS = 6  # Each block begins with this many steps that are not timed.
TIMED_STEPS = 6
SELDOM = 6  # A peer with a ratio far above 1 runs in only one of this many cycles.
TOKENS = 64  # number of tokens that each thread generates
LEARN_STEPS = 400  # After this many steps, the governor knows how many steps it may record.
BARE = "bare model"


def run() -> list[Figure]:
    try:
        import torch
        import transformers  # noqa: F401 - checks whether it is installed
    except ImportError:
        print("  torch and transformers are not installed: pip install -e '.[torch]'", file=sys.stderr)
        return []
    torch.set_num_threads(1)
    print("  in brackets: 95 % intervals; of tokens/s the middle half", file=sys.stderr)
    figures = [figure for hidden in SECONDS for figure in _of_size(hidden)]
    return figures + [_tokens(threads) for threads in (1, 4)]


def _of_size(hidden: int) -> list[Figure]:
    step = _decoder(hidden)
    governed = GovernedProfiler(1.0, recorder=RingRecorder())
    end = _attached(step.model, governed)
    for _ in range(LEARN_STEPS):
        step()
    end()
    governor, every_so_many = governed.governor, governed.governor.every
    tell = record_when_told(governor)
    disabled, every = BrickProfiler(enabled=False), BrickProfiler()

    def bare() -> Callable[[], None]:
        _attached(step.model, disabled)()
        return _nothing

    def beside(switch: Callable[[], Callable[[], None]]) -> Callable[[], Callable[[], None]]:
        def begin() -> Callable[[], None]:
            bare()
            return switch()

        return begin

    tell(False)
    plain = Variant(lambda: _attached(step.model, governed))
    near = {
        "bare model again": Variant(bare),
        "disabled": Variant(lambda: _attached(step.model, disabled)),
        "default, a plain step": plain,
    }
    far = {
        "every step": Variant(lambda: _attached(step.model, every)),
        "forward hooks, every step": Variant(beside(lambda: _hooks(step.model)), SELDOM),
        "record_function, every step": Variant(beside(lambda: _record_functions(step.model)), SELDOM),
        "Kineto, every step": Variant(beside(_kineto), SELDOM),
    }
    for variants, seconds in ((near, NEAR_SECONDS), (far, SECONDS)):
        bare_ns = run_beside_bare(
            step, bare, list(variants.values()), seconds=seconds[hidden], settle=SETTLE_STEPS, timed=TIMED_STEPS
        )
    end = plain.begin()
    one = run_beside_plain(step, tell, seconds=RECORDED_SECONDS[hidden])
    end()
    ratios = {name: median_of(variant) for name, variant in (near | far).items()}
    ratios["default, a step that is recorded, with what those after it pay"] = median_of(
        one, made=lambda extra: 1 + extra
    )
    look = governor.look_ns / max(LOOK_STEPS, LOOK_NS / bare_ns) / bare_ns
    ratios[f"default, one step in {every_so_many} (derived)"] = median_of(
        plain, one, made=lambda plain, extra: plain + extra / every_so_many + look
    )
    size = f"hidden {hidden}, 12 layers"
    return [Figure(f"{BARE}, {size}", bare_ns / 1000, "µs/step")] + [
        Figure(f"{name}, {size}", bare_ns / 1000 * ratio.median, "µs/step", BARE, ratio)
        for name, ratio in ratios.items()
    ]


class _decoder:  # noqa: N801 - used like a function that keeps its model
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
    """Call `before` and `after` around each leaf module, until the returned function is called."""
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
    """Compare the tokens/s that cbtop displays with the true tokens/s by the wall clock, while several threads
    generate text.
    """
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
        # Count the input tokens of each step, as cbtop does.
        measured.append(threads * (8 + TOKENS - 1) / wall_ns * 1e9)
        shown.append(profiler.tokens_per_sec or 0.0)
    end()
    what = f"tokens/s shown, {threads} threads that generate"
    return Figure(what, statistics.median(shown), "tokens/s", "the wall's clock", Ratio.of(shown, measured))
