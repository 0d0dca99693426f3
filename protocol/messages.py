"""Every message, as frozen data. A message's class name is its kind on the wire.

Adding one: write the class here, add it to the union below, and give it a `case` in `cbtop/client/store.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NewType

from cbtop.protocol.attributes import (
    MAX_QUANTITY,
    NO_FUNCTION,
    NO_KERNEL,
    UNKNOWN_WORK,
    FunctionAttributes,
    KernelAttributes,
    TransferAttributes,
    Work,
    quantity,
)
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, Unknown
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind, Provenance, SourceStatus

BUSY_PERCENT = 5  # share of a machine: an idle system uses less
UNSURE_PERCENT = 10  # share of a roof: rounds further apart tell little about what is possible

PROTOCOL_MAJOR = 2  # 2: histograms travel as cells
PROTOCOL_MINOR = 3  # 1: devices; 2: kernels in a burst; 3: the time with running steps, the place of a quiet process

Packed = NewType("Packed", bytes)  # columns of records, see `cbtop.protocol.columns`
Name = Annotated[str, "shown where it is empty"]

# --- said by the profiled process, kept in its catalog file -------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostHello:
    """The first message of a catalog: the process that measures, and its clock.

    `monotonic_ns` and `realtime_ns` were read together; records carry monotonic time. `process_start` is /proc's
    start time in clock ticks since boot: pid and start together never name a second process. `pid` is the process's
    own in the pid namespace with the inode `pid_namespace` (None: not known). `sample_every`: it records one step in
    this many. `locked`: the process holds a lock (flock(2))on its catalog until it ends.
    `clock_resolution_ns`: the smallest difference between two readings of its clock, measured once (None: not known).
    `job`: an identifier its launcher gave all ranks of its job alike; to compare, not to show.
    """

    protocol_major: int
    protocol_minor: int
    pid: int
    process_start: int
    host: str
    boot_id: str
    program: str
    python: str
    recorder: str
    monotonic_ns: int
    realtime_ns: int
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    pid_namespace: int | None = None
    locked: bool = False
    sample_every: int = 1
    clock_resolution_ns: int | None = None
    job: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the execution graph, announced once, before the first record that names it.

    `label` tells places with the same name apart: a brick's own word for its place (`q_proj`), the named stack that a
    layer belongs to (`encoder`), the model that a step is a step of (`draft`). The static facts of a kernel, a
    transfer and a function are in `cbtop.protocol.attributes`; in the message's map they are keys like the others. A
    budget is the time a token may take, or the rate at which bytes must move. Records of an async task are its polls;
    their elements are 1 if it was not done yet.
    """

    id: int
    parent: int | None
    kind: NodeKind
    name: Name
    label: str = ""
    category: BrickCategory | None = None
    brick: BrickId | None = None
    backend: str = ""
    budget_us_per_token: float | None = None
    budget_gb_per_sec: float | None = None
    work: Work = UNKNOWN_WORK
    kernel: KernelAttributes = NO_KERNEL
    function: FunctionAttributes = NO_FUNCTION
    transfer: TransferAttributes | None = None

    def __post_init__(self) -> None:
        for name in ("budget_us_per_token", "budget_gb_per_sec"):
            value = getattr(self, name)
            if value is not None:
                quantity(f"{name} of {self.name!r}", value)


