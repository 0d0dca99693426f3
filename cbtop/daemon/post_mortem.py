"""Find what an ended process did last: its last steps and records, and the unfinished brick of each thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbtop.daemon.source import Source
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.messages import Node
from cbtop.protocol.record_batch import joined, unpack
from cbtop.protocol.ring import FLAG_PLAIN, NODE_BITS
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.vocabulary import NodeKind, Provenance, SourceStatus

LAST_STEPS = 10
LAST_RECORDS = 5
STEPS_COMPARED = 64  # At most this many earlier steps are compared with the start of the unfinished one.


@dataclass(frozen=True, slots=True)
class EndedRecord:
    """One finished call of a node. `ended_s` is Unix time."""

    path: str  # path of the node's names, for example `decode → Layer 0 → RmsNorm`
    us: float
    elements: int
    failed: bool
    ended_s: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A brick that a thread, task or greenlet had begun and not finished.

    `provenance` is `measured` if the ring shows that it was running. It is `derived` if it is a guess: an earlier
    step began with the same records, and then ran this brick. The thread is then unknown.
    """

    path: str
    provenance: Provenance
    thread_id: int | None
    began_s: float | None  # Unix time
    note: str


@dataclass(frozen=True, slots=True)
class PostMortem:
    """The end of one process. All times are Unix times, converted by the ring's two clocks."""

    pid: int
    program: str
    host: str
    recorder: str
    state: SourceStatus
    reason: str
    last_record_s: float | None
    produced: int
    overwritten: int
    rejected: int
    steps: tuple[EndedRecord, ...]  # oldest first
    records: tuple[EndedRecord, ...]
    in_flight: tuple[Unfinished, ...]


def post_mortem(ring_path: Path, steps: int = LAST_STEPS) -> PostMortem:
    """Return the contents of the ring at `ring_path` and of its catalog. Raises RingError if the file is not a
    ring.
    """
    reader = RingReader(ring_path)
    try:
        shift_ns = reader.realtime_ns - reader.monotonic_ns
        slots = reader.in_flight()
        pid = reader.pid
    finally:
        reader.close()
    source = Source(ring_path)
    source.poll()
    while source.is_behind:
        source.poll()
    nodes, state, hello = _table(source), source.state_message(), source.hello
    batch = joined([unpack(message) for message in source.records()]).calls()
    source.close()

    def ended(at: Sequence[int]) -> tuple[EndedRecord, ...]:
        return tuple(_ended(batch, index, nodes, shift_ns) for index in at)

    step_ends = _step_ends(batch, nodes)
    count = len(batch.node)
    measured = tuple(
        Unfinished(
            path=_path(nodes, slot.node),
            provenance=Provenance.MEASURED,
            thread_id=slot.thread_id,
            began_s=None if slot.start_ns is None else (slot.start_ns + shift_ns) / 1e9,
            note="" if slot.start_ns is not None else "since when is not known: a brick inside it has ended",
        )
        for slot in slots
        if slot.node <= len(nodes)
    )
    writes_slots = hello is not None and hello.recorder != "python"
    has_ended = state.state is SourceStatus.ENDED
    return PostMortem(
        pid=pid,
        program=hello.program if hello else "",
        host=hello.host if hello else "",
        recorder=hello.recorder if hello else "",
        state=state.state,
        reason=state.reason,
        last_record_s=(int(batch.end_ns.max()) + shift_ns) / 1e9 if count else None,
        produced=state.produced,
        overwritten=state.overwritten,
        rejected=state.rejected,
        steps=ended(step_ends[-steps:]),
        records=ended(range(max(0, count - LAST_RECORDS), count)),
        in_flight=measured if writes_slots or has_ended else _derived(batch.only(~batch.are(FLAG_PLAIN)), nodes),
    )


def _step_ends(batch: Batch, nodes: NodeTable) -> list[int]:
    """Return the indices of the step records in `batch`."""
    steps = [node.id for node in nodes.children[None] if node.kind is NodeKind.STEP]
    found: list[int] = np.flatnonzero(np.isin(batch.node, steps)).tolist()
    return found


def _derived(batch: Batch, nodes: NodeTable) -> tuple[Unfinished, ...]:
    """Return the path of the brick that probably ran next in the unfinished step, or () if unknown.

    It is the next brick of the newest earlier step that began with the same records.
    """
    node, step_ends = batch.node.tolist(), _step_ends(batch, nodes)
    begun = node[step_ends[-1] + 1 :] if step_ends else []
    bounds = list(zip([-1, *step_ends], step_ends, strict=False))[-STEPS_COMPARED:]
    for before, end in reversed(bounds):
        order = node[before + 1 : end + 1]
        if order[: len(begun)] == begun and len(order) > len(begun):
            path = _path(nodes, order[len(begun)])
            note = "by the order of an earlier step; threads are not recorded"
            if not begun:
                note += "; or it was between two steps"
            return (Unfinished(path, Provenance.DERIVED, None, None, note),)
    return ()


def _ended(batch: Batch, at: int, nodes: NodeTable, shift_ns: int) -> EndedRecord:
    start_ns, end_ns = int(batch.start_ns[at]), int(batch.end_ns[at])
    return EndedRecord(
        path=_path(nodes, int(batch.node[at])),
        us=(end_ns - start_ns) / 1e3,
        elements=int(batch.elements[at]),
        failed=bool(int(batch.flags[at]) >> NODE_BITS & 1),
        ended_s=(end_ns + shift_ns) / 1e9,
    )


def _path(nodes: NodeTable, node: int) -> str:
    names: list[str] = []
    outer: int | None = node
    while outer is not None:
        names.append(display_name(nodes[outer]))
        outer = nodes[outer].parent
    return " → ".join(reversed(names))


def _table(source: Source) -> NodeTable:
    table = NodeTable()
    for message in source.catalog:
        if isinstance(message, Node):
            table.add(message)
    return table
