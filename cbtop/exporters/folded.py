"""Export to folded stacks: one line per call path with its self time in ns, such as `decode;Layer 0;RmsNorm 5120`.

https://github.com/brendangregg/FlameGraph describes them. `flamegraph.pl` and speedscope read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import TimedRecord
from cbtop.exporters.tracks import on_tracks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name, printable
from cbtop.protocol.vocabulary import NodeKind

# the time of steps that were timed only as a whole
NOT_INSIDE = "not recorded inside"
# If a path ends with a blank and a number, such as `Layer 0`, flamegraph.pl takes this number for the time in an
# earlier run. So this frame is added to such a path.
SELF = "self"
_ENDS_WITH_NUMBER = re.compile(r".*\s\d+(?:\.\d*)?", re.DOTALL)


def write_folded(processes: Sequence[RecordedProcess], out: TextIO) -> None:
    """Write the self time of every node. Paths of several processes begin with their process.

    The times of a path's node and of the nodes inside it add up to the time of its calls. Calls that overlapped have
    their full times. Work that other threads did for a node is next to its own time, because the node may just wait.
    """
    for recorded in processes:
        process = (f"{recorded.process} {recorded.pid}",) if len(processes) > 1 else ()
        for path, self_ns in _self_times(recorded):
            if self_ns > 0:
                stack = (*process, *path, SELF) if _ENDS_WITH_NUMBER.fullmatch(path[-1]) else (*process, *path)
                out.write(f"{';'.join(map(_frame, stack))} {self_ns}\n")


def _self_times(recorded: RecordedProcess) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each path with its self time, in the order of the nodes."""
    nodes = recorded.nodes
    self_ns, whole_ns = [0] * (len(nodes.nodes) + 1), [0] * (len(nodes.nodes) + 1)
    open_on: dict[int, list[TimedRecord]] = {}
    for track, depth, record in on_tracks(nodes, recorded.records.by_start()):
        around = open_on.setdefault(track, [])
        del around[depth:]
        duration_ns = record.end_ns - record.start_ns
        (whole_ns if record.plain else self_ns)[record.node] += duration_ns
        if around and nodes[record.node].kind is not NodeKind.ADOPTED:
            self_ns[around[-1].node] -= duration_ns
        around.append(record)
    for node in nodes.nodes:
        path = _path(nodes, node.id)
        yield path, self_ns[node.id]
        yield (*path, NOT_INSIDE), whole_ns[node.id]


def _path(nodes: NodeTable, node: int | None) -> tuple[str, ...]:
    names: list[str] = []
    while node is not None:
        names.insert(0, display_name(nodes[node]))
        node = nodes[node].parent
    return tuple(names)


def _frame(name: str) -> str:
    return printable(name).replace(";", ",")
