"""The message classes. Messages are frozen data. The name of a message's class is its kind on the wire.

To add a message, write its class here and add it to the union below. mypy then names all other code that must change.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NewType

from cbtop.protocol.attributes import (
    MAX_QUANTITY,
    NO_FUNCTION,
    NO_KERNEL,
    NO_MODULE,
    UNKNOWN_WORK,
    FunctionAttributes,
    KernelAttributes,
    ModuleAttributes,
    TransferAttributes,
    Work,
    quantity,
)
from cbtop.protocol.counter_messages import BrickCounters, CountedBrick
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, Unknown
from cbtop.protocol.guard_messages import GuardedSteps
from cbtop.protocol.kernel_messages import BrickHostTime, HostTimes, KernelBurst, KernelTimes
from cbtop.protocol.memory_messages import BrickMemories, BrickMemory, PartMemory, TrainingMemory
from cbtop.protocol.sample_messages import CpuSamples, SampledFunction, SampledPlace
from cbtop.protocol.serving_messages import EngineQueue, Latencies, ServingMessage
from cbtop.protocol.structure_messages import StructureMessage, StructurePart
from cbtop.protocol.training_messages import GradientMessage, PartTime, TrainingTimes
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind, Provenance, SourceStatus

# If other processes use more than this percentage of the processors, they disturb a measurement. An idle machine is
# below this percentage.
BUSY_PERCENT = 5
UNSURE_PERCENT = 10  # If the rounds of a measured roof differ by more than this percentage, the roof is unsure.

PROTOCOL_MAJOR = 2  # major version 2 sends histograms as cells
# Minor version 1 added devices. Version 2 added the kernels of a burst. Version 3 added how long steps have run, and
# the current node of a quiet process. Version 4 added the parts of training steps. Version 5 added operations,
# allocations and conditions. Version 6 added the requests, load and times of a serving engine. Version 7 added the
# pid of the command of `cbtop run`, and the runs that started a process. Version 8 added sampled functions, and
# recordings compressed by zstd. Version 9 added the schedules of a serving engine.
PROTOCOL_MINOR = 9


Packed = NewType("Packed", bytes)  # packed columns, see `cbtop.protocol.columns`
Name = Annotated[str, "shown where it is empty"]

# --- messages of the profiled process, stored in its catalog file -------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostHello:
    """The first message of a catalog. It describes the profiled process and its clock.

    `monotonic_ns` and `realtime_ns` were read at the same time; the times of records are monotonic. `process_start`
    is the start time that /proc reports, in clock ticks since boot. No two processes have the same pid and the same
    start. `pid` is the pid in the process's own pid namespace, and `pid_namespace` is the inode of that namespace
    (None: not known). The process records one step in `sample_every`. If `locked`, the process holds a lock
    (flock(2)) on its catalog until it ends. `clock_resolution_ns` is the smallest difference between two readings of
    its clock (None: not known). `job` is equal in all ranks of a job. The value is only compared, never shown.
    `command_pid` is the pid of the command that `cbtop run` became. It equals `pid` if the process is the command
    itself (None: `cbtop run` did not start the process).
    `runs` has the names of the `cbtop run` commands that started the process, separated by spaces.
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
    command_pid: int | None = None
    runs: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the execution graph. It is announced once, before its first record.

    - `label` distinguishes nodes with the same name: of a brick its name in the model (`q_proj`), of a layer its
      stack (`encoder`), of a step its model (`draft`).
    - The static attributes of kernels, transfers and functions are defined in `cbtop.protocol.attributes`. In the
      message's map, they are keys like other fields.
    - A budget is the time that a token may take, or the rate at which bytes must move.
    - The records of an async task are its polls. A poll has 1 as `elements` if the task was not done yet.
    - `own` names the row for the operations that a module runs itself, outside of its children's calls. If the host
      times a process, three kinds of nodes have `own`: a layer, a step that is the call of a model, and a brick for
      such operations.
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
    own: str = ""
    module: ModuleAttributes = NO_MODULE

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
    """The model that runs. The values come from the model's file, and do not change.

    - `roofs`: if the roofs (peak rates) for this model are unknown, why, and how to measure them.
    - `steps_of` is the label of the model's steps, if a process runs several models.
    - `ranks` is the number of processes that share the work of each token (0: unknown). Each has a part of the model.
      A merge of recordings needs this number to count each token once.
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
    """A roof (peak rate) of this machine.

    - `kind` is `bandwidth`, `cache` (unit GB/s) or `compute` (GFLOP/s, of integers GOP/s). A `cache` roof explains a
      rate that is higher than the memory's. No share of it is computed, because it is unknown whether data is in the
      cache.
    - `value` is the best of `rounds` rounds of measurement (None: unknown). `median` and `lowest` describe the other
      rounds.
    - `load_percent` is the share of the processors or the GPU that other processes used during the measurement.
    - `measured_on` is its time (2026-11-22T10:30:59+01:00; older files contain only the day).
    - `gpu` is the UUID of the GPU, or "" for a roof of the processors.
    - `withdrawn`: the roof does not apply to what runs now.
    - `dtype` is the type that a compute roof multiplies, as in `Work`. "" means floats of an unknown type.
    - `is_short`: cbtop measured the roof on its own, less precisely than `cbtop calibrate` does.
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
        """Whether other processes used the device during the measurement of the roof, or the measured rounds differ
        too much.
        """
        spread_percent = 0.0 if self.median is None else 100 * (self.value - self.median) / self.value
        return (self.load_percent or 0.0) >= BUSY_PERCENT or spread_percent > UNSURE_PERCENT

    @property
    def measured_s(self) -> float | None:
        """The Unix time of the measurement, or None if only the day is known."""
        if len(self.measured_on) <= len("2026-11-22"):
            return None
        try:
            return datetime.fromisoformat(self.measured_on).timestamp()
        # The text of the time comes from another process, so it may contain anything.
        except (ValueError, OverflowError):
            return None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one assertion about one brick. If `skipped` is set, the assertion was not evaluated."""

    brick: Name
    assertion: str
    passed: bool
    max_error: float | None
    tolerance: float | None
    not_finite: str = ""  # "NaN" or "infinity" if the output contained one; `max_error` is then unknown
    skipped: str = ""  # why the assertion was not evaluated; if this is set, `passed` has no meaning
    note: str = ""  # where in the model the assertion was evaluated, and how often, as text


@dataclass(frozen=True, slots=True)
class TraceNumber:
    """A named number of a TraceSummary.

    `row` is the row of the number (`layer 3`), or "" if the number belongs to the whole trace.
    """

    row: str
    name: str
    value: float | None  # None: not known


@dataclass(frozen=True, slots=True)
class TraceAnomaly:
    """One problem that a trace found, described in a sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The findings of one trace (`MLT-01` … `MLT-05`). A summary replaces the previous one of the trace.

    `forwards` is the number of traced passes since the process began. The other numbers describe the newest pass.
    """

    trace: str
    name: str
    about: str
    forwards: int
    numbers: tuple[TraceNumber, ...]
    anomalies: tuple[TraceAnomaly, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """What the process does before its main loop, or if it has none.

    An empty name means that the main loop runs.
    """

    name: str
    done: float | None = None  # the share of the work that is done, 0 to 1; None if unknown


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling rate of a process from now on, and its profiling overhead if measured.

    The process records one step in `every`. The overhead, in percent of the time in steps, is between `low_percent`
    and `high_percent` (95 % interval). These three figures are None if too few steps were measured. If only the
    scatter is unknown, only the interval is None. `allowed_percent` is the highest allowed overhead.
    """

    every: int
    overhead_percent: float | None
    low_percent: float | None
    high_percent: float | None
    allowed_percent: float


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compilation of code of the model. `begun_ns` and `ended_ns` are on the clock of the records.

    `number` counts the compilations from 0. `is_again`: the code had been compiled before, but the arguments of a
    call did not fit.
    """

    number: int
    begun_ns: int
    ended_ns: int
    is_again: bool


@dataclass(frozen=True, slots=True)
class Training:
    """Says that the process trains.

    It is sent when a call of a model finds gradients or changed weights, or when an optimizer with weights of a model
    is seen.
    """


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last message of a process that ended normally, with the reason of its end."""

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
    | TrainingTimes
    | GradientMessage
    | TrainingMemory
    | BrickMemories
    | GuardedSteps
    | StructureMessage
    | ServingMessage
    | CpuSamples
    | BrickCounters
    | Goodbye
)
DevicePart = Device | DeviceProcess | Unknown
# Messages that exist only inside other messages.
Part = (
    TraceNumber
    | TraceAnomaly
    | KernelTimes
    | BrickHostTime
    | PartTime
    | PartMemory
    | BrickMemory
    | StructurePart
    | EngineQueue
    | Latencies
    | SampledFunction
    | SampledPlace
    | CountedBrick
    | DevicePart
)

