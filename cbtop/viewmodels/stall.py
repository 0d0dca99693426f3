"""Decide whether a running process makes progress. If not, it is stalled in a step, idle, suspended, or quiet.

Rules
- A lack of progress is reported after max(MIN_S, SLOW × p99). The p99 is over all calls of the running step. If the
  process has no steps, the p99 is over the calls of the running brick. If it is unknown which step runs, the p99 of
  the slowest phase is used.
- A process is stalled only if a step is known to run and earlier steps have ended. A first step may take any time.
- A large step may take longer than the p99. Its limit is its number of tokens times the time per token of earlier
  steps with the same name. If tokens are unknown, sequences are counted in place of tokens. If the number is unknown
  for this step and differs between earlier steps, the context length is used as the number.
- A step has no limit if this context length is unknown. A step also has no limit if steps report no number and the
  bricks of this step leave no records.
- A process is idle only if it is known to be in no step. If steps are sampled, or if the hot path runs in Python,
  this is unknown, because a step without a record may be running.
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
    """The states of a running process that makes no progress."""

    STALLED = "stalled"  # A step or brick takes far longer than usual.
    SUSPENDED = "suspended"  # The process was stopped by a signal or a debugger.
    IDLE = "idle"  # The process runs, but no step is running in it.
    QUIET = "quiet"  # The process is stalled, idle or suspended, but it is unknown which. `why` has the reason.


@dataclass(frozen=True, slots=True)
class StallView:
    """A running process that makes no progress. During the last `age_s`, nothing was recorded and nothing began.

    `place` has the names of the running nodes, outermost first (`decode`, `Layer 17`, `AllReduce`). `place` is empty
    if no node is known. If several `threads` are running a brick, `place` leads to the brick that began last. `after`
    is the node that ended last inside of `place`.
    """

    word: StallKind
    age_s: float
    limit_s: float  # A stall is reported if nothing was recorded for at least this time.
    place: tuple[str, ...] = ()
    phase: str | None = None  # name of the phase of the running step
    layer: str | None = None
    brick: str | None = None
    runs_s: float | None = None  # how long the innermost node of `place` has been running, or None if unknown
    after: tuple[str, ...] = ()
    threads: int = 0
    # p99 of the calls of `usual_of`. None if the p99 is unknown, or if `age_s` is not compared with the p99.
    usual_s: float | None = None
    usual_of: str = ""
    why: str = ""  # additional facts about the lack of progress, or the reason why they are not known
    member: str = ""  # name of the process within a merge, or "" without a merge


def limit_s(usual_s: float | None) -> float:
    """Return after how many seconds without progress a stall is reported.

    `usual_s` is the p99 of earlier calls, or None if unknown.
    """
    return MIN_S if usual_s is None else max(MIN_S, SLOW * usual_s)


def stall_view(record: SourceRecord) -> StallView | None:
    """Return the stall of `record`. Return None if the process makes progress, has ended, or announces other work."""
    state = record.state
    quiet = state.quiet if state is not None and state.state is SourceStatus.LIVE else None
    if quiet is None:
        return None
    path = _path(record.nodes, quiet.in_flight)
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    # A call outside of steps may take long, such as a server's wait for a request, so it is not a stall.
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
    """Return why the process makes no progress (the kind of stall), and why a more specific kind is unknown. Return
    None if no kind is certain.

    `runs` means that a step is running. For a process without steps, it means that a brick is running.
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
    """Return all nodes from the outermost one to `innermost`. Return [] if no node has the id `innermost`."""
    path: list[Node] = []
    at: int | None = innermost if 0 < innermost <= len(nodes) else None
    while at is not None:
        path.insert(0, nodes[at])
        at = path[0].parent
    return path


def _p99_s(record: SourceRecord, nodes: list[Node]) -> float | None:
    """Return the longest p99 of any node in `nodes`, in seconds. Return None if no call of these nodes has ended."""
    known = [calls.p99_ns for calls in record.stats.calls_of([[node.id] for node in nodes]) if calls]
    return max((p99_ns / 1e9 for p99_ns in known if p99_ns is not None), default=None)


def _most_s(record: SourceRecord, step: Node, size: int, *, is_seen_inside: bool) -> float | None:
    """Return how many seconds a step of `size` tokens or sequences may take. If `size` is 0, use the context length.

    Returns 0 if all steps have the same size, and None if no limit is known. `is_seen_inside` is true if the bricks
    of this step would leave records.
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
    """Return the name of the innermost node of the kind `kind` in `path`, or None."""
    return next((display_name(node) for node in reversed(path) if node.kind is kind), None)
