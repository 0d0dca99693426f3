"""Decide whether a running process makes progress. If not, it is stalled in a step, idle, suspended, or quiet.

Rules
- A lack of progress is reported after max(MIN_S, SLOW × p99). The p99 is that of the running step's calls, or without
  steps of the running brick's. If it is unknown which step runs, the slowest phase counts.
- A process is stalled only if a step is known to run, and earlier steps have ended. A first step may take any time.
- A large step may take longer than the p99: its tokens times the time per token of earlier steps of this name.
  Without tokens, sequences count. If this number is unknown for the step and differs between earlier steps, the
  context length counts.
- A step has no limit if the context length is unknown, or if steps report no number and bricks of this step leave no
  records.
- A process is idle only if it is known to be in no step. If steps are sampled, or the hot path runs in Python, a step
  without a record may be running.
- A process that announces other work (compiling) is not judged.
- The daemon measures the age with the clock of the process's host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cbtop.client.source_record import SourceRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.messages import Node, Quiet
from cbtop.protocol.vocabulary import NodeKind, SourceStatus
from cbtop.viewmodels.steps import are_alike

MIN_S = 2.0
SLOW = 10.0

UNNAMED = "a step without a name yet"
NO_STEP, NO_BRICK = "no step runs", "no brick runs"
NONE_ENDED = "none of these has ended yet, so what is long is not known"
SIZE_UNKNOWN = "the sizes of its steps differ, or are not known, so what is long is not known"
STEP_UNKNOWN = "whether a step runs is not known"


class StallKind(StrEnum):
    """Why a running process makes no progress."""

    STALLED = "stalled"  # A step or brick takes far longer than usual.
    SUSPENDED = "suspended"  # The process was stopped by a signal or a debugger.
    IDLE = "idle"  # The process runs, but no step does.
    QUIET = "quiet"  # The process is stalled, idle or suspended, but it is unknown which. `why` is the reason.


@dataclass(frozen=True, slots=True)
class StallView:
    """A running process in which nothing was recorded and nothing began during the last `age_s`.

    `place` are the names of the running nodes, outermost first (`decode`, `Layer 17`, `AllReduce`), or empty. If
    several `threads` run a brick, it leads to the brick that began last. `after` is the node that ended last inside
    `place`.
    """

    word: StallKind
    age_s: float
    limit_s: float  # A stall is reported if nothing was recorded for this long.
    place: tuple[str, ...] = ()
    phase: str | None = None  # name of the phase of the running step
    layer: str | None = None
    brick: str | None = None
    runs_s: float | None = None  # how long the innermost node of `place` has been running; None if unknown
    after: tuple[str, ...] = ()
    threads: int = 0
    # p99 of the calls of `usual_of`. None if unknown, or not compared with `age_s`.
    usual_s: float | None = None
    usual_of: str = ""
    why: str = ""  # more facts about the lack of progress, or why they are unknown
    member: str = ""  # name of the process within a merge, or "" without a merge


def limit_s(usual_s: float | None) -> float:
    """Return after how many seconds without progress to report a stall.

    `usual_s` is the p99 of earlier calls (None: unknown).
    """
    return MIN_S if usual_s is None else max(MIN_S, SLOW * usual_s)


def stall_view(record: SourceRecord) -> StallView | None:
    """Return the stall of `record`. None if the process makes progress, has ended, or announces other work."""
    state = record.state
    quiet = state.quiet if state is not None and state.state is SourceStatus.LIVE else None
    if quiet is None:
        return None
    path = _path(record.nodes, quiet.in_flight)
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    # A call outside of steps may take long (a server waits for a request), so it is not a stall.
    is_outside = bool(steps and path) and path[0].kind is not NodeKind.STEP
    compared = [] if is_outside else path[:1]
    usual_s = _p99_s(record, compared or steps)
    is_seen_inside = len(path) > 1 or not record.leaves_steps_out
    most_s: float | None = 0.0
    if compared and usual_s is not None:
        most_s = _most_s(record, compared[0], quiet.in_flight_size, is_seen_inside=is_seen_inside)
    usual_s = None if most_s is None else usual_s
    none_known = SIZE_UNKNOWN if most_s is None else NONE_ENDED
    found = _judged(record, quiet, usual_s, none_known, has_steps=bool(steps), runs=bool(compared))
    if found is None:
        return None
    word, why = found
    if word in (StallKind.SUSPENDED, StallKind.IDLE):
        usual_s = None  # For a suspended or idle process, the usual time of its steps does not matter.
    limit = limit_s(usual_s if usual_s is None else max(usual_s, most_s or 0.0))
    age_s = quiet.quiet_ns / 1e9
    if age_s < limit:
        return None
    last = _path(record.nodes, quiet.last)
    return StallView(
        word=word,
        age_s=age_s,
        limit_s=limit,
        place=tuple(map(display_name, path)) or ((UNNAMED,) if quiet.in_flight < 0 else ()),
        phase=_name_of(path, NodeKind.STEP),
        layer=_name_of(path, NodeKind.LAYER),
        brick=_name_of(path, NodeKind.BRICK),
        runs_s=None if quiet.in_flight_ns is None else quiet.in_flight_ns / 1e9,
        after=tuple(map(display_name, last[len(path) :])) if path and last[: len(path)] == path else (),
        threads=quiet.threads,
        usual_s=usual_s,
        usual_of="" if usual_s is None else display_name(compared[0]) if compared else "step of the slowest phase",
        why=why,
    )


def _judged(
    record: SourceRecord, quiet: Quiet, usual_s: float | None, none_known: str, *, has_steps: bool, runs: bool
) -> tuple[StallKind, str] | None:
    """Return the kind of stall, and why it is not known more exactly. None if nothing is certain.

    `runs` says that a step (without steps: a brick) is running.
    """
    if quiet.is_suspended:
        return StallKind.SUSPENDED, ""
    if record.activity.name:
        return None
    if runs or quiet.in_flight < 0:
        return (StallKind.QUIET, none_known) if usual_s is None else (StallKind.STALLED, "")
    if quiet.is_watched and not record.leaves_steps_out:
        return StallKind.IDLE, NO_STEP if has_steps else NO_BRICK
    return None if usual_s is None else (StallKind.QUIET, STEP_UNKNOWN)


def _path(nodes: NodeTable, innermost: int) -> list[Node]:
    """Return all nodes from the outermost to `innermost`. [] if this id is unknown."""
    path: list[Node] = []
    at: int | None = innermost if 0 < innermost <= len(nodes) else None
    while at is not None:
        path.insert(0, nodes[at])
        at = path[0].parent
    return path


def _p99_s(record: SourceRecord, nodes: list[Node]) -> float | None:
    """Return the longest p99 of any of `nodes`, in seconds. None if none of their calls has ended."""
    known = [calls.p99_ns for calls in record.stats.calls_of([[node.id] for node in nodes]) if calls]
    return max((p99_ns / 1e9 for p99_ns in known if p99_ns is not None), default=None)


def _most_s(record: SourceRecord, step: Node, size: int, *, is_seen_inside: bool) -> float | None:
    """Return how many seconds a step of `size` tokens or sequences may take. If `size` is 0, the context length
    counts.

    0: all steps have the same size. None: no limit is known. `is_seen_inside` says that bricks of this step leave
    records.
    """
    calls = record.stats.calls([step.id]) if step.kind is NodeKind.STEP else None
    if calls is None:
        return 0.0
    if not calls.elements:
        sequences = record.stats.sparse["sequences"].get(step.id, 0)
        if size and sequences:
            return calls.total_ns / sequences * size / 1e9
        return 0.0 if is_seen_inside else None
    if size:
        return calls.total_ns / calls.elements * size / 1e9
    if are_alike(calls.elements, calls.count, record.stats.sparse["squared_tokens"].get(step.id)):
        return 0.0
    context = record.manifest.context_length if record.manifest else 0
    return calls.total_ns / calls.elements * context / 1e9 if context else None


def _name_of(path: list[Node], kind: NodeKind) -> str | None:
    """Return the name of the innermost node of this `kind` in `path`, or None."""
    return next((display_name(node) for node in reversed(path) if node.kind is kind), None)