# --- messages of the daemon to every viewer --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DaemonHello:
    """The first message that a viewer receives.

    This message is the same in all versions of the protocol. All other messages may change.
    """

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
    """Catalog messages of a source.

    If `complete`, these are all messages of the source, and they replace the messages that the viewer has. Otherwise,
    these are the messages since the last SourceCatalog.
    """

    source: str
    complete: bool
    messages: tuple[CatalogMessage, ...]


@dataclass(frozen=True, slots=True)
class Quiet:
    """A process has neither recorded nor begun anything for `quiet_ns`.

    In the map of a SourceState, these fields are stored like all other fields.

    - `in_flight` is the innermost node that has not ended (0: unknown, -1: a step without a name yet). With several
      threads, it is a node inside a step if there is one, and then the node that began last.
    - `in_flight_ns` is how long the node has run (None: unknown).
    - `in_flight_size` is the number of tokens of the step around the node, or of sequences if the tokens are unknown
      (0: both are unknown).
    - `threads` is the number of threads, tasks or greenlets that are in a node.
    - `is_watched`: all threads, tasks and greenlets report their nodes. Then `in_flight` 0 means that no recorded
      code is running.
    - `last` is the node of the newest record (0: there is none).
    - `is_suspended`: a signal or a debugger has stopped the process.
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
    """The state of a source, and the counters of its records: `produced == received + overwritten + rejected`.

    - `produced` records have been read.
    - `received`: they are in the statistics.
    - `overwritten`: they were replaced in the ring before they could be read, `before_attach` of them before the
      daemon first read the ring.
    - `rejected`: their node is not in the catalog, or their times run backwards. `without_node` of them are not lost:
      they are calls too deep to have a node of their own, so their time belongs to the call around them.
    - `unread` more records are written but not read yet.
    - `left_out` announcements are missing, because they exceeded the limits of the catalog or the daemon.
    - `quiet` is None if the process makes progress or has ended.
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
    without_node: int = 0


