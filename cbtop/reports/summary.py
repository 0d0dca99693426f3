"""Make the summary that `cbtop run` prints at the end of a run: at most ten lines."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop import units
from cbtop.protocol.sample_messages import BETWEEN_STEPS
from cbtop.protocol.vocabulary import is_warm_up
from cbtop.text import rate_text, recording_text, sampled_text, serving_text, source_text, training_text
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import StepsView
from cbtop.viewmodels.verdict import Severity

MAX_LINES = 10
MAX_BRICKS = 5
MAX_OTHERS = 3  # At most this many phases are named in addition to the first one.
LEAST_OTHER = 0.05  # Another phase is named only if its share of the time in steps is at least this.
LEAST_WARM_UP = 0.2  # The warm-up is mentioned only if it has at least this share of the time in steps.
MAX_VERDICTS = 2
LEAST_BETWEEN_PERCENT = 10.0  # Functions between steps are named if at least this share of the time is there.


def summary(view: SourceView, next_command: str, more_processes: int = 0, note: str = "") -> list[str]:
    """Return the summary of a run in at most ten lines: the rates of `view`, the bricks with the most time, the worst
    verdicts, and `note`.
    """
    above = [_rates(view, view.steps)] if view.steps else []
    above += [f"left out: {recording_text.warm_up(view.warm_up)}"] if view.warm_up and _is_much(view) else []
    above += _others(view)
    above += [training_text.parts(view, view.training)] if view.training and view.training.parts else []
    above += training_text.gradients(view, view.training) if view.training else []
    above += serving_text.lines(view.serving)[:1] if view.serving else []
    if outside := source_text.not_instrumented(view):
        above.append(outside)
    above += list(_sampled(view))
    worst = [verdict for verdict in view.verdicts if verdict.severity is not Severity.NOTE]
    below = [f"{verdict.severity} {verdict.id}: {verdict.sentence}" for verdict in worst[:MAX_VERDICTS]]
    if withheld := source_text.withheld(view.withheld):
        below.append(withheld)
    if view.guard is not None:
        below.append(source_text.guarded(view.guard))
    if more_processes:
        below.append(f"{more_processes} more process{'es' * (more_processes > 1)}: {next_command}")
    if note:
        below.append(note)
    below.append(f"next: {next_command}")
    above = above[: MAX_LINES - len(below)]
    return [*above, *_costliest(view, min(MAX_BRICKS, MAX_LINES - len(above) - len(below))), *below]


def _sampled(view: SourceView) -> Iterator[str]:
    """Yield a line with the function that ran most in the largest untimed part, if this part takes much time."""
    between = view.time_range.between_percent if view.time_range else None
    for place in view.sampled[:1]:
        if place.place != BETWEEN_STEPS or (between or 0.0) >= LEAST_BETWEEN_PERCENT:
            yield from filter(None, [sampled_text.brief(place)])


def _is_much(view: SourceView) -> bool:
    """Return whether the warm-up took so much of the time that the summary must mention it."""
    if view.warm_up is None or not view.warm_up.has_ended:
        return False
    return view.warm_up.took_us >= LEAST_WARM_UP * sum(steps.union_us or 0.0 for steps in view.phases)


def _others(view: SourceView) -> Iterator[str]:
    """Yield a line that names the other phases if one of them took much of the time."""
    ran_us = sum(steps.union_us or 0.0 for steps in view.phases if not is_warm_up(steps.phase))
    others = [
        steps
        for steps in view.phases
        if steps.phase != view.phase
        and (steps.union_us or 0.0) >= LEAST_OTHER * ran_us
        and not is_warm_up(steps.phase)
    ]
    others.sort(key=lambda steps: -(steps.union_us or 0.0))
    if others:
        named = [f"{steps.phase} {_while_it_ran(view, steps)}" for steps in others[:MAX_OTHERS]]
        more = f", and {len(others) - MAX_OTHERS} more" if len(others) > MAX_OTHERS else ""
        yield f"also: {', '.join(named)}{more}"


def _while_it_ran(view: SourceView, steps: StepsView) -> str:
    """Return the rate of a phase while its steps ran, such as `899 tokens/s while it ran, 17 % of the time`.

    A rate over the whole wall-clock time, which several phases share, would look slow.
    """
    per_sec, unit = steps.tokens_per_sec_in_steps, "tokens/s"
    if per_sec is None and steps.is_training and steps.samples_per_sec is not None:
        per_sec, unit = steps.samples_per_sec, "samples/s"
    elif per_sec is None and steps.union_us:
        per_sec, unit = steps.count / steps.union_us * 1e6, "steps/s"
        if steps.samples_per_sec is not None and steps.steps_per_sec:
            samples_per_sec = per_sec * steps.samples_per_sec / steps.steps_per_sec
            unit = f"{unit}, {rate_text.rate(view, samples_per_sec)} samples/s"
    text = f"{rate_text.rate(view, per_sec)} {unit} while it ran"
    found = view.time_range
    ran_us = sum(phase.us for phase in found.by_phase if phase.name == steps.phase) if found else 0.0
    return f"{text}, {units.percent(100 * ran_us / found.wall_us)} of the time" if found and ran_us else text


def _rates(view: SourceView, steps: StepsView) -> str:
    """Return the rates and step times of a phase, such as `decode: 42.1 tokens/s, step p50 23.7 ms, p99 25.0 ms (last
    421 steps, 10.0 s)`.
    """
    p50, p99 = units.duration(steps.p50_us), units.duration(steps.p99_us)
    of = f"last {units.counted(steps.count, 'step')}"
    if steps.wall_us:
        of += f", {units.duration(steps.wall_us)}"
    if ahead := recording_text.ahead(view):
        of += f"; {ahead}"
    return f"{steps.phase}: {rate_text.throughput(view, steps)}, step p50 {p50}, p99 {p99} ({of})"


def _costliest(view: SourceView, most: int) -> Iterator[str]:
    """Yield a line for each of the `most` bricks with the most time in steps."""
    rows = [row for row in view.bricks if row.percent is not None]
    rows = sorted(rows, key=lambda row: row.total_exclusive_us, reverse=True)[:most]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        each = "" if row.avg_exclusive_us is None else f"  {units.duration(row.avg_exclusive_us)} a call"
        yield f"  {row.name:<{width}}  {units.percent(row.percent):>6}{each}"
