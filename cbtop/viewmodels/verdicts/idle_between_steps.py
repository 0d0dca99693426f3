"""Verdict "idle between steps": much of the time, no step runs."""

from __future__ import annotations

from cbtop.protocol.sample_messages import BETWEEN_STEPS
from cbtop.protocol.vocabulary import BY_KERNELS, EnginePart
from cbtop.units import duration, percent
from cbtop.viewmodels.cpu_samples import mostly
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, in_turn
from cbtop.viewmodels.verdicts.data_incomplete import LOST_PERCENT, lost_records
from cbtop.viewmodels.verdicts.launch_bound import LEAST_STEPS

# An ordinary loop spends a few percent between steps (sampling, detokenizing). Above this percentage it is reported.
IDLE_PERCENT = 20.0


def _find(view: SourceView) -> Finding | None:
    steps, time_range = view.steps, view.time_range
    if steps is None or time_range is None or time_range.between_us is None or time_range.between_percent is None:
        return None
    if view.training is not None:
        # A training step begins when the previous one ends. So the time between them is evaluation or a new epoch.
        return None
    on_gpu_us = min(time_range.between_us, _kernels_after_steps_us(view))
    no_request_us = min(time_range.between_us - on_gpu_us, time_range.wall_us * _no_request_percent(view) / 100)
    idle_us = time_range.between_us - on_gpu_us - no_request_us
    idle_percent = 100 * idle_us / time_range.wall_us if time_range.wall_us else 0.0
    if idle_percent < IDLE_PERCENT or lost_records(view).percent > LOST_PERCENT:
        return None  # The lost records may be of steps in the time that looks idle.
    rate, ran_us = steps.tokens_per_sec, time_range.wall_us - idle_us
    ends = f", without {duration(on_gpu_us)} in which the GPU ended them (derived)" if on_gpu_us else ""
    ends += f", without {duration(no_request_us)} in which there was no request (derived)" if no_request_us else ""
    return Finding(
        f"{percent(idle_percent)} of the time is between steps: {duration(idle_us)} of "
        f"{duration(time_range.wall_us)}{ends}{'; gradients are computed between steps' if view.trains else ''}"
        f"{mostly(view.sampled, BETWEEN_STEPS)}{_engine_between(view)}",
        (
            Evidence("between steps", idle_percent, "%"),
            Evidence("time between steps", idle_us, "µs"),
            Evidence("elapsed", time_range.wall_us, "µs"),
        ),
        Subject(About.STEPS, steps.phase),
        rate * (time_range.wall_us / ran_us - 1)
        if rate and ran_us > 0 and in_turn(view) and not view.trains
        else None,
        "each step followed at once",
    )


def _kernels_after_steps_us(view: SourceView) -> float:
    """Return how long a GPU still ran kernels of steps after the steps' calls had returned.

    A call returns when its kernels are launched. The program may then wait for them, which is not idle time.
    """
    books, steps = view.books, view.steps
    if books is None or steps is None or BY_KERNELS not in (view.backend or "") or steps.recorded < LEAST_STEPS:
        return 0.0
    return max(0.0, books.bricks_us / steps.recorded - (steps.p50_us or 0.0)) * steps.count


def _engine_between(view: SourceView) -> str:
    """Return the end of a sentence: the shares of an engine's time in which it does not run the model."""
    parts = view.serving.parts if view.serving else ()
    others = [part for part in parts if part.name not in (EnginePart.WAITING, EnginePart.MODEL)]
    shares = ", ".join(f"{part.name} {percent(part.percent)}" for part in others)
    return f"; the engine's thread: {shares}" if shares else ""


def _no_request_percent(view: SourceView) -> float:
    """Return how many percent of its newest iterations' time an engine had no request. 0 without an engine."""
    parts = view.serving.parts if view.serving else ()
    return next((part.percent for part in parts if part.name == EnginePart.WAITING), 0.0)


IDLE_BETWEEN_STEPS = Rule(
    id="idle-between-steps",
    severity=Severity.WARNING,
    means="The process spends much of its time between steps: it schedules, samples, detokenizes, or waits for "
    "requests. Faster kernels change nothing about that.",
    fires=f"{IDLE_PERCENT:g} % or more of the time shown is between steps of any phase. Time after the last step "
    "does not count, nor time in which a GPU still runs kernels of a step (if recorded) or an engine has no request. "
    "Not for training steps, if some steps left no record, or if records were lost. No gain is given if gradients "
    "are computed between steps.",
    advice="Look at what the program does between its steps, and at the sampled function if one is named. A server "
    "without requests is idle for a good reason. In training, backward passes and the optimizer run there.",
    find=_find,
)
