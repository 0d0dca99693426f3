"""The feed: a viewer's links to whatever runs, and the views made from it. TUI and headless share it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.kept_roofs import KeptRoofs
from cbtop.client.link import Link
from cbtop.client.store import Budget, SourceRecord, Store
from cbtop.daemon.devices.base import NO_ANSWER_YET, TWO_SAMPLES
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import Ceiling
from cbtop.viewmodels.devices import MachineView, machine_view
from cbtop.viewmodels.merge import members_of, merged_view
from cbtop.viewmodels.model import ClockView, MergeMode, SourceSummary, SourceView, StragglerView
from cbtop.viewmodels.source import is_live, is_selected, source_view, summaries
from cbtop.viewmodels.straggler import job_of, straggler
from cbtop.viewmodels.verdicts import judged


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """Why a viewer has nothing more to show, and the exit code that goes with it."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A source, all that its daemon said, how long that was not heard (None: it is), its host's clock less ours."""

    record: SourceRecord
    store: Store
    stale_s: float | None = None
    clock: ClockView | None = None


class Views:
    """The views made from all that is seen."""

    silenced: Collection[str] = ()  # ids of verdicts that nobody wants to read

    @abstractmethod
    def seen(self) -> Mapping[str, Seen]:
        """Every source by its key."""

    def ceilings(self, record: SourceRecord) -> Iterable[Ceiling]:
        """The roofs over a source: those it announced."""
        return record.ceilings.values()

    def sources(self) -> tuple[SourceSummary, ...]:
        """Every source, the newest live one first."""
        seen = self.seen()
        found = summaries(source.record for source in seen.values())
        return tuple(replace(summary, stale_s=seen[summary.key].stale_s) for summary in found)

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """What a source shows, of all that was seen or its window; None for `key` is the first of `sources()`.

        None when there is nothing yet.
        """
        if key is None:
            known = self.sources()
            key = known[0].key if known else None
        seen = self.seen()
        source = seen.get(key or "")
        if source is None:
            return None
        view = source_view(source.record, phase, window=window, ceilings=self.ceilings(source.record))
        found = _straggler(seen, source.record, view.phase)
        machines = _machines([source])
        view = replace(view, stale_s=source.stale_s, clock=source.clock, straggler=found, machines=machines)
        return judged(view, self.silenced)

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """All sources that go together with source `key` (None: the first) as one; None without any."""
        seen = self.seen()
        if key not in seen:
            key = next((summary.key for summary in self.sources()), None)
        if key is None:
            return None
        alike = [
            seen[other.key] for other in members_of(seen[key].record, (source.record for source in seen.values()))
        ]
        heard = [source for source in alike if source.stale_s is None] or alike
        view = merged_view([source.record for source in heard], mode, phase, window=window)
        found = _straggler(seen, seen[key].record, view.phase)
        assert view.merged is not None
        merged = replace(view.merged, left_out=len(alike) - len(view.merged.members))
        machines = _machines(heard)
        view = replace(view, merged=merged, stale_s=heard[0].stale_s, straggler=found, machines=machines)
        return judged(view, self.silenced)


class StoreViews(Views):
    """The views made from one store, of the sources that match `selected` (none: of all)."""

    def __init__(self, window_s: float, selected: Sequence[str]) -> None:
        self._store = Store(window_s)
        self._selected = selected

    def seen(self) -> Mapping[str, Seen]:
        return {
            key: Seen(record, self._store)
            for key, record in self._store.sources.items()
            if not self._selected or is_selected(record, self._selected)
        }


