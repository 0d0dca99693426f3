"""The feed: a viewer's links to daemons, and the views of their data. The TUI and headless commands use it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Self

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.clock_offset import ClockOffset
from cbtop.client.kept_roofs import StoredRoofs
from cbtop.client.links import Links
from cbtop.client.own_cost import OwnCost
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.comparison.baseline import Snapshot
from cbtop.comparison.comparison import Comparison, baselines_of, compare, rate_change
from cbtop.daemon.devices.base import NO_ANSWER_YET, TWO_SAMPLES
from cbtop.daemon.history import MAX_HISTORY_S
from cbtop.feeds.marks import Marks
from cbtop.protocol.device_messages import Unknown
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.viewmodels.communication import ranks_alongside, with_ranks
from cbtop.viewmodels.devices import MachineView, machine_view, waiting_percent
from cbtop.viewmodels.memory_growth import memory_growths
from cbtop.viewmodels.merge import members_of, merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.on_demand import LazyValue, with_parts
from cbtop.viewmodels.selection import is_live, is_selected
from cbtop.viewmodels.serving import engine_of, serving_view, shared_engine
from cbtop.viewmodels.snapshot import snapshot
from cbtop.viewmodels.source import SourceSummary, SourceView, source_view, summaries
from cbtop.viewmodels.sources import ClockView, ListView, ProcessCost, SourceRow, daemon_cost, source_row
from cbtop.viewmodels.straggler import Job, StragglerView, job_of, straggler
from cbtop.viewmodels.time_travel import TimeView
from cbtop.viewmodels.training import TrainingView
from cbtop.viewmodels.verdict import Verdict, Withheld
from cbtop.viewmodels.verdicts import judged


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """The reason why a viewer has nothing more to show, with the exit code of the command."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """A source, its daemon's store, and the offset between its host's clocks and ours.

    `stale_s` is the time since the daemon's last message (None: not silent). `now_ns` is the time on the host's
    monotonic clock (None: unknown).
    """

    record: SourceRecord
    store: Store
    stale_s: float | None = None
    clock: ClockView | None = None
    now_ns: int | None = None


class Views:
    """Makes views for a screen or report from the data of all visible sources."""

    is_recording = False  # whether this feed shows the past, so nothing new can be measured
    silenced: Collection[str] = ()  # ids of the verdicts that the user has turned off
    baselines: Sequence[Snapshot] = ()  # The baseline of each process, to compare its views with.

    def __init__(self) -> None:
        self._own_cost = OwnCost()

    def poll(self, timeout_ms: int = 0) -> None:
        """Apply the daemons' messages. Wait at most `timeout_ms` for the first."""
        self._own_cost.tick()

    @property
    def starting(self) -> str:
        """The program that this cbtop has started, if it runs and has not reported anything yet. Otherwise ""."""
        return ""

    @abstractmethod
    def seen(self) -> Mapping[str, FeedSnapshot]:
        """Return every visible source, by its key."""

    def ceilings(self, record: SourceRecord) -> Iterable[Ceiling]:
        """Return the roofs (speed limits of the hardware) that a source announced."""
        return record.ceilings.values()

    def want(self, key: str) -> None:
        """Request the data of the ended source `key`, unless it was read or cannot be requested."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return every visible source, the newest live one first."""
        seen = self.seen()
        found = summaries(source.record for source in seen.values())
        return tuple(replace(summary, stale_s=seen[summary.key].stale_s) for summary in found)

    def listed(self, phase: str | None = None, *, window: bool = False) -> ListView:
        """Return the list of sources, and the cost of cbtop. It does not change when more data arrives."""
        seen, known = self.seen(), self.sources()
        machine_of = cache(machine_view)  # Several sources run on one machine, so cache its view.
        slowest_of = cache(partial(_slowest, seen))

        @cache
        def row(key: str) -> SourceRow:
            one = seen[key]
            machine = machine_of(one.store, one.stale_s) if one.store.devices else None
            found = source_row(one.record, phase, window=window, machine=machine, clock=one.clock, now_ns=one.now_ns)
            slowest = slowest_of(job_of(one.record), found.phase)
            found = replace(found, stale_s=one.stale_s, straggler=slowest)
            return self._with_rate_change(one, found) if self.baselines else found

        ended = sum(one.state is not SourceStatus.LIVE for one in known)
        return ListView(tuple(one.key for one in known), ended, row, tuple(self._costs()), bool(self.baselines))

    def _costs(self) -> Iterator[ProcessCost]:
        """Yield the cost of this process, then of every daemon in another process."""
        own = self._own_cost
        why = "" if own.cpu_percent is not None else "it has run for less than a second"
        inside = ", the daemon in it" if self.is_daemon_inside else ""
        yield ProcessCost(f"this viewer{inside}", own.cpu_percent, own.over_s or None, own.resident_bytes, why)
        yield from self.daemon_costs()

    @property
    def is_daemon_inside(self) -> bool:
        """Whether a daemon runs in this process, because no other daemon was running."""
        return False

    @abstractmethod
    def daemon_costs(self) -> Iterator[ProcessCost]:
        """Yield the cost of each daemon that runs in another process."""

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """Return the view of a source since its start, or with `window` of its recent window. Without `key`, of the
        first source.

        None if the source has not appeared yet.
        """
        if key is None:
            known = self.sources()
            key = known[0].key if known else None
        seen = self.seen()
        source = seen.get(key or "")
        if source is None:
            return None
        self.want(source.record.key)
        view = source_view(
            source.record,
            phase,
            window=window,
            ceilings=self.ceilings(source.record),
            is_recording=self.is_recording,
            engine=engine_of(source.record, (other.record for other in seen.values())),
        )
        found = _slowest(seen, job_of(source.record), view.phase)
        machines = _machines([source])
        view = with_parts(
            view,
            stale_s=source.stale_s,
            clock=source.clock,
            waiting_percent=waiting_percent(source.store, source.record),
            memory_growths=LazyValue(partial(memory_growths, source.store, source.record)),
            straggler=found,
            training=LazyValue(partial(_training_of_rank, seen, source.record, view)),
            machines=machines,
            listed=LazyValue(lambda: self.listed(phase, window=window)),
        )
        view = with_parts(view, baseline=LazyValue(partial(self._compared, source, view)))
        return judged(view, self.silenced)

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """Return one view of the source `key` and all related sources, such as the ranks of its job.

        Without `key`, the first source. None without sources.
        """
        seen = self.seen()
        if key not in seen:
            key = next((summary.key for summary in self.sources()), None)
        if key is None:
            return None
        self.read_alike(key)
        alike = [
            seen[other.key] for other in members_of(seen[key].record, (source.record for source in seen.values()))
        ]
        heard = [source for source in alike if source.stale_s is None] or alike
        heard = [source for source in heard if not source.record.is_unread] or heard
        view = merged_view([source.record for source in heard], mode, phase, window=window)
        found = _slowest(seen, job_of(seen[key].record), view.phase)
        assert view.merged is not None
        merged = replace(view.merged, left_out=len(alike) - len(view.merged.members))
        machines = _machines(heard)
        engine = shared_engine([one.record for one in heard], [source.record for source in seen.values()])
        view = with_parts(
            view,
            merged=merged,
            serving=LazyValue(lambda: serving_view(engine)),
            stale_s=heard[0].stale_s,
            straggler=found,
            machines=machines,
            listed=LazyValue(lambda: self.listed(phase, window=window)),
        )
        view = with_parts(view, baseline=LazyValue(partial(self._compared, seen[key], view)))
        return judged(view, self.silenced)

    def read_alike(self, key: str) -> set[str]:
        """Request the unread data of all processes with the same program as `key`, and return their keys.

        It tells their models, because only processes with the same model are merged.
        """
        seen = self.seen()
        program = _program(seen[key].record)
        unread = {one.record.key for one in seen.values() if one.record.is_unread and _program(one.record) == program}
        for other in unread:
            self.want(other)
        return unread

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return a snapshot of every process's recent window. Processes with too few steps for a baseline are left
        out.
        """
        found = (snapshot(source.record, gpus_of(source)) for source in self.seen().values())
        return tuple(one for one in found if any(phase.times for phase in one.phases))

    def mark_baseline(self, key: str) -> bool:
        """Make every process's recent window its baseline. False if `key` has too few steps."""
        found = self.snapshots()
        if all(one.key != key for one in found):
            return False
        self.baselines = found
        return True

    def clear_baseline(self) -> None:
        """Forget the baselines, and stop comparing with them."""
        self.baselines = ()

    def finished(self) -> FeedEnd | None:
        """Return why the viewer should end, or None. This feed never ends it."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_rate_change(self, source: FeedSnapshot, row: SourceRow) -> SourceRow:
        """Return `row` of the list of sources with the change of its tokens/s since the baseline, or why the change
        is unknown.
        """
        change, why = None, "it marks no steps"
        if row.phase is not None:
            now = snapshot(source.record, gpus_of(source), row.phase, self.baselines, inside=False)
            change, why = rate_change(baselines_of(self.baselines, now)[0], now, row.phase)
        unknown = () if change else (Unknown("rate_change", why),)
        return replace(row, rate_change=change, unknown=(*row.unknown, *unknown))

    def _compared(self, source: FeedSnapshot, view: SourceView) -> Comparison | None:
        """Compare the recent window of `source` with its baseline, in the phase of `view`. None without a
        baseline.
        """
        now = snapshot(source.record, gpus_of(source), view.phase, self.baselines) if self.baselines else None
        bases = baselines_of(self.baselines, now) if now else []
        if now is None or not bases:
            return None
        base = bases[0]
        if view.merged is not None:
            return Comparison(base, now, view.phase or "", "these are several processes, and each has its own")
        if view.phase is None:
            return Comparison(base, now, "", "the process marks no steps")
        return compare(base, now, view.phase, len(bases))


class StoreViews(Views):
    """Makes views from a single store, for example of a recording.

    `selected` limits the sources, unless it is empty.
    """

    def __init__(self, selected: Sequence[str]) -> None:
        super().__init__()
        self._selected = selected

    @property
    @abstractmethod
    def store(self) -> Store:
        """The store that contains the data of the views."""

    @property
    @abstractmethod
    def now_ns(self) -> int:
        """The time now, on the monotonic clock of the daemon's host."""

    def seen(self) -> Mapping[str, FeedSnapshot]:
        return {
            key: FeedSnapshot(record, self.store, now_ns=self.now_ns)
            for key, record in self.store.sources.items()
            if not self._selected or is_selected(record, self._selected)
        }

    def daemon_costs(self) -> Iterator[ProcessCost]:
        if (cost := daemon_cost(self.store)) is not None:
            yield cost


