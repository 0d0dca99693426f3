"""The feed: a viewer's links to daemons and the views built from them. The TUI and headless commands share it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Self

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.kept_roofs import StoredRoofs
from cbtop.client.link import Link
from cbtop.client.marks import Marks
from cbtop.client.own_cost import OwnCost
from cbtop.client.store import Budget, SourceRecord, Store
from cbtop.daemon.devices.base import NO_ANSWER_YET, TWO_SAMPLES
from cbtop.daemon.history import MAX_HISTORY_S
from cbtop.protocol.device_messages import Unknown
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.viewmodels.baseline import Snapshot, snapshot
from cbtop.viewmodels.comparison import Comparison, baselines_of, compare, rate_change
from cbtop.viewmodels.devices import MachineView, machine_view, waiting_percent
from cbtop.viewmodels.merge import members_of, merged_view
from cbtop.viewmodels.model import (
    ClockView,
    ListView,
    MergeMode,
    ProcessCost,
    SourceRow,
    SourceSummary,
    SourceView,
    StragglerView,
    TimeView,
    Verdict,
)
from cbtop.viewmodels.on_demand import LazyValue, with_parts
from cbtop.viewmodels.source import is_live, is_selected, source_view, summaries
from cbtop.viewmodels.sources import daemon_cost, source_row
from cbtop.viewmodels.straggler import Job, job_of, straggler
from cbtop.viewmodels.verdicts import judged


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """Why a viewer has nothing more to show, and the matching exit code."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """A source with its daemon's store, the daemon's silence (`stale_s`, None if not silent) and the clock offset.

    `now_ns` is the current monotonic clock of its host, or None if not known.
    """

    record: SourceRecord
    store: Store
    stale_s: float | None = None
    clock: ClockView | None = None
    now_ns: int | None = None


class Views:
    """The views built from all visible sources."""

    silenced: Collection[str] = ()  # ids of verdicts the user has turned off
    baselines: Sequence[Snapshot] = ()  # one per process: what each view is compared with

    def __init__(self) -> None:
        self._own_cost = OwnCost()

    def poll(self, timeout_ms: int = 0) -> None:
        """Apply what has arrived. Wait at most `timeout_ms` for the first message."""
        self._own_cost.tick()

    @abstractmethod
    def seen(self) -> Mapping[str, FeedSnapshot]:
        """Return every source by its key."""

    def ceilings(self, record: SourceRecord) -> Iterable[Ceiling]:
        """Return the roofs of a source: those it announced."""
        return record.ceilings.values()

    def want(self, key: str) -> None:
        """Request the data of an ended source `key`, if possible and not read yet."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return every source, the newest live one first."""
        seen = self.seen()
        found = summaries(source.record for source in seen.values())
        return tuple(replace(summary, stale_s=seen[summary.key].stale_s) for summary in found)

    def listed(self, phase: str | None = None, *, window: bool = False) -> ListView:
        """Return the list of sources and the cost of cbtop. Data that arrives meanwhile appears in the next list."""
        seen, known = self.seen(), self.sources()
        machine_of = cache(machine_view)  # several sources share a machine
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
        """Yield the cost of this process, then of every daemon outside it."""
        own = self._own_cost
        why = "" if own.cpu_percent is not None else "it has run for less than a second"
        inside = ", the daemon in it" if self.is_daemon_inside else ""
        yield ProcessCost(f"this viewer{inside}", own.cpu_percent, own.over_s or None, own.resident_bytes, why)
        yield from self.daemon_costs()

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon runs in this process because no other was running."""
        return False

    @abstractmethod
    def daemon_costs(self) -> Iterator[ProcessCost]:
        """Yield the cost of each daemon that runs in another process."""

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """Return the view of a source, since its start or over the recent window. `key` None means the first source.

        Returns None if there is no such source yet.
        """
        if key is None:
            known = self.sources()
            key = known[0].key if known else None
        seen = self.seen()
        source = seen.get(key or "")
        if source is None:
            return None
        self.want(source.record.key)
        view = source_view(source.record, phase, window=window, ceilings=self.ceilings(source.record))
        found = _slowest(seen, job_of(source.record), view.phase)
        machines = _machines([source])
        view = with_parts(
            view,
            stale_s=source.stale_s,
            clock=source.clock,
            waiting_percent=waiting_percent(source.store, source.record),
            straggler=found,
            machines=machines,
            listed=LazyValue(lambda: self.listed(phase, window=window)),
        )
        view = with_parts(view, baseline=LazyValue(partial(self._compared, source, view)))
        return judged(view, self.silenced)

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """Return one view of all sources that belong together with `key` (None: the first).

        None without any source.
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
        view = with_parts(
            view,
            merged=merged,
            stale_s=heard[0].stale_s,
            straggler=found,
            machines=machines,
            listed=LazyValue(lambda: self.listed(phase, window=window)),
        )
        view = with_parts(view, baseline=LazyValue(partial(self._compared, seen[key], view)))
        return judged(view, self.silenced)

    def read_alike(self, key: str) -> set[str]:
        """Request the unread data of all processes that run the program of `key`. Returns the keys not read yet.

        Their data says which model they ran, and so whether they belong together.
        """
        seen = self.seen()
        program = _program(seen[key].record)
        unread = {one.record.key for one in seen.values() if one.record.is_unread and _program(one.record) == program}
        for other in unread:
            self.want(other)
        return unread

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return the recent window of every process that has enough steps for a baseline."""
        found = (snapshot(source.record, gpus_of(source)) for source in self.seen().values())
        return tuple(one for one in found if any(phase.times for phase in one.phases))

    def mark_baseline(self, key: str) -> bool:
        """Use the recent window of every process as its baseline. Returns False if `key` has too few steps."""
        found = self.snapshots()
        if all(one.key != key for one in found):
            return False
        self.baselines = found
        return True

    def clear_baseline(self) -> None:
        """Stop comparing with a baseline."""
        self.baselines = ()

    def _with_rate_change(self, source: FeedSnapshot, row: SourceRow) -> SourceRow:
        """Return `row` with the change of its tokens/s since the baseline, or the reason why it is unknown."""
        change, why = None, "it marks no steps"
        if row.phase is not None:
            now = snapshot(source.record, gpus_of(source), row.phase, self.baselines, inside=False)
            change, why = rate_change(baselines_of(self.baselines, now)[0], now, row.phase)
        unknown = () if change else (Unknown("rate_change", why),)
        return replace(row, rate_change=change, unknown=(*row.unknown, *unknown))

    def _compared(self, source: FeedSnapshot, view: SourceView) -> Comparison | None:
        """Compare the recent window of `source` with its baseline, in the phase of `view`.

        None if it has no baseline.
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
    """The views built from one store, of the sources that match `selected` (empty: all)."""

    def __init__(self, window_s: float, selected: Sequence[str]) -> None:
        super().__init__()
        self._store = Store(window_s)
        self._selected = selected

    @property
    @abstractmethod
    def now_ns(self) -> int:
        """The current monotonic clock of the daemon's host."""

    def seen(self) -> Mapping[str, FeedSnapshot]:
        return {
            key: FeedSnapshot(record, self._store, now_ns=self.now_ns)
            for key, record in self._store.sources.items()
            if not self._selected or is_selected(record, self._selected)
        }

    def daemon_costs(self) -> Iterator[ProcessCost]:
        if (cost := daemon_cost(self._store)) is not None:
            yield cost


