"""A Trace from the ring and the catalog of a recorded process, running or gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cbtop.profiler.exporters.base import TimedRecord, Trace
from cbtop.profiler.graph.node_table import NodeTable
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import HostHello, Node
from cbtop.protocol.process import process_start
from cbtop.protocol.ring import FLAG_FAILED, Batch, RingReader

CHUNK_RECORDS = 4096


def trace_of_files(ring: Path, catalog: Path) -> Trace:
    """What `ring` still holds, and the nodes that `catalog` defines.

    Raises RingError or DecodeError when a file is missing, or not one of ours.
    """
    reader = RingReader(ring)
    gone = process_start(reader.pid) != reader.process_start
    batch = reader.read(final=gone)
    reader.close()
    # After the ring: a node is in the catalog before the first record that names it is in the ring.
    said = CatalogReader(catalog)
    messages = said.read()
    said.close()
    program = next((message.program for message in messages if isinstance(message, HostHello)), f"pid {reader.pid}")
    table = NodeTable()
    for message in messages:
        if isinstance(message, Node):
            try:
                table.add(message)
            except ValueError as error:
                raise DecodeError(f"catalog {catalog}: {error}") from error
    fit = (batch.node >= 1) & (batch.node <= len(table)) & (batch.end_ns >= batch.start_ns)
    rejected = len(fit) - int(fit.sum())
    return Trace(program, reader.pid, table, BatchRecords(batch.only(fit)), batch.overwritten, rejected)


class BatchRecords:
    """The records of a batch one at a time, made as they are walked: the batch stays in its columns."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[TimedRecord]:
        batch = self._batch
        columns = (batch.node, batch.start_ns, batch.end_ns, batch.elements, batch.flags & FLAG_FAILED)
        for first in range(0, len(batch.node), CHUNK_RECORDS):
            chunk = (column[first : first + CHUNK_RECORDS].tolist() for column in columns)
            for node, start_ns, end_ns, elements, failed in zip(*chunk, strict=True):
                yield TimedRecord(node, start_ns, end_ns, elements, bool(failed))
