"""Convert sampled steps to spans in the OpenTelemetry SDK's data model: step → layer → brick → kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cbtop.client.source_record import SourceRecord
from cbtop.exporters.base import kind_name
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_FAILED
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind
from cbtop.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

MAX_TIME_NS = 1 << 63
# Types of links between spans. A step's span has a PREVIOUS link to the previous step. Every span may have a
# RUN_BEFORE link to an earlier run.
PREVIOUS = "previous step sent of this process"
RUN_BEFORE = "same place in the last step sent of this program before this process began"
MAX_PROGRAMS = 16  # Spans are stored for at most this many programs. The last step of one program takes up to 2 MB.

# Position of a span in its trace: the names from the step down to it. Numbers tell apart siblings with equal names.
Place = tuple[tuple[str, int], ...]
Places = Mapping[Place, "SpanContext"]


def spans(
    record: SourceRecord,
    step: Batch,
    resource: Resource,
    before: SpanContext | None = None,
    run_before: Places | None = None,
) -> list[ReadableSpan]:
    """Return the trace of a step: a span for each record. [] if the times are impossible.

    The step's span comes first, and links to `before`, this process's previously sent step. The parent of a span is
    the nearest enclosing node. Each span links to the span at the same position in `run_before`, a step of an earlier
    run. Times are Unix times, converted by the two clocks that the process read at its start.
    """
    # Imported here, because the SDK takes a third of a second to load.
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

    if record.hello is None:
        return []
    unix_ns = record.hello.realtime_ns - record.hello.monotonic_ns
    if not 0 <= int(step.start_ns.min()) + unix_ns <= int(step.end_ns.max()) + unix_ns < MAX_TIME_NS:
        return []
    ids = RandomIdGenerator()
    trace_id = ids.generate_trace_id()
    scope = InstrumentationScope("cbtop", __version__)
    found: list[ReadableSpan] = []
    # for each node: the end of its last call, and the span of this call
    latest: dict[int, tuple[int, SpanContext]] = {}
    places = _Placer()
    # Sort parents before their children. A parent begins earlier, or ends later, or has the lower id.
    order = np.lexsort((step.node, -step.end_ns, step.start_ns))
    columns = (step.node, step.start_ns, step.end_ns, step.elements, step.flags & FLAG_FAILED)
    for id_, start_ns, end_ns, elements, failed in zip(*(column[order].tolist() for column in columns), strict=True):
        node = record.nodes[id_]
        above = node.parent
        while above is not None and (above not in latest or latest[above][0] < end_ns):
            above = record.nodes[above].parent
        context = SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(1))
        latest[id_] = end_ns, context
        name, parent = display_name(node), None if above is None else latest[above][1]
        there = (run_before or {}).get(places.of(name, context, parent))
        links = [] if found or before is None else [Link(before, {"cbtop.link": PREVIOUS})]
        links += [] if there is None else [Link(there, {"cbtop.link": RUN_BEFORE})]
        found.append(
            ReadableSpan(
                name=name,
                context=context,
                parent=parent,
                resource=resource,
                attributes=_attributes(record.key, node, elements),
                links=links,
                status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
                start_time=start_ns + unix_ns,
                end_time=end_ns + unix_ns,
                instrumentation_scope=scope,
            )
        )
    return found


class _Placer:
    """Finds the position of each span in a trace. Each span must be passed after its parent."""

    def __init__(self) -> None:
        self._place_of: dict[int, Place] = {}
        self._seen: Counter[tuple[Place, str]] = Counter()

    def of(self, name: str, context: SpanContext, parent: SpanContext | None) -> Place:
        """Return the position of the next span in the trace."""
        around = self._place_of[parent.span_id] if parent is not None else ()
        place = *around, (name, self._seen[around, name])
        self._seen[around, name] += 1
        self._place_of[context.span_id] = place
        return place


class SentSteps:
    """Remembers the steps that were sent, so that later steps can link to them."""

    def __init__(self) -> None:
        self._last: dict[str, SpanContext] = {}  # for each process: the span of its step in the last export
        # program -> the process of its last sent step, the end of that step, and its spans by position
        self._of_program: dict[object, tuple[str, int, Places]] = {}
        # process -> the spans of an earlier run of its program, looked up at its first export
        self._run_before: dict[str, Places | None] = {}

    def trace(self, record: SourceRecord, step: Batch, resource: Resource) -> list[ReadableSpan]:
        """Return the spans of `step`, with links to earlier spans."""
        if record.key not in self._run_before:
            self._run_before[record.key] = self._sent_before(record)
            _keep_newest(self._run_before)
        return spans(record, step, resource, self._last.get(record.key), self._run_before[record.key])

    def sent(self, traces: Sequence[tuple[SourceRecord, Sequence[ReadableSpan]]]) -> None:
        """Remember that the collector has accepted these traces. The key of each trace is its process."""
        self._last.clear()
        for record, trace in traces:
            placer = _Placer()
            self._last[record.key] = trace[0].context
            places = {placer.of(span.name, span.context, span.parent): span.context for span in trace}
            program = _program(record)
            self._of_program.pop(program, None)
            self._of_program[program] = record.key, trace[0].end_time or 0, places
            _keep_newest(self._of_program)

    def _sent_before(self, record: SourceRecord) -> Places | None:
        key, ended_ns, places = self._of_program.get(_program(record), ("", 0, None))
        began_ns = record.hello.realtime_ns if record.hello else 0
        return places if key != record.key and ended_ns <= began_ns else None


def _program(record: SourceRecord) -> object:
    hello = record.hello
    return hello and (hello.host, hello.program, hello.rank)


def _keep_newest(kept: dict[Any, Any]) -> None:
    while len(kept) > MAX_PROGRAMS:
        del kept[next(iter(kept))]


def _attributes(source: str, node: Node, elements: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {"source": source, "kind": kind_name(node)}
    if node.category is not None:
        found["category"] = node.category.display_name
    if node.backend:
        found["backend"] = node.backend
    found["tokens" if node.kind is NodeKind.STEP else "elements"] = elements
    return found
