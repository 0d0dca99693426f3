"""The view of a ring, read without a daemon."""

from __future__ import annotations

from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.viewmodels.model import SourceView
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.verdicts import judged


def view_of(source: Source) -> SourceView | None:
    """Read `source` to its end; return its view with verdicts, or None if it cannot be read."""
    source.poll()
    while source.is_behind:
        source.poll()
    store = Store()
    for message in source.snapshot():
        store.apply(message)
    record = store.sources.get(source.key)
    return None if record is None else judged(source_view(record), ())
