"""Make the view of a process from its ring, without a daemon."""

from __future__ import annotations

from collections.abc import Callable

from cbtop.client.kept_roofs import StoredRoofs
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.verdicts import judged


def record_of(source: Source, *, keeps_records: bool = False) -> SourceRecord | None:
    """Read all records of `source`. Returns None if it cannot be read.

    With `keeps_records`, the result has the newest single records, too. A drawing of one step needs them.
    """
    source.poll()
    while source.is_behind:
        source.poll()
    store = Store()
    store.keep_records(keeps_records)
    for message in (*source.snapshot(), *source.records()):
        store.apply(message)
    return store.sources.get(source.key)


def view_of(
    source: Source,
    waiting_percent: float | None = None,
    process: Callable[[int], SourceRecord | None] = lambda pid: None,
    phase: str | None = None,
    *,
    keeps_records: bool = False,
) -> SourceView | None:
    """Read all records of `source`. Returns its view with verdicts, or None if it cannot be read.

    The process waited for a processor during `waiting_percent` of its last seconds. The value is None if it is
    unknown. If the source is a worker of an engine, `process` returns the record of the engine's process. The view
    shows `phase`, by default the one that the screen shows first. If no step of this phase is recorded, the view
    shows the phase with the most time. `record_of` describes `keeps_records`.
    """
    record = record_of(source, keeps_records=keeps_records)
    if record is None:
        return None
    ceilings = list(StoredRoofs().over(record))
    pid = record.serving.engine_pid
    engine = None if pid is None or record.serving.is_engine else process(pid)
    view = source_view(record, phase, ceilings=ceilings, engine=engine)
    if view.steps is None and view.phases:
        longest = max(view.phases, key=lambda steps: steps.union_us or 0)
        view = source_view(record, longest.phase, ceilings=ceilings, engine=engine)
    return judged(with_parts(view, waiting_percent=waiting_percent), ())
