"""Train a small model in one of several kinds of loops, and print the times of the parts of a step as JSON.

    python training_loops.py LOOP [--steps N] [--device cuda] [--no-clocks | --kernels]

The times are those of the program's own clocks: the median and the mean over the latest steps, at most 64. A GPU is
synchronised before each reading of a clock. `--no-clocks` runs the loop without clocks, as most programs do.
`--kernels` prints the times of the kernels of each part: torch.profiler sees them in the last 20 steps. The time of a
whole step is then measured in the steps before, by the wall clock.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from itertools import pairwise
from pathlib import Path

import torch
from blocks import GPT
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

LATEST = 64  # the times are those of at most this many of the latest steps
TRACED_STEPS = 20  # torch.profiler sees the kernels of this many steps


class Clocks:
    """Times the parts of a step. If calls are nested, the time counts for the inner one."""

    def __init__(self, device, is_on=True):
        self.device, self.is_on = device, is_on
        self.steps = defaultdict(lambda: deque(maxlen=LATEST))
        self.parts, self.inside_s = defaultdict(float), [0.0]
        self.begun_s = self.now_s()

    def now_s(self):
        if self.is_on and self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, part, call, *args, **keywords):
        if not self.is_on:
            return call(*args, **keywords)
        begun_s = self.now_s()
        self.inside_s.append(0.0)
        result = call(*args, **keywords)
        took_s = self.now_s() - begun_s
        self.parts[part] += took_s - self.inside_s.pop()
        self.inside_s[-1] += took_s
        return result

    def ended(self, phase="train"):
        """End a step, and begin the next. `phase` is the name of its kind of step."""
        now_s = self.now_s()
        if self.is_on:
            self.steps[phase].append({**self.parts, "step": now_s - self.begun_s})
        self.begun_s = now_s
        self.parts.clear()

    def times_ms(self, phase):
        """Return the number of steps, and the median and mean time (ms) of each part and of the step."""
        steps = self.steps[phase]
        names = dict.fromkeys(name for step in steps for name in step)
        each_ms = {name: [1e3 * step.get(name, 0.0) for step in steps] for name in names}
        p50_ms, mean_ms = (
            {name: of(ms) for name, ms in each_ms.items()} for of in (statistics.median, statistics.mean)
        )
        return {"steps": len(steps), "p50_ms": p50_ms, "mean_ms": mean_ms}

    def all_times_ms(self):
        """Return the times of `times_ms` for each phase."""
        return {phase: self.times_ms(phase) for phase in self.steps}


class Kernels(Clocks):
    """Times the kernels that each part launches. torch.profiler sees them in the last TRACED_STEPS steps of the loop.

    The time of a whole step is measured in the steps before, by the wall clock and without synchronising the GPU.
    """

    def __init__(self, device, steps):
        super().__init__(device)
        self.first = steps - TRACED_STEPS  # the number of steps before torch.profiler starts
        self.phases = []  # for each step of the process: its phase
        self.profiler = torch.profiler.profile()
        self.is_traced = False

    def now_s(self):
        return time.perf_counter()

    def __call__(self, part, call, *args, **keywords):
        with torch.profiler.record_function(f"part/{len(self.phases)}/{part}"):
            return call(*args, **keywords)

    def ended(self, phase="train"):
        if not self.is_traced:
            super().ended(phase)
        self.phases.append(phase)
        if not self.is_traced and self.phases.count(phase) == self.first:
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.profiler.start()
            self.is_traced = True

    def all_times_ms(self):
        """Return what `Clocks.times_ms` does for all phases, with the times of kernels. Ends the trace."""
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(file))
            events = json.loads(file.read_text())["traceEvents"]
        parts = [one for one in events if one.get("cat") == "user_annotation" and one["name"].startswith("part/")]
        calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
        launched_us = {one["args"]["correlation"]: one["ts"] for one in calls}
        sums_us, traced = defaultdict(Counter), defaultdict(set)
        for one in events:
            if one.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            at = launched_us.get(one["args"]["correlation"], -1)
            inside = [part for part in parts if part["ts"] <= at <= part["ts"] + part["dur"]]
            if inside:
                _, number, name = min(inside, key=lambda part: part["dur"])["name"].split("/")
                sums_us[self.phases[int(number)]][name] += one["dur"]
        for part in parts:
            number = int(part["name"].split("/")[1])
            traced[self.phases[number]].add(number)
        return {
            phase: {
                "steps": len(traced[phase]),
                "mean_ms": {name: us / 1e3 / len(traced[phase]) for name, us in sums.items()}
                | {"step": self.times_ms(phase)["mean_ms"]["step"]},
            }
            for phase, sums in sums_us.items()
        }


class Hidden(nn.Module):
    """A network with hidden layers of width 512, and about a million weights."""

    def __init__(self, out=10):
        super().__init__()
        widths = 64, 512, 512, 512, 512, out
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class Maker(Hidden):
    """Makes samples from noise."""


class Judge(Hidden):
    """Tells the samples of a Maker from real ones."""


class Checkpointed(nn.Module):
    """A GPT that keeps only the inputs of its blocks for the backward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)

    def forward(self, words):
        return self.model(words)


