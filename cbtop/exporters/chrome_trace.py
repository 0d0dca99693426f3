"""Export to Chrome's trace event format (JSON), which Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. Times are in µs.
A complete event ("X") has a begin and a duration. Metadata ("M") names processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TextIO

from cbtop.exporters.base import RecordedProcess, kind_name
from cbtop.exporters.records import TimedRecord
from cbtop.exporters.tracks import laid_out
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.messages import Node

Event = dict[str, object]


def write_chrome_trace(processes: Sequence[RecordedProcess], out: TextIO) -> None:
    """Write one complete event per record. Times are on the host's monotonic clock.

    The number of lost records is in `otherData`.
    """
    out.write('{"displayTimeUnit": "ns", "traceEvents": [')
    separator = "\n"
    for event in _events(processes):
        out.write(separator + json.dumps(event))
        separator = ",\n"
    lost = {
        what: sum(getattr(recorded, what) for recorded in processes) for what in ("overwritten", "rejected", "missed")
    }
    out.write(f'\n], "otherData": {json.dumps(lost)}}}\n')


def _events(processes: Sequence[RecordedProcess]) -> Iterator[Event]:
    # Number the threads over all processes, because two processes may have had the same pid at different times.
    numbers = count(1)
    for recorded in processes:
        yield _name("process_name", recorded.process, recorded.pid, 0)
        threads: list[int] = []
        for track, record in laid_out(recorded):
            if track == len(threads):
                threads.append(next(numbers))
                yield _name("thread_name", f"track {track + 1}", recorded.pid, threads[track])
            yield _complete(record, recorded.nodes[record.node], recorded.pid, threads[track])


def _name(what: str, name: str, pid: int, thread: int) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}


def _complete(record: TimedRecord, node: Node, pid: int, thread: int) -> Event:
    return {
        "name": display_name(node),
        "cat": kind_name(node),
        "ph": "X",
        "ts": record.start_ns / 1e3,
        "dur": (record.end_ns - record.start_ns) / 1e3,
        "pid": pid,
        "tid": thread,
        "args": {"node": record.node, "elements": record.elements, "failed": record.failed}
        | ({"plain": True} if record.plain else {}),
    }