class Feed(Views):
    """Connects to each of `endpoints`. If there are none, connects to this user's daemon or starts one inside.

    A daemon that fails does not affect the data of the others. If `selected` is given, only sources that match one of
    its entries are shown: a key, a pid or `rank=N`. A daemon inside remembers the last `history_s` seconds. Raises
    EndpointError for an invalid address, KeysError for an address on another host without `keys`.
    """

    def __init__(
        self,
        endpoints: Sequence[str] = (),
        window_s: float = DEFAULT_WINDOW_S,
        keys: ViewerKeys | None = None,
        selected: Sequence[str] = (),
        history_s: float = MAX_HISTORY_S,
    ) -> None:
        super().__init__()
        self.window_s = window_s
        self.keys = keys
        self._selected = selected
        self._kept_roofs = StoredRoofs()
        self._follows_records = False
        self._marks: Marks | None = None
        self._heard_ns = 0
        # Per view: the verdicts made since the last heartbeat, and the baselines used.
        self._verdicts: dict[object, tuple[Sequence[Snapshot], tuple[Verdict, ...]]] = {}
        with ExitStack() as opened:
            self._links: list[Link] = []
            budget = Budget()
            for endpoint in dict.fromkeys(endpoints or (None,)):
                self._links.append(Link(endpoint, window_s, keys, budget, history_s))
                opened.callback(self._links[-1].close)
            self._close = opened.pop_all().close

    def poll(self, timeout_ms: int = 0) -> None:
        super().poll()
        for link in self._links:
            link.poll(timeout_ms // len(self._links))
        self._mark()

    def _mark(self) -> None:
        """Note notable events once per heartbeat, for one daemon only: several daemons have different clocks."""
        heard_ns = self._links[0].store.heard_ns
        if len(self._links) > 1 or heard_ns == self._heard_ns:
            return
        self._heard_ns = heard_ns
        self._verdicts.clear()
        if self._marks is None or heard_ns < self._marks.begin_ns:
            self._marks = Marks(heard_ns)
        self._marks.look(heard_ns, (seen.record for seen in self.seen().values()))
        self._marks.forget_older(heard_ns - 2 * round(MAX_HISTORY_S * 1e9))

    @property
    def marks(self) -> Marks | None:
        """Notable events of the last minutes, or None if nothing was heard or there are several daemons."""
        return self._marks

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """Return the view of a source, since its start or over the recent window. `key` None means the first source.

        Its verdicts are made once per heartbeat, because text that changes twice a second cannot be read.
        """
        view = super().view(key, phase, window=window)
        if view is None or self._marks is None:
            return view
        view = with_parts(view, verdicts=LazyValue(partial(self._verdicts_on, view)))
        self._marks.judge(self._heard_ns, view)
        return view

    def _verdicts_on(self, view: SourceView) -> tuple[Verdict, ...]:
        """Return the verdicts on `view`, or those made on the same view since the last heartbeat."""
        what = view.key, view.phase, view.window is None, frozenset(self.silenced)
        known = self._verdicts.get(what)
        if known is None or known[0] is not self.baselines:
            known = self._verdicts[what] = self.baselines, view.verdicts
        return known[1]

    def watched(self) -> TimeView | None:
        """Return the watched part of the last minutes, with its notable events."""
        if self._marks is None:
            return None
        begin_ns = max(self._marks.begin_ns, self._heard_ns - round(MAX_HISTORY_S * 1e9))
        length_s = (self._heard_ns - begin_ns) / 1e9
        return TimeView(length_s, length_s, self._marks.since(begin_ns), is_now=True)

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every record, which a timeline needs."""
        if on != self._follows_records:
            self._follows_records = on
            for link in self._links:
                link.follow_records(on)

    def seen(self) -> Mapping[str, FeedSnapshot]:
        """Return every selected source. If two links report the same source, use one that is not silent."""
        by_freshness = sorted(self._links, key=lambda link: link.stale_s or 0, reverse=True)
        found: dict[str, FeedSnapshot] = {}
        for link in by_freshness:
            clock = self._clock_of(link)
            now_ns = None if clock is None else time.perf_counter_ns() + round(clock.monotonic_offset_us * 1e3)
            for key, record in link.store.sources.items():
                if not self._selected or is_selected(record, self._selected):
                    found[key] = FeedSnapshot(record, link.store, link.stale_s, clock, now_ns)
        return found

    def daemon_costs(self) -> Iterator[ProcessCost]:
        for link in self._links:
            if not link.is_daemon_inside and (cost := daemon_cost(link.store, link.stale_s)) is not None:
                yield cost

    def ceilings(self, record: SourceRecord) -> Iterable[Ceiling]:
        """Return the roofs of a source: as announced, or as measured on this machine since."""
        return self._kept_roofs.over(record)

    def want(self, key: str) -> None:
        """Request the unread data of an ended source. One request per daemon at a time; a later poll gets it."""
        for link in self._links:
            link.want(key)

    def key_of(self, pid: int) -> str | None:
        """Return the source of process `pid`, or None if it has not appeared yet."""
        records = (record for link in self._links for record in link.store.sources.values())
        return next((record.key for record in records if record.hello and record.hello.pid == pid), None)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon runs in this process because no other was running."""
        return any(link.is_daemon_inside for link in self._links)

    @property
    def endpoint(self) -> str | None:
        """The address of the daemon, or None if there are several."""
        return self._links[0].endpoint if len(self._links) == 1 else None

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The addresses that no daemon has answered from yet, each with the reason if known."""
        silent = [link for link in self._links if not link.is_complete]
        return tuple(": ".join(filter(None, (link.endpoint, link.trouble or link.no_daemon))) for link in silent)

    @property
    def answered(self) -> tuple[str, ...]:
        """The addresses of the daemons outside this process that have answered."""
        return tuple(link.endpoint for link in self._links if link.is_complete and not link.is_daemon_inside)

    @property
    def unread(self) -> tuple[str, ...]:
        """The addresses of daemons that have sent messages not applied yet."""
        return tuple(link.endpoint for link in self._links if link.is_behind)

    @property
    def is_complete(self) -> bool:
        """Whether some daemon has answered and all it sent is applied."""
        return any(link.is_complete for link in self._links) and not self.unread

    @property
    def knows_devices(self) -> bool:
        """Whether every daemon has reported its devices and processes, also the figures that take two samples."""
        return all(_knows_devices(link.store) for link in self._links)

    @property
    def left_out(self) -> str:
        """The number, names and reasons of sources dropped for lack of room; empty if none."""
        return "; ".join(filter(None, (link.store.complaint() for link in self._links)))

    @property
    def refused(self) -> str:
        """Why every daemon rejects us or we their messages; empty if one does not, or may accept us later."""
        refused = [link.refused for link in self._links]
        return "; ".join(refused) if all(refused) else ""

    def status(self) -> str:
        """Return one line about the links."""
        complaints = [link.complaint for link in self._links if link.complaint]
        if len(self._links) == 1:
            return complaints[0] if complaints else self._links[0].name
        return " · ".join((f"{len(self._links)} daemons", *complaints))

    def finished(self) -> FeedEnd | None:
        """A live feed never ends by itself."""
        return None

    def close(self) -> None:
        """Close the links and the daemon inside."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clock_of(self, link: Link) -> ClockView | None:
        """Return the most accurate clock offset of the links to the same boot, whose daemons share clocks."""
        boot_id = link.store.daemon.boot_id if link.store.daemon else ""
        same = [other for other in self._links if other.store.daemon and other.store.daemon.boot_id == boot_id]
        offsets = [offset for other in (same if boot_id else [link]) if (offset := other.clock_offset)]
        if not offsets:
            return None
        best = min(offsets, key=lambda offset: offset.uncertainty_ns)
        return ClockView(best.realtime_ns / 1e3, best.monotonic_ns / 1e3, best.uncertainty_ns / 1e3)


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
    """Return the names of the GPUs this source is known to use."""
    return [row.device.name for row in machine_view(source.store, source.stale_s).gpus_of(source.record.key)]


def _machines(sources: Iterable[FeedSnapshot]) -> tuple[MachineView, ...]:
    """Return the machine of each daemon, each once."""
    stores = {id(source.store): source for source in sources}
    return tuple(machine_view(source.store, source.stale_s) for source in stores.values() if source.store.devices)


def _slowest(seen: Mapping[str, FeedSnapshot], job: Job | None, phase: str | None) -> StragglerView | None:
    """Return the straggler among the ranks of a job."""
    if job is None or phase is None:
        return None
    heard = (source.record for source in seen.values() if source.stale_s is None)
    return straggler([other for other in heard if is_live(other) and job_of(other) == job], phase)
