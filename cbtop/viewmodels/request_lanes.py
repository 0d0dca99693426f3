"""Lanes of a timeline with the requests of an engine: from arrival over the first token to the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cbtop.protocol.serving_messages import ServedRequest
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.viewmodels.lanes import Gap, Lane, Row, TimelineSpan

MAX_REQUEST_LANES = 16  # leave out requests that run while this many lanes are in use
REQUESTS, PHASES = "requests", "phases"  # names of a lane's rows
QUEUED, PREFILL, DECODE, NO_REQUEST = "queued", "prefill", "decode", "no request"


def request_lanes(requests: Iterable[ServedRequest], begin_ns: int, length_ns: int) -> tuple[Lane, ...]:
    """Return lanes with all requests in the timeline, which begins at `begin_ns`.

    A request takes the first lane that is free when it arrives. A running request lasts until the end.
    """
    end_ns = begin_ns + length_ns
    tracks: list[list[ServedRequest]] = []
    for one in sorted(requests, key=lambda request: (request.arrived_ns, request.number)):
        if one.arrived_ns >= end_ns or 0 < one.ended_ns <= begin_ns:
            continue
        free = next((track for track in tracks if 0 < track[-1].ended_ns <= one.arrived_ns), None)
        if free is not None:
            free.append(one)
        elif len(tracks) < MAX_REQUEST_LANES:
            tracks.append([one])
    return tuple(_lane(track, begin_ns, length_ns) for track in tracks)


def _lane(track: list[ServedRequest], begin_ns: int, length_ns: int) -> Lane:
    wholes: list[TimelineSpan] = []
    phases: list[TimelineSpan] = []
    gaps: list[Gap] = []
    until_ns = 0
    for one in track:
        parts = list(_parts(one, begin_ns, length_ns))
        if not parts:
            continue
        first_ns, last_ns = parts[0].start_ns, parts[-1].end_ns
        if first_ns > until_ns:
            gaps.append(Gap(until_ns, first_ns - until_ns, NO_REQUEST))
        until_ns = last_ns
        wholes.append(_span(one, first_ns, last_ns, 0, one.name, ()))
        gaps += [part for part in parts if part.name == QUEUED]
        for part in parts:
            if part.name != QUEUED:
                phases.append(_span(one, part.start_ns, part.end_ns, 1, part.name, (one.name,)))
    if until_ns < length_ns:
        gaps.append(Gap(until_ns, length_ns - until_ns, NO_REQUEST))
    return Lane(REQUESTS, (), (Row(REQUESTS, tuple(wholes)), Row(PHASES, tuple(phases))), tuple(gaps), 1)


def _parts(one: ServedRequest, begin_ns: int, length_ns: int) -> Iterator[Gap]:
    """Yield the parts of a request in the timeline, in order and without gaps."""
    end_ns = one.ended_ns or begin_ns + length_ns
    scheduled_ns = one.scheduled_ns or end_ns
    first_ns = one.first_token_ns or end_ns
    moments = (
        (QUEUED, one.arrived_ns, scheduled_ns),
        (PREFILL, scheduled_ns, first_ns),
        (DECODE, first_ns, end_ns),
    )
    for name, from_ns, to_ns in moments:
        since_ns = min(max(from_ns - begin_ns, 0), length_ns)
        until_ns = min(max(to_ns - begin_ns, 0), length_ns)
        if until_ns > since_ns:
            yield Gap(since_ns, until_ns - since_ns, name, (one.name,))


def _span(
    one: ServedRequest, start_ns: int, end_ns: int, level: int, name: str, where: tuple[str, ...]
) -> TimelineSpan:
    category = BrickCategory.OTHER if level else None
    tokens = one.output_tokens
    return TimelineSpan(start_ns, end_ns - start_ns, level, 0, name, NodeKind.ASYNC_TASK, category, where, "", tokens)
