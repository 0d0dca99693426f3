"""Judge thresholds on the contents of steps, such as `decode.launches==338` or `graph==base`. Contents have no
noise.
"""

# Grammar
#     threshold = [PHASE "."] WHAT OPERATOR (NUMBER | "base")
#     WHAT      = bricks, launches, allocations, transfers.h2d, transfers.d2h or transfers.d2d (of a step),
#                 graph (only `==base`), graph_breaks or recompilations (of the whole run, without PHASE)
# Rules
# - A number is exact if at least MIN_STEPS steps were recorded. It is the same on any machine. The first step does
#   not count.
# - If steps differ in a number, it is a range. If the range contains the threshold, the result is unknown.
# - A number that was not recorded is unknown. It is never taken as 0.
# - If sampling left out steps, a threshold holds for the recorded steps, and the result has their number. Torch
#   counts allocations in every step.
# - Without PHASE, all phases are judged. If a phase has too few steps in both runs, this is a remark on the last
#   result.

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cbtop.comparison.contents import MIN_STEPS, Compiled, Contents, PhaseContents, PieceKind, Range, Total
from cbtop.comparison.contents_diff import Difference, differences_of
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import Threshold, parse
from cbtop.errors import UsageError
from cbtop.units import count, counted

GRAPH, GRAPH_BREAKS, RECOMPILATIONS, BASE = "graph", "graph_breaks", "recompilations", "base"
MAX_DIFFERENCES = 50  # At most this many differences are listed for a phase.
LISTED_CAUSES = 3
EXAMPLE = "decode.launches==338, transfers.h2d==0, graph==base, graph_breaks==0, allocations<=20"
_WHAT = (*(total.value for total in Total), GRAPH, GRAPH_BREAKS, RECOMPILATIONS)
_FORM = re.compile(r"\s*(?P<what>(?:\[[^]]*\]|[^<>=\[])+?)\s*(?P<sign><=|>=|==|<|>)\s*(?P<value>\S.*?)\s*")
_OPERATORS: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_OF_KIND = {
    Total.BRICKS: (PieceKind.BRICK,),
    Total.LAUNCHES: (PieceKind.BRICK, PieceKind.KERNEL),
    Total.ALLOCATIONS: (),
    Total.H2D: (PieceKind.TRANSFER,),
    Total.D2H: (PieceKind.TRANSFER,),
    Total.D2D: (PieceKind.TRANSFER,),
}
_NO_COPIES = "the process does not report its copies"
_WHY_UNKNOWN = {
    Total.BRICKS: "no brick was recorded",
    Total.LAUNCHES: "kernels were not recorded; on a GPU, `cbtop kernels` records some steps with all kernels",
    Total.ALLOCATIONS: "allocations are counted only for torch models on a GPU under `cbtop run`",
    Total.H2D: _NO_COPIES,
    Total.D2H: _NO_COPIES,
    Total.D2D: _NO_COPIES,
}
_OF_PHASE = "; thresholds on what a step contains are of a phase, not of a brick"
_NOT_WATCHED = "the process did not report its compilations; run a torch model under `cbtop run`"


@dataclass(frozen=True, slots=True)
class Structural:
    """A parsed threshold on the contents of steps. `value` is the limit, or None for the baseline's number."""

    text: str
    phase: str  # the threshold's phase, or "" for all
    what: str
    sign: str
    value: int | None
    where: tuple[str, int] = ("", 1)  # file and line of the threshold


def parse_any(text: str, where: tuple[str, int] = ("", 1)) -> Threshold | Structural:
    """Parse a threshold on times or on contents.

    Raises UsageError with the wrong part, the expected form, and examples.
    """
    found = _FORM.fullmatch(text)
    named = found["what"].strip() if found else ""
    what = next((one for one in _WHAT if named == one or named.endswith(f".{one}")), "")
    shown = " ".join(text.split())
    if found is not None and not what and named.endswith(".calls"):
        raise UsageError(
            f"threshold {shown!r}: calls of one brick are no threshold; graph==base compares the calls of "
            "each brick, bricks==39 all calls in a step"
        )
    if found is None or not what:
        return parse(text, where)
    phase, sign, value = named.removesuffix(what).removesuffix("."), found["sign"], found["value"]
    if "[" in phase:
        of_phase = f"{phase.partition('[')[0]}.{what}{sign}{value}"
        raise UsageError(
            f"threshold {shown!r}: what a step contains is judged for a phase, not for a batch: write {of_phase}"
        )
    if value != BASE and not (value.isascii() and value.isdecimal()):
        raise UsageError(f"threshold {shown!r}: expected a whole number or `base`; write it like {EXAMPLE}")
    if what == GRAPH and (sign, value) != ("==", BASE):
        raise UsageError(f"threshold {shown!r}: a graph is only compared with the baseline: write graph==base")
    if what in (GRAPH_BREAKS, RECOMPILATIONS) and phase:
        raise UsageError(f"threshold {shown!r}: {what} are counted in the whole run: omit {phase!r}")
    return Structural(shown, phase, what, sign, None if value == BASE else int(value), where)