@dataclass(frozen=True, slots=True)
class Dependency:
    """The node `then` cannot start before the node `first` has ended."""

    first: int
    then: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The model that is run, read from its file (static).

    `roofs`: why roofs over it are not known, and what to do; "": nothing to report. `steps_of`: the label of its
    steps, if a process runs several models. `ranks`: how many processes compute each token together, a part of the
    model each, so that a merge counts it once; 0: not known.
    """

    model: str
    architecture: str
    backend: str
    quantization: str
    threads: int
    layers: int
    hidden_size: int
    context_length: int
    parameters: int
    weights_bytes: int
    roofs: str = ""
    steps_of: str = ""
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A roof of this machine. `kind` is `bandwidth`, `cache` (unit GB/s) or `compute` (GFLOP/s, of integers GOP/s).

    A cache level is not a roof to take a share of, because it is not known whether data is in it. It explains a rate
    faster than memory.

    If the roof was measured in `rounds` (None: not known), `value` is the best, `median` and `lowest` describe the
    others, and `load_percent` is how much of the processors or the GPU others used meanwhile. `measured_on` is the
    moment (2026-11-22T10:30:59+01:00; of older ones the day alone), `gpu` the UUID of its GPU; "": the processors'.
    `withdrawn`: it no longer applies to what runs now. `dtype`: of a compute roof, the type that is multiplied, as in
    `Work`; "": floats of an unknown type. `is_short`: cbtop measured it by itself in a quiet second, which
    `cbtop calibrate` does better.
    """

    name: str
    kind: str
    value: float
    unit: str
    provenance: Provenance
    median: float | None = None
    lowest: float | None = None
    measured_on: str = ""
    withdrawn: bool = False
    load_percent: float | None = None
    gpu: str = ""
    dtype: str = ""
    rounds: int | None = None
    is_short: bool = False

    def __post_init__(self) -> None:
        for value in (self.value, self.median, self.lowest, self.rounds):
            if value is not None and not 0 < value < MAX_QUANTITY:
                raise ValueError(f"ceiling {self.name!r} is {value}; a finite value above zero is wanted")

    @property
    def is_disturbed(self) -> bool:
        """Whether others used the device while it was measured, or its rounds differ much."""
        spread_percent = 0.0 if self.median is None else 100 * (self.value - self.median) / self.value
        return (self.load_percent or 0.0) >= BUSY_PERCENT or spread_percent > UNSURE_PERCENT

    @property
    def measured_s(self) -> float | None:
        """The moment it was measured, in Unix time; None if only the day is known."""
        if len(self.measured_on) <= len("2026-11-22"):
            return None
        try:
            return datetime.fromisoformat(self.measured_on).timestamp()
        except (ValueError, OverflowError):  # the announcing process may send anything
            return None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One evaluated assertion of one brick; or why it was not evaluated, which is neither a pass nor a fail."""

    brick: Name
    assertion: str
    passed: bool
    max_error: float | None
    tolerance: float | None
    not_finite: str = ""  # "NaN" or "infinity": the value found, in place of an error
    skipped: str = ""  # why it was not evaluated; `passed` then means nothing
    note: str = ""  # where in the model, and how often


@dataclass(frozen=True, slots=True)
class TraceNumber:
    """A named number of a TraceSummary: of the row `row` (`layer 3`), or of the whole trace if that is empty."""

    row: str
    name: str
    value: float | None  # None is unknown


@dataclass(frozen=True, slots=True)
class TraceAnomaly:
    """One problem that a trace found, as a sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The findings of one trace (`MLT-01` … `MLT-05`); it replaces the previous summary.

    `forwards` counts the traced passes since the process began; the numbers are about the latest of them.
    """

    trace: str
    name: str
    about: str
    forwards: int
    numbers: tuple[TraceNumber, ...]
    anomalies: tuple[TraceAnomaly, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """The work of the process before (or instead of) its main loop; an empty name: the main loop."""

    name: str
    done: float | None = None  # 0..1


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling rate of a process from now on, and its overhead if the process measures it.

    It records one step in `every`. The overhead, in percent of the time in steps, is between `low_percent` and
    `high_percent` (95 %); all are None while too little is known. `allowed_percent` is the most it may be.
    """

    every: int
    overhead_percent: float | None
    low_percent: float | None
    high_percent: float | None
    allowed_percent: float


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compilation of code of the model, from `begun_ns` to `ended_ns` by the clock of the records.

    `number` counts them from 0. `is_again`: code existed already, and did not fit the arguments of the call.
    """

    number: int
    begun_ns: int
    ended_ns: int
    is_again: bool


@dataclass(frozen=True, slots=True)
class Training:
    """The process computes gradients between its steps: a call of its model found new weights, or gradients."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The launches of the kernel `node` that a burst measured in the `steps` steps of its phase, in ns.

    `deviation_ns` is the standard deviation of their durations.
    """

    node: int
    steps: int
    launches: int
    mean_ns: float
    deviation_ns: float
    min_ns: int
    max_ns: int

    def __post_init__(self) -> None:
        times = (0, self.min_ns, self.mean_ns, self.max_ns, MAX_QUANTITY)
        if (
            min(self.steps, self.launches) < 1
            or not 0 <= self.deviation_ns < MAX_QUANTITY
            or list(times) != sorted(times)
        ):
            raise ValueError(f"kernel {self.node}: {self.launches} launches in {self.steps} steps of {times} ns")


@dataclass(frozen=True, slots=True)
class KernelBurst:
    """The kernels of the latest `steps` steps that CUPTI recorded; it replaces the previous burst.

    `number` is the request's. Those steps are in no statistics. `unplaced` launches of their kernels ran in no
    known call of a module, `lost` were recorded and not read, `left_out` had no place in the graph.
    """

    number: int
    steps: int
    kernels: tuple[KernelTimes, ...]
    unplaced: int = 0
    lost: int = 0
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class BrickHostTime:
    """The host's time in the median of `calls` calls of the brick `node`, without the bricks inside it, in ns."""

    node: int
    calls: int
    median_ns: float

    def __post_init__(self) -> None:
        if self.calls < 1 or not 0 <= self.median_ns < MAX_QUANTITY:
            raise ValueError(f"brick {self.node}: {self.calls} calls of {self.median_ns} ns")


