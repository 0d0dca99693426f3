"""What instrumenting costs an eager decode step on a CUDA device: a llama of 16 layers of 4096, bf16, batch 1.

Wall time, the device waited for at the end of each round; ratios to the same model bare, round by round, in rounds
that take turns; a second bare run is the control. Beside it torch.profiler (CPU and CUDA) on the same step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.base import Ratio
from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

ROUNDS, STEPS, MOST_STEPS, LEARN_STEPS = 9, 10, 120, 600


def main() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=16, num_attention_heads=32, vocab_size=32000
    )
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
        word = torch.randint(0, 32000, (1, 1))
    for _ in range(20):
        model(word)
    governed = GovernedProfiler(1.0, recorder=RingRecorder())
    every = BrickProfiler(recorder=RingRecorder())
    attachment = attach(model, governed)
    for _ in range(LEARN_STEPS):
        model(word)
    attachment.detach()
    steps = min(MOST_STEPS, max(STEPS, governed.governor.every))

    def attached(profiler: BrickProfiler) -> Callable[[], object]:
        return attach(model, profiler).detach

    def profiled() -> Callable[[], object]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        return profile.stop

    ways: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
        "bare": (lambda: lambda: None, steps),
        "bare again": (lambda: lambda: None, steps),
        f"default, 1 %: one step in {governed.governor.every}": (lambda: attached(governed), steps),
        "every step": (lambda: attached(every), STEPS),
        "torch.profiler": (profiled, STEPS),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):
        for way, (begin, count) in ways.items():
            end: Any = begin()
            model(word)
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            for _ in range(count):
                model(word)
            torch.cuda.synchronize()
            if turn:
                times[way].append((time.perf_counter() - begun_s) / count)
            end()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for way, found in times.items():
        ratio = Ratio.of(found, times["bare"])
        print(
            f"{way}: {1e3 * statistics.median(found):.3f} ms, {ratio.median:.4f}x ({ratio.low:.4f}-{ratio.high:.4f})"
        )


if __name__ == "__main__":
    sys.exit(main())
