"""Make the list of all sources with one row each, and the cost of cbtop itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.comparison.noise import Change
from cbtop.protocol.device_messages import Unknown
from cbtop.protocol.messages import Sampling
from cbtop.protocol.vocabulary import DeviceKind, SourceStatus
from cbtop.viewmodels.devices import MachineView
from cbtop.viewmodels.loss import LossView, loss_view
from cbtop.viewmodels.rates import Rate, are_rates_least, rate_of
from cbtop.viewmodels.selection import WindowView, shown, shown_phase, state_of, window_view
from cbtop.viewmodels.stall import StallView, stall_view
from cbtop.viewmodels.steps import StepsView, step_us_history, steps_per_sec_history, tokens_per_sec_history
from cbtop.viewmodels.straggler import StragglerView
from cbtop.viewmodels.time_range import since_s

NO_STEP, NONE_ENDED = "it has marked no step", "no step has ended in this time"
STEPS_MISSING, TOKENS_MISSING = "steps that were not recorded left nothing", "not every step said its tokens"
NO_CLOCK = "how far the clocks of its host are from ours is not known yet"
NOTHING_YET, NOT_RECORDED = "no figures of it have come yet", "a recording does not say it"
NO_LIST, OTHER_NAMESPACE = "its daemon's samplers have not told it", "it is in another pid namespace than its daemon"
NOT_COMPARED = "it does not measure that: under `cbtop run` it does"
EVERY_STEP = "every step is recorded: there is none to compare"
TOO_FEW = "too few steps were compared yet"
NO_MODEL = "it announces none"
NO_SAMPLE, OLDER = "its samplers have told nothing yet", "an older cbtop, it does not say it"
NOT_READ = "it had ended before anybody looked, and what it left is read once it is shown"
TWO_SAMPLES = "a mean needs two samples"


@dataclass(frozen=True, slots=True)
class ClockView:
    """A host's clocks minus ours (derived). Both differences are accurate to `uncertainty_us`."""

    offset_us: float  # offset of the real-time clock of the host
    monotonic_offset_us: float  # offset of the host's monotonic clock, which times records
    uncertainty_us: float


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source in the list: its name, state, and how complete its data is.

    Figures are of the steps of `phase`, in the `window` or since the start. `unknown` has a reason for each figure
    that is None.
    """

    key: str
    pid: int
    host: str
    program: str
    model: str | None
    rank: int | None
    local_rank: int | None
    world_size: int | None
    state: SourceStatus
    state_reason: str
    activity: str
    stall: StallView | None
    phase: str | None
    steps: StepsView | None
    steps_per_sec: float | None  # steps of the source per second of wall-clock time (derived)
    window: WindowView | None
    since_s: float | None
    wall_us: float | None  # wall-clock time of the rates
    loss: LossView
    # Age of the newest data. None if the source has ended, or if its clock's offset is unknown.
    lag_s: float | None
    clock: ClockView | None
    devices: tuple[str, ...] | None  # the GPUs that the source is known to use, or `cpu`
    sample_every: int
    overhead: Sampling | None
    unknown: tuple[Unknown, ...] = ()
    stale_s: float | None = None  # seconds since the daemon's last message; None if it is not silent
    straggler: StragglerView | None = None  # the straggler (slowest rank) of the source's job, or None
    # tokens/s of the source in each second, as in `SourceView.tokens_per_sec_history`
    tokens_per_sec_history: tuple[float, ...] = ()
    steps_per_sec_history: tuple[float, ...] = ()
    step_us_history: tuple[float | None, ...] = ()
    rate_change: Change | None = None  # how the tokens/s of the source have changed since the baseline

    @property
    def standing(self) -> str:
        """The state of the source in a word, such as `live`."""
        return self.stall.word if self.stall else self.state

    @property
    def rate(self) -> Rate:
        """The rate to show for the source: tokens/s, or steps/s if tokens are unknown."""
        return rate_of(self.steps, self.tokens_per_sec_history, self.steps_per_sec_history)

    @property
    def are_rates_least(self) -> bool:
        """Whether the true rates of the source may be higher, because records of steps were lost."""
        return are_rates_least(self.window, self.loss)


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """What a cbtop process costs: CPU time (100 % is one processor) and memory.

    None means not available, for the reason `why`.
    """

    name: str  # name of the process, such as `this viewer` or `daemon 812@host`
    cpu_percent: float | None
    # Seconds of the CPU time's mean. None: the time between two samples of the daemon, about a second.
    over_s: float | None
    resident_bytes: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ListView:
    """The list of all sources, and the cost of cbtop.

    Live sources are before ended ones, newer before older. The first cost is the viewer's own.
    """

    keys: tuple[str, ...]
    ended: int  # number of ended sources, which are the last in `keys`
    row: Callable[[str], SourceRow]
    costs: tuple[ProcessCost, ...] = ()
    is_compared: bool = False  # whether a baseline exists to compare the rates with

    def rows(self) -> tuple[SourceRow, ...]:
        """Return the rows of all sources, by key."""
        return tuple(map(self.row, self.keys))


def source_row(
    record: SourceRecord,
    phase: str | None = None,
    *,
    window: bool = False,
    machine: MachineView | None = None,
    clock: ClockView | None = None,
    now_ns: int | None = None,
) -> SourceRow:
    """Return the row of `record`, with the rates of `phase` (default: see `shown_phase`).

    `machine` is the machine of the source's daemon. `now_ns` is the time on the source's host (None: unknown).
    """
    found, name, hello, state = shown(record, window=window), shown_phase(record, phase), record.hello, record.state
    steps = next((steps for steps in found.phases if steps.phase == name), None)
    wall_ns = found.time_range.end_ns - found.time_range.begin_ns if found.time_range else 0
    lag_s = None if now_ns is None or record.has_ended else max(0, now_ns - record.window.now_ns) / 1e9
    row = SourceRow(
        key=record.key,
        pid=hello.pid if hello else 0,
        host=hello.host if hello else "",
        program=hello.program if hello else "",
        model=record.manifest.model if record.manifest else None,
        rank=hello.rank if hello else None,
        local_rank=hello.local_rank if hello else None,
        world_size=hello.world_size if hello else None,
        state=state_of(record),
        state_reason=state.reason if state else "",
        activity=record.activity.name,
        stall=stall_view(record),
        phase=name,
        steps=steps,
        steps_per_sec=steps.steps_per_sec if steps else None,
        window=window_view(record, found.window) if found.window else None,
        since_s=since_s(record),
        wall_us=wall_ns / 1e3 if found.time_range else None,
        loss=loss_view(record),
        lag_s=lag_s if record.window.has_begun else None,
        clock=clock,
        devices=_devices(record.key, machine),
        sample_every=record.sample_every,
        overhead=record.sampling,
        tokens_per_sec_history=tokens_per_sec_history(record, steps),
        steps_per_sec_history=steps_per_sec_history(record, steps),
        step_us_history=step_us_history(record, name),
    )
    unknown = _unknown(row, machine, NO_CLOCK if now_ns is None else NOTHING_YET, is_unread=record.is_unread)
    return replace(row, unknown=tuple(unknown))


def _devices(key: str, machine: MachineView | None) -> tuple[str, ...] | None:
    """Return the GPUs that the source `key` uses, or `cpu`. None if unknown."""
    if machine is None:
        return None
    gpus = tuple(row.label for row in machine.gpus_of(key))
    return gpus or (("cpu",) if any(process.source == key for process in machine.processes) else None)


def _unknown(row: SourceRow, machine: MachineView | None, no_lag: str, *, is_unread: bool) -> Iterator[Unknown]:
    """Yield the reason for each figure of the source that is not available.

    Devices and age of an ended process need no reason.
    """
    is_live, steps = row.state is SourceStatus.LIVE, row.steps
    if row.model is None:
        yield Unknown("model", NOT_READ if is_unread else NO_MODEL)
    if row.steps_per_sec is None:
        why = NONE_ENDED if row.phase else f"{NO_STEP}: {row.activity}" if row.activity else NO_STEP
        why = NOT_READ if is_unread else why
        yield Unknown("steps_per_sec", STEPS_MISSING if steps and steps.is_sample else why)
    elif steps is not None and steps.tokens_per_sec is None:
        yield Unknown("tokens_per_sec", TOKENS_MISSING)
    if is_live and row.lag_s is None:
        yield Unknown("lag_s", no_lag)
    if row.clock is None:
        yield Unknown("clock_offset_us", NO_CLOCK if no_lag is NO_CLOCK else NOT_RECORDED)
    if is_live and row.devices is None:
        is_elsewhere = machine is not None and machine.devices and row.key in machine.elsewhere
        yield Unknown("devices", OTHER_NAMESPACE if is_elsewhere else NO_LIST)
    if row.overhead is None or row.overhead.overhead_percent is None:
        is_every = row.overhead is None and row.sample_every == 1
        why = EVERY_STEP if is_every else NOT_COMPARED if row.overhead is None else TOO_FEW
        yield Unknown("overhead_percent", NOT_READ if is_unread else why)


def daemon_cost(store: Store, stale_s: float | None = None) -> ProcessCost | None:
    """Return the cost that the daemon reports of itself. None before its hello."""
    daemon = store.daemon
    if daemon is None:
        return None
    name = f"daemon {daemon.pid}@{daemon.host}"
    if stale_s is not None:
        return ProcessCost(name, None, None, None, f"nothing was heard of it for {stale_s:.0f} s")
    devices = [device for known in store.devices.values() for device in known.newest.devices]
    hosts = [device for device in devices if device.kind is DeviceKind.CPU]
    found = next((one for host in hosts for one in host.processes if one.pid == daemon.pid), None)
    if found is None:
        return ProcessCost(name, None, None, None, OLDER if hosts else NO_SAMPLE)
    why = TWO_SAMPLES if found.utilization_percent is None else ""
    return ProcessCost(name, found.utilization_percent, None, found.memory_bytes, why)