@dataclass(frozen=True, slots=True)
class StatsUpdate:
    """Cumulative statistics of the nodes that changed, in columns. A keyframe contains all nodes.

    Every value is a total since the source began. If an update is lost, the viewer's values are late but never wrong.
    The update is over all records that had ended at `monotonic_ns`, when the ring was read.

    The byte fields are little-endian i64 columns. `node` … `closed_ns` have one entry per node. `closed_ns` is the
    part of `total_ns` inside steps that have ended.

    - Some columns have values for few nodes only. For these, `rare_*` have one entry per value: `rare_column` is the
      column's index in `analysis.node_columns.SPARSE_COLUMNS`, and `rare_value` is float64.
    - `cells` contains the histogram cells that changed, in ascending order (each as the difference from the one
      before), and their counts: see `profiler.analysis.histograms`. If not all cells fit into this message, the
      others follow in the next one.
    - `steps_ns` is the time that at least one step of any phase ran. `first_ns` is the time when the first known
      record began (None: not sent).
    - `ran` lists disjoint intervals in which steps of a node (0: any step) ran, as node, begin and length. For each
      node, it has all intervals from the first that changed since the previous update. In a keyframe, it begins
      earlier, and has at most `analysis.step_intervals.MAX_SAID_INTERVALS` intervals for all nodes together.
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
    """The records themselves, for viewers that record.

    The ring numbers its records. A batch is of the numbers from `first` to below `produced`, and contains `count`
    records. The other records were overwritten or rejected. The next batch begins at `produced`. If its `first` is
    greater, a batch was lost.
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
    """The head of a piece of the daemon's history. The frames of the piece follow, as in a recording.

    They are numbered from `first`. `end` is the number after the newest frame. `host` and both times are the
    daemon's.
    """

    first: int
    end: int
    host: str
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A message that the daemon sends every second. If no message comes, a viewer notices that the daemon is silent.

    Every record that ended before `monotonic_ns` has been read.
    """

    monotonic_ns: int
    sources: tuple[SourceState, ...]


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Times of the daemon's clocks, read together. This is the answer to the viewer's question with the number
    `asked`.
    """

    asked: int
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class SourceGone:
    """The daemon has removed a source that ended long ago."""

    source: str


@dataclass(frozen=True, slots=True)
class DaemonGoodbye:
    """The daemon's last message. A different daemon may serve at the same address afterwards."""


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