class Rows(Dataset):
    """Samples that take longer to prepare than a step of the network takes."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, at):
        generator = torch.Generator().manual_seed(at)
        return torch.randn(512, 64, generator=generator).mean(0), at % 10


def hidden(device, batch=64):
    model = Hidden().to(device)
    return model, torch.randn(batch, 64, device=device), torch.randint(0, 10, (batch,), device=device)


def gpt(device):
    width, layers, batch, length = (768, 12, 8, 256) if device == "cuda" else (128, 3, 2, 32)
    words = torch.randint(0, 2000, (batch, length + 1), device=device)
    return GPT(width, layers).to(device), words[:, :-1], words[:, 1:]


def cross_entropy(scores, labels):
    return nn.functional.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())


def plain(model, batch, labels, optimizer, clocks, steps):
    for _ in range(steps):
        clocks("zero grad", optimizer.zero_grad)
        loss = cross_entropy(clocks("forward", model, batch), labels)
        clocks("backward", loss.backward)
        clocks("optimizer", optimizer.step)
        clocks.ended()


def sgd(device, clocks, steps):
    made = hidden(device)
    plain(*made, torch.optim.SGD(made[0].parameters(), lr=1e-3), clocks, steps)


def momentum(device, clocks, steps):
    made = hidden(device)
    plain(*made, torch.optim.SGD(made[0].parameters(), lr=1e-3, momentum=0.9), clocks, steps)


def adamw(device, clocks, steps):
    made = hidden(device)
    plain(*made, torch.optim.AdamW(made[0].parameters(), foreach=True), clocks, steps)


def adamw_for_loop(device, clocks, steps):
    made = hidden(device)
    plain(*made, torch.optim.AdamW(made[0].parameters(), foreach=False), clocks, steps)


def gpt_adamw(device, clocks, steps):
    made = gpt(device)
    plain(*made, torch.optim.AdamW(made[0].parameters()), clocks, steps)


def scaler(device, clocks, steps):
    model, batch, labels = gpt(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(device)
    for _ in range(steps):
        clocks("zero grad", optimizer.zero_grad)
        with torch.autocast(device, torch.bfloat16):
            scores = clocks("forward", model, batch)
        loss = scaler.scale(cross_entropy(scores, labels))
        clocks("backward", loss.backward)
        clocks("optimizer", scaler.step, optimizer)
        scaler.update()
        clocks.ended()


def accumulation(device, clocks, steps):
    model, batch, labels = gpt(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        for _ in range(4):
            loss = cross_entropy(clocks("forward", model, batch), labels) / 4
            clocks("backward", loss.backward)
        clocks("optimizer", optimizer.step)
        clocks("zero grad", optimizer.zero_grad)
        clocks.ended()


def checkpoints(device, clocks, steps):
    model, batch, labels = gpt(device)
    model = Checkpointed(model)
    plain(model, batch, labels, torch.optim.AdamW(model.parameters()), clocks, steps)


def gan(device, clocks, steps):
    maker, judge = Maker(64).to(device), Judge(1).to(device)
    of_maker, of_judge = (torch.optim.Adam(model.parameters(), lr=1e-4) for model in (maker, judge))
    real, noise = (torch.randn(64, 64, device=device) for _ in range(2))
    for _ in range(steps):
        clocks("zero grad", of_judge.zero_grad)
        fake = clocks("forward", maker, noise)
        loss = clocks("forward", judge, fake.detach()).mean() - clocks("forward", judge, real).mean()
        clocks("backward", loss.backward)
        clocks("optimizer", of_judge.step)
        clocks.ended("Maker train")
        clocks("zero grad", of_maker.zero_grad)
        loss = -clocks("forward", judge, clocks("forward", maker, noise)).mean()
        clocks("backward", loss.backward)
        clocks("optimizer", of_maker.step)
        clocks.ended("Maker train Adam 2")


def loader(device, clocks, steps):
    model, _, _ = hidden(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(Rows(), batch_size=64, num_workers=0))
    for _ in range(steps):
        batch, labels = (one.to(device) for one in clocks("data wait", next, batches))
        clocks("zero grad", optimizer.zero_grad)
        loss = cross_entropy(clocks("forward", model, batch), labels)
        clocks("backward", loss.backward)
        clocks("clip", nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        clocks("optimizer", optimizer.step)
        clocks.ended()


def lbfgs(device, clocks, steps):
    model, batch, labels = hidden(device, 512)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=4, history_size=4)

    def closure():
        clocks("zero grad", optimizer.zero_grad)
        loss = cross_entropy(clocks("forward", model, batch), labels)
        clocks("backward", loss.backward)
        return loss

    for _ in range(steps):
        clocks("optimizer", optimizer.step, closure)
        clocks.ended()


LOOPS = {
    loop.__name__: loop
    for loop in (
        sgd,
        momentum,
        adamw,
        adamw_for_loop,
        gpt_adamw,
        scaler,
        accumulation,
        checkpoints,
        gan,
        loader,
        lbfgs,
    )
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--no-clocks", action="store_true")
    times.add_argument("--kernels", action="store_true")
    chosen = parser.parse_args()
    if chosen.kernels and chosen.steps <= TRACED_STEPS:
        parser.error(f"--kernels needs more than {TRACED_STEPS} --steps")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # Use one thread, because two threads would wait for each other on a shared machine.
    if chosen.kernels:
        clocks = Kernels(chosen.device, chosen.steps)
    else:
        clocks = Clocks(chosen.device, is_on=not chosen.no_clocks)
    LOOPS[chosen.loop](chosen.device, clocks, chosen.steps)
    sys.stdout.write(json.dumps(clocks.all_times_ms()) + "\n")


if __name__ == "__main__":
    main()
