"""Spans of sampled steps, step → layer → brick → kernel, in the OpenTelemetry SDK's data model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cbtop.client.store import SourceRecord
from cbtop.exporters.base import kind_name
from cbtop.profiler.graph.nodes import display_name
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_FAILED, Batch
from cbtop.protocol.vocabulary import NodeKind
from cbtop.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

MAX_TIME_NS = 1 << 63
PREVIOUS = "previous step sent of this process"  # what a span of a step links to


def spans(
    record: SourceRecord, step: Batch, resource: Resource, before: SpanContext | None = None
) -> list[ReadableSpan]:
    """One trace: a span for each record of `step`, below the span that its node's parent had at that time; the step's
    own comes first, and links to `before`, the step of this process that was sent before it.

    Times are Unix times, by the two clocks that the process read together when it began; none where those are
    impossible.
    """
    # The SDK takes a third of a second to load; only who exports pays for it.
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
    latest: dict[int, tuple[int, SpanContext]] = {}  # of each node: when its last run ended, and that span
    # What holds another begins before it or ends after it; where both are the same, its id is the lower one.
    order = np.lexsort((step.node, -step.end_ns, step.start_ns))
    columns = (step.node, step.start_ns, step.end_ns, step.elements, step.flags & FLAG_FAILED)
    for id_, start_ns, end_ns, elements, failed in zip(*(column[order].tolist() for column in columns), strict=True):
        node = record.nodes[id_]
        above = node.parent
        while above is not None and (above not in latest or latest[above][0] < end_ns):
            above = record.nodes[above].parent
        context = SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(1))
        latest[id_] = end_ns, context
        found.append(
            ReadableSpan(
                name=display_name(node),
                context=context,
                parent=None if above is None else latest[above][1],
                resource=resource,
                attributes=_attributes(record.key, node, elements),
                links=[] if found or before is None else [Link(before, {"cbtop.link": PREVIOUS})],
                status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
                start_time=start_ns + unix_ns,
                end_time=end_ns + unix_ns,
                instrumentation_scope=scope,
            )
        )
    return found


def _attributes(source: str, node: Node, elements: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {"source": source, "kind": kind_name(node)}
    if node.category is not None:
        found["category"] = node.category.display_name
    if node.backend:
        found["backend"] = node.backend
    found["tokens" if node.kind is NodeKind.STEP else "elements"] = elements
    return found
