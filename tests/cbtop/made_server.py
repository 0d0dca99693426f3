"""Makes a recording of a simulated server with a fake clock.

The server answers batches of random size and waits between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbtop.daemon.source import Source
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter
from cbtop.protocol.vocabulary import WARM_UP
from tests.cbtop.made_recordings import BEGIN_NS, HELLO, frame
from tests.cbtop.made_runs_on_disk import MANIFEST
from tests.cbtop.recorded import Clock, profiler_in, source_of

MAX_BATCH = 2
STEPS_A_PROMPT = 5
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Served:
    """The work of a simulated server, measured by the server's own clock and counts.

    Times are in seconds and start after the warm-up.
    """

    path: Path
    runtime: Path
    wall_s: float  # seconds from the first step after the warm-up to the end of the last step
    in_steps_s: Mapping[str, float]
    tokens: Mapping[str, int]
    sequences: Mapping[str, int]

    def rate(self, phase: str = "decode") -> float:
        return self.tokens[phase] / self.wall_s

    def rate_in_steps(self, phase: str = "decode") -> float:
        return self.tokens[phase] / self.in_steps_s[phase]

    def samples(self, phase: str = "decode") -> float:
        return self.sequences[phase] / self.wall_s


class Server:
    """A simulated server. Its step times have noise of 2 %."""

    def __init__(self, runtime: Path, seed: int) -> None:
        runtime.mkdir()
        self.clock = Clock()
        self.profiler = profiler_in(runtime, self.clock)
        self.profiler.announce(MANIFEST)
        self._chance = np.random.default_rng(seed)
        self.forget()

    def forget(self) -> None:
        """Reset all counts."""
        self.in_steps_s: defaultdict[str, float] = defaultdict(float)
        self.tokens: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()

    def step(self, phase: str, batch: int, tokens: int, us: float) -> None:
        began_ns = self.clock.now_ns
        with self.profiler.step(phase, tokens=tokens) as step:
            step.sequences = batch
            for layer in range(2):
                with self.profiler.layer(layer), self.profiler.brick("Attention", tokens):
                    self.clock.sleep_us(us / 2 * (1 + 0.02 * self._chance.standard_normal()))
        self.in_steps_s[phase] += (self.clock.now_ns - began_ns) / 1e9
        self.tokens[phase] += tokens
        self.sequences[phase] += batch

    def serve(self, wait_us: float) -> None:
        """Answer one batch of prompts, then wait."""
        batch = int(self._chance.integers(1, MAX_BATCH + 1))
        self.step("prefill", batch, PROMPT_TOKENS * batch, 800 * batch)
        for _ in range(STEPS_A_PROMPT):
            self.step("decode", batch, batch, 1000 + 80 * batch)
        self.last_ns = self.clock.now_ns
        self.clock.sleep_us(float(self._chance.exponential(wait_us)))


def record_server(
    path: Path, runtime: Path, *, seed: int = 0, batches: int = 90, wait_us: float = 4000, leave_out: int = 0
) -> Served:
    """Record a server that answers `batches` batches of prompts. The recording begins after `leave_out` batches."""
    server = Server(runtime, seed)
    source = source_of(runtime)
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    for _ in range(3):
        server.step(f"decode{WARM_UP}", 1, 1, 300_000)
    server.clock.sleep_us(700_000)
    began_ns = server.clock.now_ns
    for number in range(batches):
        if number == leave_out > 0:
            _say(None, source, number)
            began_ns = server.clock.now_ns
            server.forget()
        server.serve(wait_us)
        if number % 10 == 9:
            _say(writer if number >= leave_out else None, source, number)
    server.profiler.close("done")
    _say(writer, source, batches)
    writer.close()
    wall_s = (server.last_ns - began_ns) / 1e9
    return Served(path, runtime, wall_s, server.in_steps_s, server.tokens, server.sequences)


def _say(writer: RecordingWriter | None, source: Source, at: int) -> None:
    """Let a daemon read the process. Write its messages to the recording."""
    source.poll()
    records = list(source.records())
    source.delta()
    if writer is not None:
        writer.append(frame(FrameKind.RECORDS, at / 10, *records))
        writer.append(frame(FrameKind.KEYFRAME, at / 10, HELLO, *source.snapshot()))
