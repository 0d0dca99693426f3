"""Measure the cost of the guard (a check for NaN and Inf) in a recorded step on a CPU, for an eager 12-layer llama
with one thread.

Results are ratios of the thread's CPU time with cbtop to its CPU time without, each with its 95 % interval. They come
from short blocks that take turns (benchmarks/beside_bare.py).

Three steps are measured: a prompt of 128 tokens, a decode step, and a decode step of a model so small that the guard
must be expensive. The control is one more bare block. The line "one step in 16" is derived from the step that is
recorded and guarded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.base import Figure
from benchmarks.beside_bare import Variant, median_of, run_beside_bare
from cbtop.profiler.profiler import BrickProfiler

SECONDS = 40
SETTLE_STEPS = 4  # Each block begins with this many steps that are not timed.
TIMED_STEPS = 4
EVERY = 16
# the measured steps: (name, hidden size of the model, tokens)
STEPS = (("a prompt of 128 tokens", 512, 128), ("decode", 512, 1), ("decode", 64, 1))
BARE = "bare model"


def run() -> list[Figure]:
    try:
        import torch
        import transformers  # noqa: F401 - checks whether it is installed
    except ImportError:
        print("  torch and transformers are not installed: pip install -e '.[torch]'", file=sys.stderr)
        return []
    torch.set_num_threads(1)
    print("  in brackets: 95 % intervals", file=sys.stderr)
    return [figure for name, hidden, tokens in STEPS for figure in _of_step(name, hidden, tokens)]


def _of_step(name: str, hidden: int, tokens: int) -> list[Figure]:
    model, step = _model(hidden, tokens)
    disabled, every = BrickProfiler(enabled=False), BrickProfiler()

    def bare() -> Callable[[], None]:
        _attached(model, disabled, "")()
        return lambda: None

    variants = {
        "bare model again": Variant(bare),
        "every step recorded": Variant(lambda: _attached(model, every, "")),
        "every step recorded and guarded": Variant(lambda: _attached(model, every, "log")),
    }
    bare_ns = run_beside_bare(
        step, bare, list(variants.values()), seconds=SECONDS, settle=SETTLE_STEPS, timed=TIMED_STEPS
    )
    ratios = {what: median_of(variant) for what, variant in variants.items()}
    ratios[f"one step in {EVERY} recorded and guarded (derived)"] = median_of(
        variants["every step recorded and guarded"], made=lambda ratio: 1 + (ratio - 1) / EVERY
    )
    size = f"{name}, hidden {hidden}"
    return [Figure(f"{BARE}, {size}", bare_ns / 1000, "µs/step")] + [
        Figure(f"{what}, {size}", bare_ns / 1000 * ratio.median, "µs/step", BARE, ratio)
        for what, ratio in ratios.items()
    ]


def _model(hidden: int, tokens: int) -> tuple[Any, Callable[[], None]]:
    """Return a model, and a function that runs it on `tokens` tokens. Its cache already has 64 positions."""
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
    model, cache = LlamaForCausalLM(config).eval(), DynamicCache(config=config)
    words = torch.ones(1, tokens, dtype=torch.long)
    with torch.no_grad():
        model(torch.ones(1, 64, dtype=torch.long), past_key_values=cache)

    def step() -> None:
        with torch.no_grad():
            model(words, past_key_values=cache)
        cache.crop(-tokens)

    return model, step


def _attached(model: Any, profiler: BrickProfiler, guard: str) -> Callable[[], None]:
    from cbtop.profiler.instrument import attach

    return attach(model, profiler, guard=guard).detach