def judge_structure(threshold: Structural, bases: Contents | None, now: Contents) -> list[Judged]:
    """Return a result of `threshold` for each phase.

    `bases` is None without a baseline. Raises UsageError if neither run has the threshold's phase.
    """
    if threshold.what in (GRAPH_BREAKS, RECOMPILATIONS):
        return [_of_compiled(threshold, bases.compiled if bases else None, now.compiled)]
    known = dict.fromkeys(one.phase for run in (now, bases) if run for one in run.phases)
    names = [name for name in known if threshold.phase in ("", name)]
    if not names and threshold.phase and known:
        there = ", ".join(known)
        raise UsageError(
            f"threshold {threshold.text!r}: there is no phase {threshold.phase!r}; there are {there}{_OF_PHASE}"
        )
    if not names:
        return [_judged(threshold, "", Outcome.UNKNOWN, "no step was recorded with its bricks")]
    short = [name for name in names if not threshold.phase and _is_short(name, bases, now)]
    chosen = [name for name in names if name not in short] or names
    way_out = _way_out(threshold, names, bases, now)
    judged = [one for name in chosen for one in _of_phase(threshold, name, bases, now, way_out)]
    if remarks := [_few(found) for name in short if name not in chosen and (found := now.of(name))]:
        judged[-1] = replace(judged[-1], said="; ".join([judged[-1].said, *remarks]))
    return judged


def _is_short(name: str, bases: Contents | None, now: Contents) -> bool:
    """Whether every run has the phase, but with too few steps to judge it."""
    sides = [run.of(name) for run in (bases, now) if run is not None]
    return all(one is not None and one.steps < MIN_STEPS for one in sides)


def _few(phase: PhaseContents) -> str:
    return f"{phase.phase} not judged: {counted(phase.steps, 'recorded step')}, of {MIN_STEPS} needed"


def _way_out(threshold: Structural, names: Sequence[str], bases: Contents | None, now: Contents) -> str:
    """Return advice to limit the threshold to a phase that can be judged. "" if it names a phase, or if there is
    none.
    """
    sides = [run for run in (now, bases if threshold.value is None else None) if run is not None]
    for name in () if threshold.phase else names:
        if all((found := run.of(name)) is not None and found.steps >= MIN_STEPS for run in sides):
            return f"; to judge one phase alone: {name}.{threshold.text}"
    return ""


def _of_phase(threshold: Structural, name: str, bases: Contents | None, now: Contents, way_out: str) -> list[Judged]:
    after, before = now.of(name), bases.of(name) if bases else None
    needs_base = threshold.value is None
    for whose, phase in (("the new run", after), ("the baseline", before)):
        if phase is None and (phase is after or needs_base):
            return [_judged(threshold, name, Outcome.UNKNOWN, f"{whose} has no recorded {name} step{way_out}")]
        if phase is not None and phase.steps < MIN_STEPS and (phase is after or needs_base):
            few = f"{counted(phase.steps, 'recorded step')} in {whose}, of {MIN_STEPS} needed{way_out}"
            return [_judged(threshold, name, Outcome.UNKNOWN, few)]
    assert after is not None
    if threshold.what == GRAPH:
        assert before is not None
        judged = _of_graph(threshold, before, after)
    else:
        judged = [_of_total(threshold, Total(threshold.what), before, after)]
    sampled = "" if threshold.what == Total.ALLOCATIONS else _sampled(before if needs_base else None, after)
    return [replace(one, said=one.said + sampled) if one.outcome is Outcome.HOLDS else one for one in judged]


def _sampled(before: PhaseContents | None, after: PhaseContents) -> str:
    """Return a text with the number of recorded steps, or "" if all of both runs were recorded."""
    for phase, of_run in ((after, ""), (before, " of the baseline")):
        if phase is not None and phase.plain:
            return f"; seen in the {count(phase.steps)} recorded of {count(phase.steps + phase.plain)} steps{of_run}"
    return ""


def _of_graph(threshold: Structural, before: PhaseContents, after: PhaseContents) -> list[Judged]:
    if not (before.pieces and after.pieces):
        return [
            _judged(
                threshold, after.phase, Outcome.UNKNOWN, "no brick was recorded: the model is compiled as a whole"
            )
        ]
    found = differences_of(before, after)
    sure = [one for one in found if one.is_sure]
    judged = [
        _judged(threshold, after.phase, Outcome.BROKEN, _said(one), one.first_place or after.phase)
        for one in sure[:MAX_DIFFERENCES]
    ]
    if (more := len(sure) - MAX_DIFFERENCES) > 0:
        said = f"and {counted(more, 'more difference')}"
        judged.append(_judged(threshold, after.phase, Outcome.BROKEN, said, after.phase))
    judged += [_judged(threshold, after.phase, Outcome.UNKNOWN, _said(one)) for one in found if not one.is_sure]
    return judged or [_judged(threshold, after.phase, Outcome.HOLDS, _equal(after))]


