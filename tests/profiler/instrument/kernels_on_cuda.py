"""A program with a model on CUDA. It records kernels with cbtop, then with torch.profiler, and prints both as JSON.

CUPTI has one owner per process and torch.profiler never releases it, so each test runs it in its own process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.lean import Engine, Lean
from cbtop.profiler.device.kernel_burst import short
from cbtop.profiler.instrument import attach
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.kernel_messages import KernelBurst
from cbtop.protocol.messages import Node
from cbtop.protocol.requests import RequestSlot

STEPS = 5
SIZES: dict[str, Any] = {"hidden": 1024, "inner": 2048, "heads": 8, "layers": 4, "context": 64, "vocabulary": 1000}


class Case:
    def __init__(self, directory: str, *, is_captured: bool) -> None:
        torch.manual_seed(0)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = Lean(**SIZES)
        self.recorder = RingRecorder(Path(directory))
        self.profiler = BrickProfiler(recorder=self.recorder, sample_every=1000)
        self.attachment = attach(self.model, self.profiler)
        self.engine = Engine(self.model, 1)
        self.is_captured = is_captured
        if is_captured:
            self.engine.capture()
        self.run(20)
        self.recorder.open()
        assert self.recorder.path is not None
        self.asker = RequestSlot(self.recorder.path)

    def step(self) -> torch.Tensor:
        if self.is_captured:
            self.engine.step()
            return self.engine.scores
        scores: torch.Tensor = self.model(self.engine.words, self.engine.at)
        return scores

    def run(self, times: int) -> list[torch.Tensor]:
        found = []
        for layer in self.model.layers:  # Each run begins with an empty KV cache.
            layer.self_attn.keys.zero_()
            layer.self_attn.values.zero_()
        for at in range(times):
            self.engine.at.fill_(at % 8)
            self.engine.words.fill_(at + 3)
            found.append(self.step().clone())
        torch.cuda.synchronize()
        return found

    def launch_us(self, times: int = 300) -> float:
        """Return the time in µs that the host needs to launch a step, with recording switched off."""
        self.profiler.disable()
        taken = []
        for _ in range(times):
            begun_ns = time.perf_counter_ns()
            self.step()
            taken.append(time.perf_counter_ns() - begun_ns)
            torch.cuda.synchronize()
        self.profiler.enable()
        return median(taken) / 1e3

    def burst(self, steps: int = STEPS) -> dict[str, Any]:
        self.asker.ask(steps)
        begun_s = time.perf_counter()
        outputs = self.run(steps)
        took_s = time.perf_counter() - begun_s
        answer = self.asker.answer()
        state = None if answer is None else answer.state.name
        ring = self.recorder.path
        assert ring is not None
        said = CatalogReader(ring.with_suffix(".catalog")).read()
        nodes = {one.id: one for one in said if isinstance(one, Node)}
        bursts = [one for one in said if isinstance(one, KernelBurst)]
        kernels, bricks = {}, set()
        summed: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for one in bursts[-1].kernels if bursts else ():
            node = nodes[one.node]
            summed[node.name][0] += one.launches / one.steps
            summed[node.name][1] += one.launches / one.steps * one.mean_ns
            bricks.add(nodes[node.parent or 0].name)
        kernels = {name: [count, total / count / 1e3] for name, (count, total) in summed.items()}
        last = bursts[-1] if bursts else None
        return {
            "state": state,
            "ms": took_s * 1e3,
            "kernels": kernels,
            "bricks": sorted(bricks),
            "unplaced": last.unplaced if last else None,
            "lost": last.lost if last else None,
            "left_out": last.left_out if last else None,
            "outputs": outputs,
        }

    def profiled(self, steps: int = 20) -> dict[str, list[float]]:
        """Return the mean times of kernels as torch.profiler measures them. The form is that of cbtop's times."""
        self.profiler.disable()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as kineto:
            for at in range(steps):
                del at
                self.step()
            torch.cuda.synchronize()
        self.profiler.enable()
        found: dict[str, list[float]] = defaultdict(list)
        for event in kineto.events():
            name = event.name
            if event.device_time and not name.startswith(("Memcpy", "Memset", "Activity Buffer", "aten::", "cuda")):
                found[short(name)].append(event.device_time)
        return {name: [len(times) / steps, mean(times)] for name, times in found.items()}


def main(mode: str, directory: str) -> None:
    case = Case(directory, is_captured="captured" in mode)
    found: dict[str, Any] = {}
    if "taken" in mode:
        found["profiled"] = case.profiled()
        found["burst"] = case.burst()
        found["burst"].pop("outputs")
        print(json.dumps(found))  # noqa: T201
        return
    expected = case.run(STEPS)
    found["before_us"] = [case.launch_us(), case.launch_us()]
    free_bytes = torch.cuda.mem_get_info()[0]
    found["burst"] = case.burst()
    found["after_us"] = [case.launch_us(), case.launch_us()]
    outputs = found["burst"].pop("outputs")
    found["same"] = all(torch.equal(one, other) for one, other in zip(expected, outputs, strict=True))
    again = case.burst()
    found["again"] = {key: again[key] for key in ("state", "ms", "unplaced", "lost")}
    found["same_kernels"] = sorted(again["kernels"]) == sorted(found["burst"]["kernels"])
    found["left_bytes"] = free_bytes - torch.cuda.mem_get_info()[0]
    found["same_after"] = all(torch.equal(one, other) for one, other in zip(expected, case.run(STEPS), strict=True))
    found["profiled"] = case.profiled()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
