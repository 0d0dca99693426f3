"""A viewer's data about one profiled process: catalog, totals and a limited history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from cbtop.client.busy import SLICES, BusySlices
from cbtop.client.contents import AnnouncedContents
from cbtop.client.recent import RecentRecords
from cbtop.client.serving import AnnouncedServing
from cbtop.client.trend import BrickTrend
from cbtop.client.window import Losses, Window
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.counter_messages import BrickCounters
from cbtop.protocol.guard_messages import GuardedSteps
from cbtop.protocol.kernel_messages import HostTimes, KernelBurst
from cbtop.protocol.memory_messages import BrickMemories, TrainingMemory
from cbtop.protocol.messages import (
    Activity,
    Ceiling,
    CheckResult,
    Compilation,
    Dependency,
    Goodbye,
    HostHello,
    Manifest,
    Node,
    Sampling,
    SourceState,
    TraceSummary,
)
from cbtop.protocol.sample_messages import CpuSamples
from cbtop.protocol.training_messages import GradientMessage, TrainingTimes
from cbtop.protocol.vocabulary import NodeKind, SourceStatus

HISTORY_S = 120
MAX_PHASES = 64  # At most this many phases of a source have token rates.
# Approximate memory in bytes of: a source, a node without its names, a dependency, an announcement with the longest
# texts, and a phase.
SOURCE_BYTES, NODE_BYTES, DEPENDENCY_BYTES, SAID_BYTES, PHASE_BYTES = 16 << 10, 600, 300, 3 << 10, 48 << 10
BUSY_BYTES = 16 * (SLICES + 1)  # bytes per node for its times in the slices of `busy`
_HAVE_ENDED = (SourceStatus.ENDED, SourceStatus.GONE, SourceStatus.FAULTY)


@dataclass(frozen=True, slots=True)
class StepSample:
    """The totals of one phase from the start of the process to one moment."""

    monotonic_ns: int
    tokens: int
    count: int = 0  # number of steps of the phase since the process started
    time_ns: int = 0  # total time in ns of these steps
    sequences: int = 0  # sum of the sequences of steps that reported them
    sequences_given: int = 0  # number of steps that reported sequences
    cached: int = 0  # sum of the cached positions before each step that reported them
    cached_given: int = 0


@dataclass(slots=True)
class SourceRecord:
    """All data of this viewer about one profiled process."""

    key: str
    window: Window
    hello: HostHello | None = None
    nodes: NodeTable = field(default_factory=NodeTable)
    # a dict used as a set, because it keeps the order of arrival
    dependencies: dict[Dependency, None] = field(default_factory=dict)
    manifest: Manifest | None = None
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    checks: dict[tuple[str, str], CheckResult] = field(default_factory=dict)
    traces: dict[str, TraceSummary] = field(default_factory=dict)  # the model traces by id, such as MLT-01
    activity: Activity = Activity("")  # noqa: RUF009 - frozen
    # The announced sampling of steps. None: one step in `hello.sample_every` is recorded, at unknown cost.
    sampling: Sampling | None = None
    # the newest compilations; the key is the number of the compilation modulo MAX_COMPILATIONS
    compilations: dict[int, Compilation] = field(default_factory=dict)
    burst: KernelBurst | None = None
    host_times: HostTimes | None = None
    training_times: dict[tuple[str, str], TrainingTimes] = field(default_factory=dict)  # by phase and model
    training_memory: dict[tuple[str, str], TrainingMemory] = field(default_factory=dict)  # by phase and model
    brick_memory: dict[tuple[str, str], BrickMemories] = field(default_factory=dict)  # by phase and model
    guarded: dict[str, GuardedSteps] = field(default_factory=dict)  # by model
    # the newest messages about gradients, by (kind, phase, model)
    gradients: dict[tuple[type, str, str], GradientMessage] = field(default_factory=dict)
    contents: AnnouncedContents = field(default_factory=AnnouncedContents)
    serving: AnnouncedServing = field(default_factory=AnnouncedServing)
    counters: BrickCounters | None = None  # the newest counters of bricks
    cpu_samples: CpuSamples | None = None  # the sampled functions of the newest time
    goodbye: Goodbye | None = None
    state: SourceState | None = None
    stats: NodeStats = field(default_factory=NodeStats)
    # one sample of each phase's totals per second
    history: dict[str, deque[StepSample]] = field(default_factory=dict)
    trend: BrickTrend = field(default_factory=BrickTrend)
    busy: BusySlices | None = None  # for comparing ranks; None if the process is not one of several
    # the newest single records; empty unless the store keeps them
    recent: RecentRecords = field(default_factory=RecentRecords)
    names_bytes: int = 0  # memory in bytes of the names of nodes
    trains: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended or is lost, so that no more data can arrive."""
        return self.state is not None and self.state.state in _HAVE_ENDED

    @property
    def is_unread(self) -> bool:
        """Whether the process has ended and its data was not read. The daemon reads it only on request."""
        state = self.state
        return self.has_ended and state is not None and not self.stats.received and state.received + state.unread > 0

    @property
    def is_command(self) -> bool:
        """Whether the process is the command of `cbtop run`, and not a child of it."""
        return self.hello is not None and self.hello.command_pid == self.hello.pid

    @property
    def steps_ended(self) -> int:
        """Number of steps that this process has counted."""
        return sum(int(self.stats.column("count")[step.id]) for step in _steps_of(self))

    @property
    def sample_every(self) -> int:
        """N if one step in N is recorded."""
        if self.sampling is not None:
            return self.sampling.every
        return self.hello.sample_every if self.hello else 1

    @property
    def leaves_steps_out(self) -> bool:
        """Whether some steps are not recorded, to keep a limit on the cost of recording."""
        return self.sampling is not None or self.sample_every > 1

    def kept(self) -> int:
        """Number of entries that use memory: nodes, announcements, and parts of announcements."""
        places = max(len(self.nodes), len(self.stats))
        traced = sum(len(trace.numbers) + len(trace.anomalies) for trace in self.traces.values())
        traced += len(self.burst.kernels) if self.burst else 0
        traced += len(self.host_times.bricks) if self.host_times else 0
        traced += sum(1 + len(times.parts) for times in self.training_times.values()) + len(self.gradients)
        traced += sum(1 + len(memory.parts) for memory in self.training_memory.values())
        traced += 2 * len(self.guarded) + len(self.contents) + len(self.serving) + self._sampled()
        return places + len(self.dependencies) + len(self.ceilings) + len(self.checks) + len(self.traces) + traced

    def _sampled(self) -> int:
        """Number of sampled places and functions, and of counted bricks."""
        counted = len(self.counters.bricks) if self.counters else 0
        return counted + sum(1 + len(one.functions) for one in (self.cpu_samples.places if self.cpu_samples else ()))

    @property
    def size_bytes(self) -> int:
        """Approximate memory used."""
        said = len(self.ceilings) + len(self.checks)
        said += sum(1 + len(trace.numbers) + len(trace.anomalies) for trace in self.traces.values())
        said += len(self.burst.kernels) if self.burst else 0
        said += len(self.host_times.bricks) if self.host_times else 0
        said += sum(1 + len(times.parts) for times in self.training_times.values()) + len(self.gradients)
        said += sum(1 + len(memory.parts) for memory in self.training_memory.values())
        said += 2 * len(self.guarded) + len(self.contents) + len(self.serving) + self._sampled()
        known = SOURCE_BYTES + NODE_BYTES * len(self.nodes) + self.names_bytes + SAID_BYTES * said
        known += DEPENDENCY_BYTES * len(self.dependencies) + PHASE_BYTES * len(self.history)
        slices = BUSY_BYTES * len(self.stats) if self.busy else 0
        kept = (self.stats, self.window, self.trend, self.recent)
        return known + slices + sum(one.size_bytes for one in kept) + self.window.sum_bytes

    def begin_range(self, now_ns: int, length_s: float) -> None:
        """Restart windows, curves and records for a range of `length_s` seconds that begins now.

        `now_ns` is the time on the daemon's clock. It counts only if nothing was received from this source yet.
        """
        self.window = self.window.from_now_on(length_s)
        if not self.window.has_begun and not self.has_ended:
            # Begin the window now. With the next update, a report about an earlier time could count for the range.
            self.window.tick(now_ns, losses=Losses())
        self.recent, self.trend = RecentRecords(), BrickTrend()
        at_ns = self.window.now_ns
        if len(self.stats):
            self.trend.tick(at_ns, self.nodes, self.stats)
        if self.busy is not None:
            self.busy = BusySlices()
            self.busy.tick(at_ns, self.nodes, self.stats)
        self.history = {
            display_name(step): deque([_step_sample(self, step, at_ns)], maxlen=HISTORY_S + 1)
            for step in _steps_of(self)
            if display_name(step) in self.history
        }

    def forget_catalog(self) -> None:
        """Forget the announcements that a process may withdraw. The next snapshot repeats the announcements that are
        still valid.

        Nodes and statistics stay, because a process never removes them.
        """
        self.dependencies.clear()
        self.ceilings.clear()
        self.checks.clear()
        self.traces.clear()
        self.burst = self.host_times = None
        self.training_times.clear()
        self.training_memory.clear()
        self.guarded.clear()
        self.gradients.clear()
        self.contents = AnnouncedContents()
        self.serving = AnnouncedServing()
        self.cpu_samples = self.counters = None