class Feed(Views):
    """Connects to each of `endpoints`; with none, to this user's daemon, starting one inside where none runs.

    What one daemon does, or that it is gone, touches nothing that came from the others. With `selected` only the
    sources that match one of these are there: a key, a pid or `rank=N`. Raises EndpointError for an address that
    cannot be one, KeysError for another host's without `keys`.
    """

    def __init__(
        self,
        endpoints: Sequence[str] = (),
        window_s: float = DEFAULT_WINDOW_S,
        keys: ViewerKeys | None = None,
        selected: Sequence[str] = (),
    ) -> None:
        self.keys = keys
        self._selected = selected
        self._kept_roofs = KeptRoofs()
        self._follows_records = False
        with ExitStack() as opened:
            self._links: list[Link] = []
            budget = Budget()
            for endpoint in dict.fromkeys(endpoints or (None,)):
                self._links.append(Link(endpoint, window_s, keys, budget))
                opened.callback(self._links[-1].close)
            self._close = opened.pop_all().close

    def poll(self, timeout_ms: int = 0) -> None:
        """Take in what arrived; wait at most `timeout_ms` for something to arrive."""
        for link in self._links:
            link.poll(timeout_ms // len(self._links))

    def follow_records(self, on: bool) -> None:
        """Receive every record too, as a timeline needs them, or no more."""
        if on != self._follows_records:
            self._follows_records = on
            for link in self._links:
                link.follow_records(on)

    def seen(self) -> Mapping[str, Seen]:
        """Every selected source; of two links that bring the same one, from that which is not silent."""
        by_freshness = sorted(self._links, key=lambda link: link.stale_s or 0, reverse=True)
        return {
            key: Seen(record, link.store, link.stale_s, self._clock_of(link))
            for link in by_freshness
            for key, record in link.store.sources.items()
            if not self._selected or is_selected(record, self._selected)
        }

    def ceilings(self, record: SourceRecord) -> Iterable[Ceiling]:
        """The roofs over a source: those it announced or, of this machine, those measured again since."""
        return self._kept_roofs.over(record)

    def key_of(self, pid: int) -> str | None:
        """The source whose process is `pid`; None while it has not appeared."""
        records = (record for link in self._links for record in link.store.sources.values())
        return next((record.key for record in records if record.hello and record.hello.pid == pid), None)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon is ours: nobody else was there to watch."""
        return any(link.is_daemon_inside for link in self._links)

    @property
    def endpoint(self) -> str | None:
        """The address of the daemon; None where there are several."""
        return self._links[0].endpoint if len(self._links) == 1 else None

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The addresses where no daemon has answered yet, with the reason where one is known."""
        silent = [link for link in self._links if not link.is_complete]
        return tuple(": ".join(filter(None, (link.endpoint, link.trouble or link.no_daemon))) for link in silent)

    @property
    def unread(self) -> tuple[str, ...]:
        """The addresses whose daemon has said more than was read yet."""
        return tuple(link.endpoint for link in self._links if link.is_behind)

    @property
    def is_complete(self) -> bool:
        """Whether all that runs has been told, as far as any daemon has answered."""
        return any(link.is_complete for link in self._links) and not self.unread

    @property
    def knows_devices(self) -> bool:
        """Whether every daemon has told of its devices and of the processes that run all it can, means included."""
        return all(_knows_devices(link.store) for link in self._links)

    @property
    def left_out(self) -> str:
        """How many sources there was no room for, which and why; empty where there is none."""
        return "; ".join(filter(None, (link.store.complaint() for link in self._links)))

    @property
    def refused(self) -> str:
        """Why no daemon takes us, or we no messages; empty while one does, or may yet."""
        refused = [link.refused for link in self._links]
        return "; ".join(refused) if all(refused) else ""

    def status(self) -> str:
        """One line about the links."""
        complaints = [link.complaint for link in self._links if link.complaint]
        if len(self._links) == 1:
            return complaints[0] if complaints else self._links[0].name
        return " · ".join((f"{len(self._links)} daemons", *complaints))

    def finished(self) -> FeedEnd | None:
        """A feed on whatever runs never ends by itself."""
        return None

    def close(self) -> None:
        """Close the links, and the daemon inside."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clock_of(self, link: Link) -> ClockView | None:
        """The best of what is known by any link to the same boot: its daemons read the same clocks."""
        boot_id = link.store.daemon.boot_id if link.store.daemon else ""
        same = [other for other in self._links if other.store.daemon and other.store.daemon.boot_id == boot_id]
        offsets = [offset for other in (same if boot_id else [link]) if (offset := other.clock_offset)]
        if not offsets:
            return None
        best = min(offsets, key=lambda offset: offset.uncertainty_ns)
        return ClockView(best.realtime_ns / 1e3, best.monotonic_ns / 1e3, best.uncertainty_ns / 1e3)


def _knows_devices(store: Store) -> bool:
    found = [sampled.newest for sampled in store.devices.values()]
    reasons = {each.why for sample in found for device in sample.devices for each in device.unknown}
    reasons |= {sample.trouble for sample in found}
    machine = machine_view(store)
    told = {process.source for process in machine.processes}
    running = {key for key, record in store.sources.items() if is_live(record)} - set(machine.elsewhere)
    return bool(found) and reasons.isdisjoint((NO_ANSWER_YET, TWO_SAMPLES)) and running <= told


def _machines(sources: Iterable[Seen]) -> tuple[MachineView, ...]:
    """The machines of their daemons, each once."""
    stores = {id(source.store): source for source in sources}
    return tuple(machine_view(source.store, source.stale_s) for source in stores.values() if source.store.devices)


def _straggler(seen: Mapping[str, Seen], record: SourceRecord, phase: str | None) -> StragglerView | None:
    """The straggler among the ranks of the job that `record` is one of."""
    job = job_of(record)
    if job is None or phase is None:
        return None
    heard = (source.record for source in seen.values() if source.stale_s is None)
    return straggler([other for other in heard if is_live(other) and job_of(other) == job], phase)
