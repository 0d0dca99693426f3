"""The feed: a viewer's links to whatever runs, and the views made from it. TUI and headless share it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from cbtop.link import Link
from cbtop.store import SourceRecord
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.model import ClockView, MergeMode, SourceSummary, SourceView, StragglerView
from cbtop.viewmodels.source import are_alike, is_live, is_selected, source_view, summaries
from cbtop.viewmodels.straggler import job_of, straggler
from cbtop.window import DEFAULT_WINDOW_S


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """Why a viewer has nothing more to show, and the exit code that goes with it."""

    exit_code: int
    message: str


class Feed:
    """Connects to each of `endpoints`; with none, to this user's daemon, starting one inside where none runs.

    What one daemon does, or that it is gone, touches nothing that came from the others. With `selected` only the
    sources that match one of these are there: a key, a pid or `rank=N`. Raises EndpointError for an
    address that cannot be one.
    """

    def __init__(
        self, endpoints: Sequence[str] = (), window_s: float = DEFAULT_WINDOW_S, selected: Sequence[str] = ()
    ) -> None:
        self._selected = selected
        self._stragglers: dict[tuple[object, str], StragglerView | None] = {}  # since the last poll
        with ExitStack() as opened:
            self._links: list[Link] = []
            for endpoint in dict.fromkeys(endpoints or (None,)):
                self._links.append(Link(endpoint, window_s))
                opened.callback(self._links[-1].close)
            self._close = opened.pop_all().close

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon is ours: nobody else was there to watch."""
        return any(link.is_daemon_inside for link in self._links)

    def poll(self, timeout_ms: int = 0) -> None:
        """Take in what arrived; wait at most `timeout_ms` for something to arrive."""
        for link in self._links:
            link.poll(timeout_ms // len(self._links))
        self._stragglers.clear()

    def sources(self) -> tuple[SourceSummary, ...]:
        """Every source, the newest live one first."""
        link_of = self._link_of()
        found = summaries(link.store.sources[key] for key, link in link_of.items())
        return tuple(replace(summary, stale_s=link_of[summary.key].stale_s) for summary in found)

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """What a source shows, of its life or its window; None for `key` is the first of `sources()`.

        None when there is nothing yet.
        """
        if key is None:
            known = self.sources()
            key = known[0].key if known else None
        link = self._link_of().get(key or "")
        if link is None or key is None:
            return None
        record = link.store.sources[key]
        view = source_view(record, phase, window=window)
        found = self._straggler(record, view.phase)
        return replace(view, stale_s=link.stale_s, clock=self._clock_of(link), straggler=found)

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """All sources of the program, model and state of source `key` (None: the first) as one; None without any."""
        link_of = self._link_of()
        records = {key: link.store.sources[key] for key, link in link_of.items()}
        key = key if key in records else next((summary.key for summary in summaries(records.values())), None)
        if key is None:
            return None
        alike = [other for other in records.values() if are_alike(other, records[key])]
        heard = [record for record in alike if link_of[record.key].stale_s is None] or alike
        view = merged_view(heard, mode, phase, window=window)
        found = self._straggler(records[key], view.phase)
        assert view.merged is not None
        merged = replace(view.merged, left_out=len(alike) - len(view.merged.members))
        return replace(view, merged=merged, stale_s=link_of[heard[0].key].stale_s, straggler=found)

    def key_of(self, pid: int) -> str | None:
        """The source whose process is `pid`; None while it has not appeared."""
        records = (record for link in self._links for record in link.store.sources.values())
        return next((record.key for record in records if record.hello and record.hello.pid == pid), None)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The addresses where no daemon has answered yet."""
        return tuple(link.endpoint for link in self._links if not link.is_complete)

    @property
    def refused(self) -> str:
        """Why no daemon's messages are taken; empty when those of one are."""
        refused = [link.refused for link in self._links]
        return "; ".join(refused) if all(refused) else ""

    def status(self) -> str:
        """One line about the links."""
        troubles = [link.trouble for link in self._links if link.trouble]
        if len(self._links) == 1:
            return troubles[0] if troubles else self._links[0].name
        return " · ".join((f"{len(self._links)} daemons", *troubles))

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

    def _link_of(self) -> dict[str, Link]:
        """Each source's link; of two that bring the same source, one that is not silent."""
        by_freshness = sorted(self._links, key=lambda link: link.stale_s or 0, reverse=True)
        return {
            key: link
            for link in by_freshness
            for key, record in link.store.sources.items()
            if not self._selected or is_selected(record, self._selected)
        }

    def _straggler(self, record: SourceRecord, phase: str | None) -> StragglerView | None:
        """The straggler among the ranks of the job that `record` is one of."""
        job = job_of(record)
        if job is None or phase is None:
            return None
        if (job, phase) not in self._stragglers:
            heard = (link.store.sources[key] for key, link in self._link_of().items() if link.stale_s is None)
            ranks = [other for other in heard if is_live(other) and job_of(other) == job]
            self._stragglers[job, phase] = straggler(ranks, phase)
        return self._stragglers[job, phase]

    def _clock_of(self, link: Link) -> ClockView | None:
        """The best of what is known by any link to the same boot: its daemons read the same clocks."""
        boot_id = link.store.daemon.boot_id if link.store.daemon else ""
        same = [other for other in self._links if other.store.daemon and other.store.daemon.boot_id == boot_id]
        offsets = [offset for other in (same if boot_id else [link]) if (offset := other.clock_offset)]
        if not offsets:
            return None
        best = min(offsets, key=lambda offset: offset.uncertainty_ns)
        return ClockView(best.realtime_ns / 1e3, best.monotonic_ns / 1e3, best.uncertainty_ns / 1e3)