def remember(record: SourceRecord, monotonic_ns: int, growth: Growth | None = None) -> None:
    """Set this source's clock to `monotonic_ns`, and store samples for its curves.

    `growth` is already in the statistics. The window of an ended process ends with the process.
    """
    # A heartbeat has the time when the daemon last read its first source. For an ended source, or one that was read
    # later, this time is wrong, so keep the source's own time.
    monotonic_ns = (
        record.window.now_ns or monotonic_ns if record.has_ended else max(monotonic_ns, record.window.now_ns)
    )
    state, losses = record.state, None
    if state is not None:
        losses = Losses(
            state.overwritten + state.rejected - state.without_node - state.before_attach,
            state.produced - state.before_attach,
        )
    record.window.tick(monotonic_ns, growth, losses)
    if record.history and growth is not None and growth.is_empty:
        # A keyframe only repeats statistics, so it adds no sample. Some viewers do not receive keyframes, but all
        # show the same curves.
        return
    record.trend.tick(monotonic_ns, record.nodes, record.stats)
    if record.busy:
        record.busy.tick(monotonic_ns, record.nodes, record.stats)
    for step in _steps_of(record):
        phase = display_name(step)
        if phase not in record.history and len(record.history) >= MAX_PHASES:
            continue
        history = record.history.setdefault(phase, deque(maxlen=HISTORY_S + 1))
        if not history or monotonic_ns // 1_000_000_000 > history[-1].monotonic_ns // 1_000_000_000:
            history.append(_step_sample(record, step, monotonic_ns))


def _steps_of(record: SourceRecord) -> Iterator[Node]:
    """Yield the source's step nodes that have statistics."""
    for node in record.nodes.children[None]:
        if node.kind is NodeKind.STEP and node.id < len(record.stats):
            yield node


def _step_sample(record: SourceRecord, step: Node, monotonic_ns: int) -> StepSample:
    rare = ("sequences", "sequences_given", "kept", "kept_given")
    sizes = (record.stats.rare(name, (step.id,)) for name in rare)
    totals = (int(record.stats.column(name)[step.id]) for name in ("elements", "count", "total_ns"))
    return StepSample(monotonic_ns, *totals, *sizes)
