"""The input of every exporter: the records of one process with their times, and the nodes of the process."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from cbtop.exporters.records import Records
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Dependency, Node
from cbtop.protocol.serving_messages import ServedRequest


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """The records of one process, in the order of their ends. Each has a node in `nodes` and a valid duration.

    `records` can be iterated several times while the recording is open. `key` identifies the process in its
    recording, and `rank` is its rank in a job.

    Records that the process wrote and that are missing. `overwritten` ones were lost in the ring before they were
    read. `rejected` ones have an unknown node or a negative duration. `missed` ones are not in the recording, because
    it began later or lost them.
    """

    process: str
    pid: int
    nodes: NodeTable
    records: Records
    overwritten: int = 0
    rejected: int = 0
    missed: int = 0
    dependencies: Sequence[Dependency] = ()
    key: str = ""
    rank: int | None = None
    requests: Sequence[ServedRequest] = ()  # the newest state of each request that an inference engine served


@dataclass(frozen=True, slots=True)
class Exporter:
    """An export format: its write function, whether a file can have several processes, and whether it is binary.

    `write` keeps only a limited number of records in memory, and may iterate over them several times.
    """

    write: Callable[[Sequence[RecordedProcess], BinaryIO], None]
    holds_many: bool
    is_binary: bool = False


def text_of_many(write: Callable[[Sequence[RecordedProcess], TextIO], None]) -> Exporter:
    """Return the exporter for a text format. One file of the format can hold several processes."""

    def write_bytes(processes: Sequence[RecordedProcess], out: BinaryIO) -> None:
        text = io.TextIOWrapper(out, encoding="utf-8", newline="")
        write(processes, text)
        text.detach()  # Flush the written text to `out`, and leave `out` open.

    return Exporter(write_bytes, holds_many=True)


def text_of_one(write: Callable[[RecordedProcess, TextIO], None]) -> Exporter:
    """Return the exporter for a text format. One file of the format holds one process."""

    def write_first(processes: Sequence[RecordedProcess], out: TextIO) -> None:
        (recorded,) = processes
        write(recorded, out)

    return Exporter(text_of_many(write_first).write, holds_many=False)


def kind_name(node: Node) -> str:
    """Return the kind of a node as text, for example `brick`, `layer`, `async_task`."""
    return node.kind.name.lower()