def _equal(phase: PhaseContents) -> str:
    """Return a text with the numbers of compared pieces, for example `4 layers, 46 bricks, 54 operations are
    equal`.
    """
    numbers = {kind: [n for piece, n in phase.pieces.items() if piece.kind is kind] for kind in PieceKind}
    known = [counted(sum(most for _, most in ranges), kind) for kind, ranges in numbers.items() if ranges]
    inner = any(numbers[kind] for kind in (PieceKind.KERNEL, PieceKind.OPERATION))
    rest = "" if inner else "; no kernel or operation was recorded"
    return f"{', '.join(known)} are equal{rest}"


def _of_total(threshold: Structural, total: Total, before: PhaseContents | None, after: PhaseContents) -> Judged:
    now = after.totals.get(total)
    base = before.totals.get(total) if before else None
    limit = base if threshold.value is None else (threshold.value, threshold.value)
    if now is None or limit is None:
        whose = " in the baseline" if now is not None else ""
        return _judged(threshold, after.phase, Outcome.UNKNOWN, f"not known{whose}: {_WHY_UNKNOWN[total]}")
    said = _number(now, total)
    if base is not None and base != now:
        said += f", was {_text(base)}"
    outcome = _outcome(threshold.sign, now, limit)
    if outcome is Outcome.UNKNOWN:
        return _judged(threshold, after.phase, outcome, f"the steps differ: {said}")
    causes = [] if before is None or outcome is Outcome.HOLDS else _causes(total, before, after)
    said = "; ".join([said, *(_said(one) for one in causes)])
    return _judged(threshold, after.phase, outcome, said, causes[0].first_place if causes else "")


def _causes(total: Total, before: PhaseContents, after: PhaseContents) -> list[Difference]:
    kinds = _OF_KIND[total]
    return [one for one in differences_of(before, after) if one.is_sure and one.kind in kinds][:LISTED_CAUSES]


def _of_compiled(threshold: Structural, base: Compiled | None, now: Compiled | None) -> Judged:
    needs_base = threshold.value is None
    if now is None or (needs_base and base is None):
        whose = " in the baseline" if now is not None else ""
        return _judged(threshold, "", Outcome.UNKNOWN, f"not known{whose}: {_NOT_WATCHED}")
    value, was = (None if one is None else getattr(one, threshold.what) for one in (now, base))
    limit = was if needs_base else threshold.value
    assert value is not None
    assert limit is not None
    said = count(value) if was in (None, value) else f"{count(value)}, was {count(was)}"
    if not now.compilations:
        said += "; nothing was compiled"
    outcome = _outcome(threshold.sign, (value, value), (limit, limit))
    guilty = ""
    if threshold.what == GRAPH_BREAKS and outcome is Outcome.BROKEN and now.breaks:
        said = "; ".join(
            [said, *(f"{one.place}: {one.reason}".removeprefix(": ") for one in now.breaks[:LISTED_CAUSES])]
        )
        guilty = now.breaks[0].place
    return _judged(threshold, "", outcome, said, guilty)


def _outcome(sign: str, now: Range, limit: Range) -> Outcome:
    """Compare two ranges of counts. If it holds for some of their values only, the result is unknown."""
    holds = [_OPERATORS[sign](value, other) for value in now for other in limit]
    if sign == "==" and (now[0] != now[1] or limit[0] != limit[1]):
        return Outcome.UNKNOWN
    return Outcome.HOLDS if all(holds) else Outcome.UNKNOWN if any(holds) else Outcome.BROKEN


def _judged(threshold: Structural, about: str, outcome: Outcome, said: str, guilty: str = "") -> Judged:
    return Judged(threshold.text, about, outcome, said, guilty, threshold.where)


def _said(one: Difference) -> str:
    return ": ".join(filter(None, (one.place, one.text)))


def _number(number: Range, total: Total) -> str:
    noun = total.value.removeprefix("transfers.").removesuffix("s")
    if number[0] == number[1]:
        return f"{counted(number[0], noun)} a step"
    return f"{_text(number)} {noun}s a step"


def _text(number: Range) -> str:
    return count(number[0]) if number[0] == number[1] else f"{count(number[0])} to {count(number[1])}"


def of_lost_records(thresholds: Sequence[Structural], runs: Sequence[Run]) -> list[Judged]:
    """Return a result for each threshold that names a run with lost records. [] if none lost any.

    Numbers are exact only if all records are known.
    """
    lost = next((run for run in runs if run.lost), None)
    if lost is None:
        return []
    said = f"{lost.name} lost {counted(lost.lost, 'record')}"
    return [_judged(one, "", Outcome.UNKNOWN, said) for one in thresholds]


def is_about_base(threshold: Structural) -> bool:
    """Whether the threshold compares with a baseline."""
    return threshold.value is None


def split(thresholds: Sequence[Threshold | Structural]) -> tuple[list[Threshold], list[Structural]]:
    """Divide the thresholds into thresholds on times, and thresholds on the contents of steps."""
    timed = [one for one in thresholds if isinstance(one, Threshold)]
    return timed, [one for one in thresholds if isinstance(one, Structural)]
