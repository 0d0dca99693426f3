"""Whether a process that runs goes on: stalled in a step, idle between two, or quiet where that is not known.

Rules
- It is said from max(MIN_S, SLOW × p99) without progress on: the p99 of all that were seen of the step that runs, or
  of the brick, where a process marks no steps. Where it is not known which step runs, it is the slowest phase's.
- Stalled is only what is known to run and to have ended before: of a first step nobody knows how long it may take.
- How many tokens a running step has is not known. If steps of its name have unlike numbers, it may have as many as
  the model's context is long, and take as long a token as they did. Without a context nobody knows what is long.
- Idle is only one that is known to be in no step. Of a process that samples its steps, and of one whose hot path is
  Python's, nobody knows what runs in a step that is not recorded, or whether one has begun.
- Who announces that it is busy with something else (compiling) is not judged.
- The age is what the daemon said: it reads the clock of the host where the process runs.
"""

from __future__ import annotations

from cbtop.client.store import SourceRecord
from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.protocol.messages import Node, Quiet
from cbtop.protocol.vocabulary import NodeKind, SourceStatus
from cbtop.viewmodels.model import StallView, Standstill
from cbtop.viewmodels.steps import are_alike

MIN_S = 2.0
SLOW = 10.0

UNNAMED = "a step without a name yet"
NO_STEP, NO_BRICK = "no step runs", "no brick runs"
NONE_ENDED = "none of these has ended yet, so what is long is not known"
TOKENS_UNKNOWN = "its steps have unlike numbers of tokens, so what is long is not known"
STEP_UNKNOWN = "whether a step runs is not known"


def limit_s(usual_s: float | None) -> float:
    """From how long without progress on it is said, of what usually takes `usual_s` (p99; None: not known)."""
    return MIN_S if usual_s is None else max(MIN_S, SLOW * usual_s)


def stall_view(record: SourceRecord) -> StallView | None:
    """How `record` does not go on; None where it does, has ended, or is busy with what it has announced."""
    state = record.state
    quiet = state.quiet if state is not None and state.state is SourceStatus.LIVE else None
    if quiet is None:
        return None
    path = _path(record.nodes, quiet.in_flight)
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    # In what steps run in or beside: a server's loop, its wait for a request. How long that takes tells of no hang.
    is_outside = bool(steps and path) and path[0].kind is not NodeKind.STEP
    compared = [] if is_outside else path[:1]
    usual_s = _p99_s(record, compared or steps)
    most_s = _most_s(record, compared[0]) if compared and usual_s is not None else 0.0
    usual_s = None if most_s is None else usual_s
    none_known = TOKENS_UNKNOWN if most_s is None else NONE_ENDED
    found = _judged(record, quiet, usual_s, none_known, has_steps=bool(steps), runs=bool(compared))
    if found is None:
        return None
    word, why = found
    if word in (Standstill.SUSPENDED, Standstill.IDLE):
        usual_s = None  # it is not compared with anything
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
) -> tuple[Standstill, str] | None:
    """The word for it, and why no other is known; None where nothing can be said.

    It `runs` a step or, where it marks none, a brick.
    """
    if quiet.is_suspended:
        return Standstill.SUSPENDED, ""
    if record.activity.name:
        return None
    if runs or quiet.in_flight < 0:
        return (Standstill.QUIET, none_known) if usual_s is None else (Standstill.STALLED, "")
    if quiet.is_watched and not record.leaves_steps_out:
        return Standstill.IDLE, NO_STEP if has_steps else NO_BRICK
    return None if usual_s is None else (Standstill.QUIET, STEP_UNKNOWN)


def _path(nodes: NodeTable, innermost: int) -> list[Node]:
    """From the outermost node to `innermost`; nothing where that is no node."""
    path: list[Node] = []
    at: int | None = innermost if 0 < innermost <= len(nodes) else None
    while at is not None:
        path.insert(0, nodes[at])
        at = path[0].parent
    return path


def _p99_s(record: SourceRecord, nodes: list[Node]) -> float | None:
    """How long all but one in a hundred calls take, of the slowest of `nodes`; None where none has ended."""
    known = [calls.p99_ns for calls in record.stats.calls_of([[node.id] for node in nodes]) if calls]
    return max((p99_ns / 1e9 for p99_ns in known if p99_ns is not None), default=None)


def _most_s(record: SourceRecord, step: Node) -> float | None:
    """How long a step with the most tokens may take; 0 if all have as many, None if the most is not known."""
    calls = record.stats.calls([step.id]) if step.kind is NodeKind.STEP else None
    if calls is None or not calls.elements:
        return 0.0
    if are_alike(calls.elements, calls.count, record.stats.rare_value("squared_tokens", step.id)):
        return 0.0
    context = record.manifest.context_length if record.manifest else 0
    return calls.total_ns / calls.elements * context / 1e9 if context else None


def _name_of(path: list[Node], kind: NodeKind) -> str | None:
    """The innermost of that kind."""
    return next((display_name(node) for node in reversed(path) if node.kind is kind), None)