@dataclass(frozen=True, slots=True)
class HostTimes:
    """The host's times in the latest `steps` steps with timed calls; they replace the previous ones.

    A brick on a device has them in addition to the times of its kernels: the host needs them to launch it.
    """

    steps: int
    bricks: tuple[BrickHostTime, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last message of a process that ended by itself."""

    reason: str


CatalogMessage = (
    HostHello
    | Node
    | Dependency
    | Manifest
    | Ceiling
    | CheckResult
    | TraceSummary
    | Activity
    | Sampling
    | Compilation
    | Training
    | KernelBurst
    | HostTimes
    | Goodbye
)
# Only ever inside another message.
Part = TraceNumber | TraceAnomaly | KernelTimes | BrickHostTime | Device | DeviceProcess | Unknown

# --- said by the daemon, to every viewer --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DaemonHello:
    """The first message a viewer gets, and the only one whose meaning no version may change."""

    protocol_major: int
    protocol_minor: int
    pid: int
    host: str
    boot_id: str
    version: str
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class SourceCatalog:
    """The messages of a source: all of them (`complete`, replacing what the viewer had) or those since the last."""

    source: str
    complete: bool
    messages: tuple[CatalogMessage, ...]


@dataclass(frozen=True, slots=True)
class Quiet:
    """A process has recorded and begun nothing for `quiet_ns`. In the map of a state its fields are keys like the
    others.

    `in_flight` is the innermost node that was begun last and has not ended, of those in steps if there are any (0:
    none is known, -1: a step that has no name yet). It has run for `in_flight_ns` (None: not known). `threads` is the
    number of threads, tasks or greenlets in a node. If `is_watched`, every one of them reports its node: with none in
    flight, nothing that is recorded runs. `last` is the node of the newest record (0: there is none). `is_suspended`:
    stopped by a signal or a debugger. `in_flight_size`: tokens of the step that `in_flight` is in, or its sequences
    if tokens are unknown (0: neither is known).
    """

    quiet_ns: int
    in_flight: int = 0
    in_flight_ns: int | None = None
    threads: int = 0
    is_watched: bool = False
    last: int = 0
    is_suspended: bool = False
    in_flight_size: int = 0


@dataclass(frozen=True, slots=True)
class SourceState:
    """The state of a source, and its counters.

    `produced == received + overwritten + rejected`: records read; those in the statistics; those overwritten
    in the ring before they were read (`before_attach` of them before the daemon first looked); those that named no
    node of the catalog, or ran backwards. `unread` more are written, and not read. `left_out` announcements of the
    process are not in its catalog, or have no place here, because they exceeded the bounds. `quiet` is None while it
    goes on, and once it has ended.
    """

    source: str
    state: SourceStatus
    reason: str
    produced: int
    received: int
    overwritten: int
    before_attach: int
    rejected: int
    unread: int
    left_out: int = 0
    quiet: Quiet | None = None


@dataclass(frozen=True, slots=True)
class StatsUpdate:
    """Cumulative statistics of the nodes that changed (all of them in a keyframe), in columns.

    Every value is a total since the source began, so a lost update costs freshness, never truth. The byte fields are
    little-endian i64 columns: one entry per node for `node` … `closed_ns`, one entry per value for `rare_*` (the
    columns that few nodes have, numbered as in `analysis.node_columns.SPARSE_COLUMNS`; its values are float64).
    `cells` are the histogram cells that changed, ascending (each as the difference from the one before), and their
    counts: see `profiler.analysis.histograms`. Cells that do not fit into one message follow in the next. The update
    covers records that had ended at `monotonic_ns`, when the ring was read, even if it is sent much later.
    `closed_ns` is the part of `total_ns` inside steps that have ended. `steps_ns` is the time in which at least one
    step of any phase ran; `first_ns` is when the first record that was seen began (None: not sent). `ran` lists the
    newest of the disjoint intervals in which steps of a node (0: any step) ran, each as node, begin and length, all
    up to the node's last one. They go back to the first that changed since the previous update. In a keyframe they go
    back farther, to at most `analysis.step_intervals.MAX_SAID_INTERVALS` of all nodes.
    """

    source: str
    sequence: int
    monotonic_ns: int
    received: int
    node: bytes
    count: bytes
    failed: bytes
    total_ns: bytes
    min_ns: bytes
    max_ns: bytes
    elements: bytes
    closed_ns: bytes
    cells: Packed
    rare_node: bytes = b""
    rare_column: bytes = b""
    rare_value: bytes = b""
    steps_ns: int | None = None
    first_ns: int | None = None
    ran: Packed = Packed(b"")


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """The records themselves, for recorders.

    They are the remaining records of the ring's numbers from `first` to `produced`; `produced - first - count` were
    overwritten or rejected. A lost batch shows as a gap between one's `produced` and the next's `first`.
    """

    source: str
    first: int
    produced: int
    count: int
    columns: Packed

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.produced - self.count <= self.produced:
            raise ValueError(f"{self.count} records from {self.first} to {self.produced}")


@dataclass(frozen=True, slots=True)
class HistoryPiece:
    """The head of a piece of the daemon's history; frames as in a recording follow it, numbered from `first`.

    `end` is one more than the number of the newest frame, `host` and the clock pair are the daemon's.
    """

    first: int
    end: int
    host: str
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every second, so that silence means something: what ended before `monotonic_ns` was read by now."""

    monotonic_ns: int
    sources: tuple[SourceState, ...]


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The daemon's clocks, read together, for the viewer that asked under the number `asked`."""

    asked: int
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class SourceGone:
    """The daemon has dropped a source that ended long ago."""

    source: str


@dataclass(frozen=True, slots=True)
class DaemonGoodbye:
    """The daemon's last message: another daemon may take its place."""


WireMessage = (
    DaemonHello
    | DaemonGoodbye
    | SourceCatalog
    | SourceState
    | StatsUpdate
    | RecordBatch
    | HistoryPiece
    | Heartbeat
    | DeviceSample
    | ClockReading
    | SourceGone
)
Message = CatalogMessage | WireMessage | Part