class _Judged(NamedTuple):
    """Return the verdicts (problems with advice) on a view."""

    verdicts: tuple[Verdict, ...]
    withheld: Withheld | None


class Feed(Views):
    """The live sources of one or several daemons (see `Links`).

    `selected` limits the sources. An entry is a key, a pid or `rank=N`. A daemon in this process remembers the last
    `history_s` seconds. Raises EndpointError for an invalid address, and KeysError if an address on another host
    needs `keys`.
    """

    def __init__(
        self,
        endpoints: Sequence[str] = (),
        window_s: float = DEFAULT_WINDOW_S,
        keys: Mapping[str, ViewerKeys] | None = None,
        selected: Sequence[str] = (),
        history_s: float = MAX_HISTORY_S,
    ) -> None:
        super().__init__()
        self.window_s = window_s
        self.keys = keys or {}
        self._selected = selected
        self._kept_roofs = StoredRoofs()
        self._marks: Marks | None = None
        self._heard_ns = 0
        # view -> the second in which its verdicts were made, its baselines then, and these verdicts
        self._verdicts: dict[object, tuple[int, Sequence[Snapshot], _Judged]] = {}
        self.links = Links(endpoints, window_s, self.keys, history_s)

    def poll(self, timeout_ms: int = 0) -> None:
        super().poll()
        self.links.poll(timeout_ms)
        self._mark()

    def _mark(self) -> None:
        """Find notable events (stalls, ends, new verdicts), once per heartbeat.

        None with several daemons, because their clocks differ.
        """
        heard_ns = self.links.heard_ns
        if heard_ns is None or heard_ns == self._heard_ns:
            return
        self._heard_ns = heard_ns
        if self._marks is None or heard_ns < self._marks.begin_ns:
            self._marks = Marks(heard_ns)
        self._marks.look(heard_ns, (seen.record for seen in self.seen().values()))
        self._marks.forget_older(heard_ns - 2 * round(MAX_HISTORY_S * 1e9))

    @property
    def marks(self) -> Marks | None:
        """The notable events of the last minutes. None before the first message, and with several daemons."""
        return self._marks

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """Return the view of a source since its start, or with `window` of its recent window. Without `key`, of the
        first source.

        Verdicts are made once a second, because a text that changes twice a second is hard to read.
        """
        view = super().view(key, phase, window=window)
        if view is None or self._marks is None:
            return view
        judged_now = partial(self._judged, view)
        view = with_parts(
            view,
            verdicts=LazyValue(lambda: judged_now().verdicts),
            withheld=LazyValue(lambda: judged_now().withheld),
        )
        self._marks.judge(self._heard_ns, view)
        return view

    def _judged(self, view: SourceView) -> _Judged:
        """Return the verdicts (problems with advice) on `view`.

        New verdicts are made in each second of the source's clock, as the pictures of bricks and layers are, because
        both need the same figures. Without a clock, they are made at each heartbeat.
        """
        what = view.key, view.phase, view.window is None, frozenset(self.silenced)
        second = self._heard_ns if view.second is None else view.second
        known = self._verdicts.get(what)
        if known is None or known[0] != second or known[1] is not self.baselines:
            known = second, self.baselines, _Judged(view.verdicts, view.withheld)
            self._verdicts = {key: one for key, one in self._verdicts.items() if one[0] == second} | {what: known}
        return known[2]

    def watched(self) -> TimeView | None:
        """Return the time bar of the last minutes with its notable events. It begins when this viewer connected."""
        if self._marks is None:
            return None
        begin_ns = max(self._marks.begin_ns, self._heard_ns - round(MAX_HISTORY_S * 1e9))
        length_s = (self._heard_ns - begin_ns) / 1e9
        return TimeView(length_s, length_s, self._marks.since(begin_ns), is_now=True)

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving single records, which only a timeline needs."""
        self.links.follow_records(on)

    def seen(self) -> Mapping[str, FeedSnapshot]:
        """Return every selected source. If two links report it, the one that is not silent counts."""
        by_freshness = sorted(self.links, key=lambda link: link.stale_s or 0, reverse=True)
        found: dict[str, FeedSnapshot] = {}
        for link in by_freshness:
            offset = self.links.clock_offset_of(link)
            clock = None if offset is None else _clock_view(offset)
            now_ns = None if clock is None else time.perf_counter_ns() + round(clock.monotonic_offset_us * 1e3)
            for key, record in link.store.sources.items():
                if not self._selected or is_selected(record, self._selected):
                    found[key] = FeedSnapshot(record, link.store, link.stale_s, clock, now_ns)
        return found

    def daemon_costs(self) -> Iterator[ProcessCost]:
        for link in self.links:
            if not link.is_daemon_inside and (cost := daemon_cost(link.store, link.stale_s)) is not None:
                yield cost

    def ceilings(self, record: SourceRecord) -> Iterable[Ceiling]:
        """Return the roofs (speed limits of the hardware) of a source.

        A roof that was measured on this machine later replaces the announced one.
        """
        return self._kept_roofs.over(record)

    def want(self, key: str) -> None:
        """Request the unread data of ended sources, from each daemon one at a time. A later poll reads the answer."""
        self.links.want(key)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether a daemon runs in this process, because no other daemon was running."""
        return self.links.is_daemon_inside

    @property
    def is_complete(self) -> bool:
        """Whether a daemon has answered, and all its messages are applied."""
        return self.links.is_complete

    @property
    def knows_devices(self) -> bool:
        """Whether every daemon has reported its devices and processes, with figures that need two samples."""
        return all(_knows_devices(link.store) for link in self.links)

    @property
    def left_out(self) -> str:
        """Number, names and reasons of the sources that were dropped for lack of memory, as one text. "" without
        any.
        """
        return self.links.left_out

    @property
    def refused(self) -> str:
        """Why no daemon will ever accept this viewer, or why this viewer accepts none: different versions or keys. ""
        if a link works or may work later.
        """
        return self.links.refused

    def status(self) -> str:
        """Return one line about the state of the links to the daemons."""
        return self.links.status()

    def close(self) -> None:
        """Close the links to the daemons, and stop the daemon in this process."""
        self.links.close()


