"""`cbtop.read`: a recording as tables, for pandas, polars, DuckDB and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from cbtop.errors import UntrustedError
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.call_columns import (
    OF_BRICKS,
    OF_CALLS,
    OF_KERNELS,
    OF_LAYERS,
    OF_STEPS,
    CallColumns,
    Choice,
    are_steps,
    of_kinds,
)
from cbtop.exporters.recorded import checked_processes
from cbtop.protocol.errors import RecordingError
from cbtop.protocol.recording import RecordingReader
from cbtop.protocol.vocabulary import NodeKind
from cbtop.tables.column_table import ColumnTable
from cbtop.tables.typed_column import TypedColumn

if TYPE_CHECKING:  # imported for types only, because views load slowly
    from cbtop.viewmodels.source import SourceView


def read(path: str | PathLike[str], *, allow_damage: bool = False) -> Recording:
    """Open the recording at `path`. `with cbtop.read(path) as run:` closes it at the end of the block. Otherwise it
    is closed when nothing refers to it.

    Raises RecordingError or VersionError if it is not a recording of this version, NoDataError if it has no process,
    and UntrustedError if a part of it is damaged. `allow_damage` reads the undamaged parts.
    """
    return Recording(Path(path), allow_damage=allow_damage)


class Recording:
    """A recording as tables. Each method reads the file again, and returns a new table.

    Processes come one after another, with rows by the ends of calls. Durations include the parts of a call. `begin_s`
    counts from the first record. Records that cannot be read are missing (see `lost`).
    """

    def __init__(self, path: Path, *, allow_damage: bool = False) -> None:
        self.path = path
        self._allow_damage = allow_damage
        self._is_open = True
        self._reader = RecordingReader(path)
        try:
            self._processes = list(checked_processes(self._reader).values())
            self._require_undamaged()
        except BaseException:
            self._reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(f"{one.process} (pid {one.pid}): {len(one.records):,} calls" for one in self._processes)
        missing = f"; {self.lost:,} records are missing, see `lost`" if self.lost else ""
        cut = "" if self.is_complete else "; its end is missing"
        return f"<recording {self.path}: {names}{missing}{cut}>"

    @property
    def is_complete(self) -> bool:
        """Whether the recorder has closed the file. If not, the end of the recording is missing."""
        return self._reader.is_closed

    @property
    def lost(self) -> int:
        """The number of records that are missing in the tables although the processes wrote them.

        Such records were written before the recording began, lost on the way, overwritten or rejected. `cbtop replay`
        includes the earliest ones in its sums.
        """
        return sum(one.missed + one.overwritten + one.rejected for one in self._processes)

    def steps(self) -> ColumnTable:
        """Return the steps, one row per step. A `plain` step was timed as a whole, so it has no bricks."""
        return self._table(OF_STEPS, are_steps)

    def layers(self) -> ColumnTable:
        """Return the calls of layers, one row per call."""
        return self._table(OF_LAYERS, of_kinds(NodeKind.LAYER))

    def bricks(self) -> ColumnTable:
        """Return the calls of bricks, one row per call.

        If a brick has an `outer_brick`, the time of the brick is also part of the outer brick's time.
        """
        return self._table(OF_BRICKS, of_kinds(NodeKind.BRICK))

    def kernels(self) -> ColumnTable:
        """Return the recorded launches of kernels and copies, one row per launch."""
        return self._table(OF_KERNELS, of_kinds(NodeKind.KERNEL, NodeKind.TRANSFER))

    def calls(self) -> ColumnTable:
        """Return all calls of all kinds, one row per call. `cbtop export --format parquet` writes the same rows."""
        return self._table(OF_CALLS, of_kinds(*NodeKind))

    def requests(self) -> ColumnTable:
        """Return the requests that an engine served, one row per request, sorted by process and arrival time."""
        return _requests(self._processes)

    def verdicts(self) -> ColumnTable:
        """Return the verdicts at the end of the recording. `cbtop replay --headless` shows the same verdicts."""
        return _verdicts(self._views())

    def _repr_html_(self) -> str:
        """Return the report of the recording at its end. Notebooks call this method to show it."""
        # imported here, because reports load slowly and tables do not need them
        from cbtop.reports.html import html_part

        return html_part(self._views(keeps_records=True))

    def _views(self, *, keeps_records: bool = False) -> list[SourceView]:
        """Return the views of the processes at the end of the recording."""
        # imported here, because views load slowly and tables do not need them
        from cbtop.feeds.replay import ReplayFeed

        with ReplayFeed(self.path) as feed:
            feed.follow_records(keeps_records)
            if feed.range_s is None:
                feed.seek(feed.duration_s)
            return [view for source in feed.sources() if (view := feed.view(source.key)) and view.has_data]

    def close(self) -> None:
        """Close the recording. Tables that were returned before stay valid. Asking for more tables then raises an
        error.
        """
        self._is_open = False
        self._reader.close()

    def _table(self, names: Sequence[str], choice: Choice) -> ColumnTable:
        if not self._is_open:
            raise RecordingError(f"{self.path} is closed; open it again with cbtop.read")
        found = CallColumns(self._processes, names, choice).table()
        self._require_undamaged()  # Check the file again, because it may have changed since it was opened.
        return found

    def _require_undamaged(self) -> None:
        if self._reader.damaged and not self._allow_damage:
            raise UntrustedError(
                f"{self.path} has damaged frames, {self._reader.damaged}: what they held is missing; "
                "pass allow_damage=True to read the rest"
            )


def _requests(processes: Sequence[RecordedProcess]) -> ColumnTable:
    rows = [(process, one) for process in processes for one in process.requests]
    begins_ns = [process.records.begin_ns for process in processes if len(process.records)]
    begin_ns = min(begins_ns, default=min((one.arrived_ns for _, one in rows), default=0))

    def since_us(moment_ns: int, arrived_ns: int) -> float | None:
        return (moment_ns - arrived_ns) / 1e3 if moment_ns else None

    floats: dict[str, list[float | None]] = {
        "begin_s": [(one.arrived_ns - begin_ns) / 1e9 for _, one in rows],
        "queued_us": [since_us(one.scheduled_ns, one.arrived_ns) for _, one in rows],
        "first_token_us": [since_us(one.first_token_ns, one.arrived_ns) for _, one in rows],
        "duration_us": [since_us(one.ended_ns, one.arrived_ns) for _, one in rows],
    }
    counts = ("number", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
    texts: dict[str, list[str | None]] = {
        "reason": [one.reason or None for _, one in rows],
        "program": [process.process for process, _ in rows],
        "source": [process.key for process, _ in rows],
    }
    return ColumnTable(
        {"request": TypedColumn.of_texts([one.name for _, one in rows], {})}
        | {name: TypedColumn.of_numbers(column, np.float64) for name, column in floats.items()}
        | {name: TypedColumn.of_numbers([getattr(one, name) for _, one in rows], np.int64) for name in counts}
        | {name: TypedColumn.of_texts(column, {}) for name, column in texts.items()}
        | {"pid": TypedColumn.of_numbers([process.pid for process, _ in rows], np.int64)}
    )


def _verdicts(views: Sequence[SourceView]) -> ColumnTable:
    rows = [(view, verdict) for view in views for verdict in view.verdicts]
    texts: dict[str, list[str | None]] = {
        "id": [verdict.id for _, verdict in rows],
        "severity": [verdict.severity for _, verdict in rows],
        "sentence": [verdict.sentence for _, verdict in rows],
        "advice": [verdict.advice for _, verdict in rows],
        "about_kind": [verdict.about.kind for _, verdict in rows],
        "about": [verdict.about.name for _, verdict in rows],
        "phase": [view.phase for view, _ in rows],
        "program": [view.program for view, _ in rows],
        "source": [view.key for view, _ in rows],
    }
    gains = [verdict.gain_tokens_per_sec for _, verdict in rows]
    numbers = {
        "gain_tokens_per_sec": TypedColumn.of_numbers(gains, np.float64),
        "pid": TypedColumn.of_numbers([view.pid for view, _ in rows], np.int64),
        "rank": TypedColumn.of_numbers([view.rank for view, _ in rows], np.int32),
    }
    return ColumnTable({name: TypedColumn.of_texts(column, {}) for name, column in texts.items()} | numbers)
