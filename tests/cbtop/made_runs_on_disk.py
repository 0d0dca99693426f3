"""Makes recordings of a simulated model with four layers and a fake clock, in the format of `cbtop record`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.daemon.source import Source
from cbtop.profiler.analysis.budget import TokenBudget
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.protocol import codec
from cbtop.protocol.messages import CheckResult, Heartbeat, HostHello, Manifest, Quiet, SourceCatalog, WireMessage
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter, encode_frame
from cbtop.protocol.vocabulary import BrickCategory, SourceStatus
from tests.cbtop.made_recordings import BEGIN_NS, HELLO, frame
from tests.cbtop.recorded import Clock, profiler_in, source_of

LAYERS = 4
BRICKS_US = {
    ("RmsNorm", BrickCategory.NORM): 10.0,
    ("Attention", BrickCategory.ATTENTION): 40.0,
    ("DownProjection", BrickCategory.FFN): 80.0,
}
MANIFEST = Manifest("made 4L", "llama", "made", "Q4_K", 2, LAYERS, 64, 256, 1_000, 4_000)


def record(
    path: Path,
    runtime: Path,
    *,
    seed: int = 0,
    steps: int = 120,
    slower: float = 1.0,
    rename: str = "DownProjection",
    kernel: str = "gemv",
    host: str = "",
    model: str = "",
    tokens: int = 1,
    cached_from: int = 100,
    lose: bool = False,
    fails: str = "",
    budget_us: float | None = None,
    quiet: Quiet | None = None,
    gone_after_s: float | None = None,
) -> Path:
    """Record a run of `steps` decode steps. Returns the path of the recording.

    DownProjection of Layer 2 takes `slower` times as long. With `lose`, every third batch of records is left out.
    `fails` is the name of a check of RmsNorm that fails. `budget_us` is the budget of Attention, per token and layer.
    `quiet` is the state of a process that still runs at the end. `gone_after_s` is the time from the last record to
    the end of a process that has ended.
    """
    runtime.mkdir()
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    profiler.announce(replace(MANIFEST, model=model or MANIFEST.model))
    if fails:
        profiler.announce(CheckResult("RmsNorm", fails, False, None, None))
    source = source_of(runtime)
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    rng = np.random.default_rng(seed)
    definitions = [
        BrickDefinition(
            rename if name == "DownProjection" else name,
            category,
            kernels=(KernelDefinition(kernel, "made"),),
            budget=TokenBudget(budget_us) if budget_us and name == "Attention" else None,
        )
        for name, category in BRICKS_US
    ]
    for number in range(steps):
        moved = 1 + 0.01 * rng.standard_normal((LAYERS, len(BRICKS_US)))
        with profiler.step("decode", tokens=tokens) as step:
            step.sequences, step.cached = 1, cached_from + number
            for layer in range(LAYERS):
                with profiler.layer(layer):
                    for at, us in enumerate(BRICKS_US.values()):
                        with profiler.brick(definitions[at], tokens):
                            is_planted = at == len(BRICKS_US) - 1 and layer == 2
                            clock.sleep_us(us * moved[layer, at] * (slower if is_planted else 1.0))
                        clock.sleep_us(0.5)
        clock.sleep_us(20)
        if number % 10 == 9:
            _say(writer, source, number, host, lose=lose)
    profiler.close("done")
    _say(writer, source, steps, host)
    if quiet:
        state = replace(source.state_message(), state=SourceStatus.LIVE, quiet=quiet)
        if gone_after_s is None:
            writer.append(frame(FrameKind.LIVE, steps / 10, state))
        else:
            said_ns = clock() + round(gone_after_s * 1e9)
            gone = replace(state, state=SourceStatus.GONE, quiet=None)
            said = [codec.encode(Heartbeat(said_ns, (each,))) for each in (state, gone)]
            writer.append(encode_frame(FrameKind.LIVE, BEGIN_NS + steps * 100_000_000, said))
    writer.close()
    return path


class Recordings(dict[str, Path]):
    """Paths of recordings by name. A recording is created when it is first used.

    `odd` has the arguments of `record` for each name.
    """

    def __init__(self, at: Path, odd: Mapping[str, Mapping[str, Any]]) -> None:
        self._at, self._odd = at, odd

    def __missing__(self, name: str) -> Path:
        path = record(self._at / f"{name}.cbtop", self._at / name, **self._odd[name])
        self[name] = path
        return path


def _say(writer: RecordingWriter, source: Source, at: int, host: str, *, lose: bool = False) -> None:
    source.poll()
    if not (lose and at % 30 == 29):
        writer.append(frame(FrameKind.RECORDS, at / 10, *source.records()))
    else:
        list(source.records())
    source.delta()
    said = [_on(message, host) for message in source.snapshot()]
    writer.append(frame(FrameKind.KEYFRAME, at / 10, HELLO, *said))


def _on(message: WireMessage, host: str) -> WireMessage:
    """Return a copy of the message that looks as if the process ran on `host`."""
    if not host or not isinstance(message, SourceCatalog):
        return message
    said = tuple(replace(one, host=host) if isinstance(one, HostHello) else one for one in message.messages)
    return replace(message, messages=said)