def _clock_view(offset: ClockOffset) -> ClockView:
    return ClockView(offset.realtime_ns / 1e3, offset.monotonic_ns / 1e3, offset.uncertainty_ns / 1e3)


def _program(record: SourceRecord) -> str:
    return record.hello.program if record.hello else ""


def _knows_devices(store: Store) -> bool:
    found = [sampled.newest for sampled in store.devices.values()]
    reasons = {each.why for sample in found for device in sample.devices for each in device.unknown}
    reasons |= {sample.trouble for sample in found}
    machine = machine_view(store)
    told = {process.source for process in machine.processes}
    running = {key for key, record in store.sources.items() if is_live(record)} - set(machine.elsewhere)
    return bool(found) and reasons.isdisjoint((NO_ANSWER_YET, TWO_SAMPLES)) and running <= told


def gpus_of(source: FeedSnapshot) -> list[str]:
    """Return the names of the GPUs that this source uses, if known."""
    return [row.device.name for row in machine_view(source.store, source.stale_s).gpus_of(source.record.key)]


def _machines(sources: Iterable[FeedSnapshot]) -> tuple[MachineView, ...]:
    """Return the machines of the daemons, each machine once."""
    stores = {id(source.store): source for source in sources}
    return tuple(machine_view(source.store, source.stale_s) for source in stores.values() if source.store.devices)


def _training_of_rank(
    seen: Mapping[str, FeedSnapshot], record: SourceRecord, view: SourceView
) -> TrainingView | None:
    """Return the training steps in `view`, and compare their communication with the job's other ranks."""
    training = view.training
    if training is None or training.communication is None or view.phase is None:
        return training
    others = ranks_alongside(record, (one.record for one in seen.values()))
    return replace(training, communication=with_ranks(training.communication, record, others, view.phase))


def _slowest(seen: Mapping[str, FeedSnapshot], job: Job | None, phase: str | None) -> StragglerView | None:
    """Return the straggler among the ranks of a job, or None if no rank is slower than the others."""
    if job is None or phase is None:
        return None
    heard = (source.record for source in seen.values() if source.stale_s is None)
    return straggler([other for other in heard if is_live(other) and job_of(other) == job], phase)
