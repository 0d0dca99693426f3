"""Records a process with a fake clock and reads it with the real source, store and viewmodels.

So every number is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.profiler.analysis.budget import TokenBudget
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import codec
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import (
    Ceiling,
    CheckResult,
    Heartbeat,
    HostHello,
    Manifest,
    Message,
    SourceCatalog,
    StatsUpdate,
)
from cbtop.protocol.vocabulary import BrickId, Provenance


@dataclass
class Clock:
    """A clock that only the test moves."""

    now_ns: int = 1_000_000

    def __call__(self) -> int:
        return self.now_ns

    def sleep_us(self, us: float) -> None:
        self.now_ns += round(us * 1000)


def profiler_in(directory: Path, clock: Clock, ring_bytes: int = 1 << 20) -> BrickProfiler:
    return BrickProfiler(clock_ns=clock, recorder=RingRecorder(directory, ring_bytes))


def source_of(directory: Path) -> Source:
    (ring,) = directory.glob("*.ring")
    return Source(ring)


def apply(store: Store, messages: Sequence[Message]) -> None:
    """Add messages to a store. The messages are encoded and decoded first, as on the wire."""
    for message in messages:
        decoded = codec.decode(codec.encode(message))
        assert decoded is not None
        store.apply(decoded)


def said_at(messages: Sequence[Message], at_ns: int) -> list[Message]:
    """Set the time of the statistics in `messages` to `at_ns`, as if daemon and process had the same clock."""
    return [replace(m, monotonic_ns=at_ns) if isinstance(m, StatsUpdate) else m for m in messages]


def record_of(source: Source) -> SourceRecord:
    """Return what a viewer that connects now knows about `source`."""
    source.poll()
    store = Store()
    apply(store, [*source.snapshot()])
    return store.sources[source.key]


def seen_at(source: Source, at_ns: int) -> list[Message]:
    """Return all messages of a daemon about a process at `at_ns`.

    Daemon and process have the same clock, and the process began at 0.
    """
    source.poll()
    state = source.state_message()
    found: list[Message] = []
    for message in source.snapshot():
        if isinstance(message, SourceCatalog):
            said = [replace(m, monotonic_ns=0) if isinstance(m, HostHello) else m for m in message.messages]
            message = replace(message, messages=tuple(said))
        found.append(message)
    return [*said_at(found, at_ns), Heartbeat(at_ns, (state,))]


def decode_run(directory: Path, steps: int = 10) -> SourceRecord:
    """Record a prefill of 4 tokens and `steps` decode steps.

    A decode step takes 100 µs, and 4 µs of it are outside bricks.
    """
    clock = Clock()
    profiler = profiler_in(directory, clock)
    profiler.announce(Manifest("toy 2L", "qwen2", "numba-omp×2", "Q4_K", 2, 2, 64, 512, 1_000_000, 560_000))
    profiler.announce(Ceiling("dram_read", "bandwidth", 20.0, "GB/s", Provenance.MEASURED))
    profiler.announce(Ceiling("fma_float32", "compute", 100.0, "GFLOP/s", Provenance.MEASURED))
    profiler.announce(CheckResult("RmsNorm", "finite", True, None, None))
    profiler.announce(CheckResult("QkvProjection", "equivalence", True, 2e-7, 1e-5))
    norm = BrickDefinition.of(BrickId.RMS_NORM, backend="numba", work=Work(0, 4, 0, 8), budget=TokenBudget(1.5))
    qkv = BrickDefinition.of(
        BrickId.QKV_PROJECTION,
        backend="numba",
        work=Work(flops_per_element=128, bytes_per_call=4096, bytes_per_element=4),
        kernels=(KernelDefinition("q4_k_linear", "numba-omp×2"),),
        budget=TokenBudget(25.0),
    )
    down = BrickDefinition.of(
        BrickId.DOWN_PROJECTION,
        backend="cuda",
        kernels=(KernelDefinition("q4k_gemv", "cuda", grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096),),
    )
    for phase, tokens in [("prefill", 4)] + [("decode", 1)] * steps:
        with profiler.step(phase, tokens):
            for index in range(2):
                with profiler.layer(index):
                    for brick, us in ((norm, 2), (qkv, 20), (down, 26)):
                        with profiler.brick(brick, 64 * tokens):
                            clock.sleep_us(us * tokens)
                    clock.sleep_us(1)
            clock.sleep_us(2)
    return record_of(source_of(directory))
