"""What instrumenting costs an eager decode step on a CUDA device: a llama of 16 layers of 4096, bf16, batch 1.

Wall time of rounds that take turns, the device waited for at the end of each: a model without cbtop (twice: their
ratio is the noise), one under `--overhead 1%`, and one with every step recorded. The speed of a host changes from
one second to the next, so rounds are short. Ratios are medians over the rounds, and of means over all of them, for
what the default costs comes in single steps. Behind these torch.profiler (CPU and CUDA) on the model without cbtop.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.base import Ratio
from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS, STEPS, LEARN_STEPS, PEER_ROUNDS = 60, 8, 600, 10


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=16, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).eval()


def timed_ms(model: Any, word: Any, steps: int = STEPS) -> float:
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    for _ in range(steps):
        model(word)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun_s) / steps


def main() -> None:
    import transformers

    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    word = torch.randint(0, 32000, (1, 1), device="cuda")
    bare, default, every = llama(), llama(), llama()
    governed = GovernedProfiler(1.0, recorder=RingRecorder())
    attach(default, governed)
    attach(every, BrickProfiler(recorder=RingRecorder()))
    for _ in range(20):
        bare(word)
        every(word)
    for _ in range(LEARN_STEPS):
        default(word)
    kinds = {"bare": bare, "bare again": bare, "default": default, "every step": every}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for at in range(ROUNDS):
        names = list(kinds)
        for name in names[at % len(names) :] + names[: at % len(names)]:
            found[name].append(timed_ms(kinds[name], word))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name, times in found.items():
        ratio, mean = Ratio.of(times, found["bare"]), sum(times) / sum(found["bare"])
        print(
            f"  {name:14} {statistics.median(times):7.3f} ms  {ratio.median:.4f} x "
            f"(half of the rounds between {ratio.low:.4f} and {ratio.high:.4f}; of means {mean:.4f})"
        )
    print(f"  one step in {governed.governor.every}")
    for (name, _), kind in governed.governor._kinds.items():
        costs = {sort.value: kind.estimate(sort) for sort, count in kind.counts.items() if count}
        print(f"  {name}: {kind.seen} steps, paid in ns: {costs}")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiled: list[float] = []
    for _ in range(PEER_ROUNDS):
        without = timed_ms(bare, word)
        with torch.profiler.profile(activities=activities):
            profiled.append(timed_ms(bare, word) / without)
    print(f"  torch.profiler {statistics.median(profiled):.4f} x")


if __name__ == "__main__":
    main()
