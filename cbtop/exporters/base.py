"""The input of every exporter: the timed records of one process, and its nodes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from cbtop.exporters.records import Records
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Dependency, Node


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """The records of one process in the order they ended. Each names a node of `nodes` and has a valid duration.

    `records` can be iterated more than once while the reader of a recording is open. The counts are of written
    records that are missing: lost in the ring before they were read (`overwritten`), with an unknown node or a
    negative duration (`rejected`), or absent from the recording because it began later or they were lost on the way
    (`missed`).
    """

    process: str
    pid: int
    nodes: NodeTable
    records: Records
    overwritten: int = 0
    rejected: int = 0
    missed: int = 0
    dependencies: Sequence[Dependency] = ()


@dataclass(frozen=True, slots=True)
class Exporter:
    """A format: the function that writes it, whether one file can hold several processes, and whether it is binary.

    `write` holds a bounded number of records at a time: it may iterate over them repeatedly, but keeps none.
    """

    write: Callable[[Sequence[RecordedProcess], BinaryIO], None]
    holds_many: bool
    is_binary: bool = False


def text_of_many(write: Callable[[Sequence[RecordedProcess], TextIO], None]) -> Exporter:
    """Return the exporter for a text format whose files can hold several processes."""

    def write_bytes(processes: Sequence[RecordedProcess], out: BinaryIO) -> None:
        text = io.TextIOWrapper(out, encoding="utf-8", newline="")
        write(processes, text)
        text.detach()  # flushes, and leaves `out` open

    return Exporter(write_bytes, holds_many=True)


def text_of_one(write: Callable[[RecordedProcess, TextIO], None]) -> Exporter:
    """Return the exporter for a text format whose files hold one process."""

    def write_first(processes: Sequence[RecordedProcess], out: TextIO) -> None:
        (recorded,) = processes
        write(recorded, out)

    return Exporter(text_of_many(write_first).write, holds_many=False)


def kind_name(node: Node) -> str:
    """Return for example `brick`, `layer`, `async_task`."""
    return node.kind.name.lower()
