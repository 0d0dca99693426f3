"""The cost of instrumenting an eager decode step on a CUDA device: a llama of 16 layers of 4096, bf16, batch 1.

Results are ratios of wall time to the same model bare, each with its 95 % interval. They come from short blocks that
take turns (benchmarks/beside_bare.py). The program waits for the end of each step, as an engine must that reads the
step's token. The control is one more bare block. If its interval does not contain 1, or is wider than the effect, do
not trust the other results. The cost of the default is derived from its plain steps and from the additional time of
recorded steps. That time includes inserting and removing the recording code. At the end, torch.profiler (CPU and
CUDA) is measured on the model without cbtop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.beside_bare import Variant, median_of, record_when_told, run_beside_bare, run_beside_plain
from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.governor import GovernedProfiler, Sort
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

SECONDS, RECORDED_SECONDS, SETTLE_STEPS, TIMED_STEPS = 65, 15, 6, 8
LEARN_STEPS, PEER_ROUNDS, PEER_STEPS = 600, 10, 8


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=16, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).eval()


def _nothing() -> None:
    pass


def main() -> None:
    import transformers

    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    word = torch.randint(0, 32000, (1, 1), device="cuda")
    model = llama()
    governed = GovernedProfiler(1.0, recorder=RingRecorder())
    every, disabled = BrickProfiler(recorder=RingRecorder()), BrickProfiler(enabled=False)

    def step() -> None:
        model(word)
        torch.cuda.synchronize()

    def attached(profiler: BrickProfiler) -> Callable[[], None]:
        return attach(model, profiler).detach

    def bare() -> Callable[[], None]:
        attached(disabled)()
        return _nothing

    end = attached(governed)
    for _ in range(LEARN_STEPS):
        step()
    end()
    governor, every_so_many = governed.governor, governed.governor.every
    tell = record_when_told(governor)

    tell(False)
    plain = Variant(partial(attached, governed))
    variants = {
        "bare again": Variant(bare),
        "disabled": Variant(partial(attached, disabled)),
        "default, a plain step": plain,
        "every step": Variant(partial(attached, every)),
    }
    bare_ns = run_beside_bare(
        step,
        bare,
        list(variants.values()),
        seconds=SECONDS,
        settle=SETTLE_STEPS,
        timed=TIMED_STEPS,
        clock_ns=time.perf_counter_ns,
    )
    end = plain.begin()
    one = run_beside_plain(step, tell, seconds=RECORDED_SECONDS, clock_ns=time.perf_counter_ns)
    end()
    ratios = {name: median_of(variant) for name, variant in variants.items()}
    ratios["default, a step that is recorded, with what those after it pay"] = median_of(
        one, made=lambda extra: 1 + extra
    )
    ratios[f"default, one step in {every_so_many} (derived)"] = median_of(
        plain, one, made=lambda plain, extra: plain + extra / every_so_many
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"  bare {bare_ns / 1e6:.3f} ms a step; in brackets 95 % intervals")
    for name, ratio in ratios.items():
        print(f"  {name:50} {ratio.median:.4f} x ({ratio.low:.4f} to {ratio.high:.4f})")
    for (name, _), kind in governor.kinds.items():
        costs = {sort.name.lower(): kind.estimate(sort) for sort in Sort if kind.counts[sort]}
        print(f"  {name}: {kind.seen} steps, paid in ns: {costs}")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiled: list[float] = []
    for _ in range(PEER_ROUNDS):
        without = _timed_ns(step)
        with torch.profiler.profile(activities=activities):
            profiled.append(_timed_ns(step) / without)
    print(f"  torch.profiler {statistics.median(profiled):.4f} x")


def _timed_ns(step: Callable[[], None]) -> int:
    begun_ns = time.perf_counter_ns()
    for _ in range(PEER_STEPS):
        step()
    return time.perf_counter_ns() - begun_ns


if __name__ == "__main__":
    main()
