"""The option `--source`, for commands that need exactly one running process of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cbtop.daemon.source import Source
from cbtop.errors import NoDataError, UsageError
from cbtop.feeds.kernel_request import live_source, pid_of
from cbtop.protocol.ended import rings_of
from cbtop.protocol.endpoint import runtime_dir


def chosen_process(wanted: Sequence[str]) -> Source:
    """Return the running process that the option `--source` names. Raises NoDataError if no process matches, and
    UsageError if several match.
    """
    directory = runtime_dir()
    found: list[Source] = []
    try:
        for name in sorted(rings_of(os.listdir(directory))):
            source = live_source(directory / name)
            if source is not None and _is_meant(source, wanted):
                found.append(source)
            elif source is not None:
                source.close()
        if not found:
            which = f" as --source {' or '.join(wanted)}" if wanted else ""
            raise NoDataError(f"nothing runs here{which}; `cbtop run -- python …` starts what can be asked")
        if len(found) > 1:
            pids = ", ".join(str(pid_of(source)) for source in found)
            raise UsageError(f"several processes run here: choose one by --source (pid {pids})")
    except BaseException:
        for source in found:
            source.close()
        raise
    return found[0]


def _is_meant(source: Source, wanted: Sequence[str]) -> bool:
    names = [source.key, str(pid_of(source)), f"rank={source.hello.rank if source.hello else None}"]
    return not wanted or any(name in wanted for name in names)
