"""Make the view of a process from its ring, without a daemon."""

from __future__ import annotations

from cbtop.client.kept_roofs import StoredRoofs
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.verdicts import judged


def view_of(source: Source, waiting_percent: float | None = None) -> SourceView | None:
    """Read all records of `source`. Returns its view with verdicts, or None if the source cannot be read.

    `waiting_percent` says how much of its last seconds the process waited for a processor, in percent, or None if
    unknown. The view shows the phase that the screen shows first. If that phase has no step, it shows the phase with
    the most time.
    """
    source.poll()
    while source.is_behind:
        source.poll()
    store = Store()
    for message in source.snapshot():
        store.apply(message)
    record = store.sources.get(source.key)
    if record is None:
        return None
    ceilings = list(StoredRoofs().over(record))
    view = source_view(record, ceilings=ceilings)
    if view.steps is None and view.phases:
        longest = max(view.phases, key=lambda steps: steps.union_us or 0)
        view = source_view(record, longest.phase, ceilings=ceilings)
    return judged(with_parts(view, waiting_percent=waiting_percent), ())
