"""Write how many steps of a process were recorded, and the cost of recording."""

from __future__ import annotations

from cbtop.protocol.messages import Sampling
from cbtop.units import NOT_MEASURED, count, counted, duration, percent
from cbtop.viewmodels.layers import MIN_STEPS
from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.run_ahead import kernels_us_if_ahead
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import WarmUpView

SAMPLE_MARK = "a sample: "  # the first words of the texts about recorded steps


def sample(every: int | None) -> str:
    """Format the share of recorded steps: `a sample: one step in 10`. Return "" if every step is recorded."""
    if every is None:
        return f"{SAMPLE_MARK}some processes leave steps out"
    return f"{SAMPLE_MARK}one step in {every:,}" if every > 1 else ""


def inside_of_all(source: SourceView) -> str:
    """Return a note with the number of recorded steps behind the bricks' figures, or "" if there are enough."""
    steps = source.steps
    if steps is None or not steps.recorded:
        return ""
    few = f"{counted(steps.recorded, 'recorded step')}"
    if source.is_inside_of_all:
        return f"bricks and layers: of {few} since the warm-up, for these seconds have fewer than {MIN_STEPS}"
    return f"bricks and layers: of {few} only" if steps.recorded < min(MIN_STEPS, steps.count) else ""


def ahead(view: SourceView) -> str:
    """Return a note if the host runs ahead of the GPU, so that step times are the host's only, or ""."""
    kernels_us = kernels_us_if_ahead(view)
    if kernels_us is None:
        return ""
    return f"the host runs ahead of the GPU: step times are the host's, kernels take {duration(kernels_us)} a step"


def warm_up(found: WarmUpView) -> str:
    """Return a line about the number and time of warm-up steps."""
    line = f"warm-up: {counted(found.steps, 'step')}, {duration(found.took_us)}"
    if found.recompilations:
        line += f" (recompiled {counted(found.recompilations, 'time')}: {duration(found.recompiled_us)})"
    if found.unsettled:
        line += f" ({', '.join(found.unsettled)} did not settle: the last steps still became faster)"
    return (
        f"{line}, in no other figure" if found.has_ended else f"{line}; figures are of these: nothing else has ended"
    )


def overhead(sampling: Sampling) -> str:
    """Format the cost of recording: `recording costs 0.62% of its steps' time (95 %: 0.41 to 0.80; …)`.

    Some costs cannot be measured. For example, recording pushes the model's data out of the processor's cache.
    """
    cost, low, high = sampling.overhead_percent, sampling.low_percent, sampling.high_percent
    allowed = f"at most {sampling.allowed_percent:g} is allowed"
    if cost is None:
        return f"what recording costs its steps is {NOT_MEASURED}: too few were compared yet ({allowed})"
    is_known = low is not None and high is not None
    interval = f"95 %: {low:.2f} to {high:.2f}" if is_known else "too few recorded steps for an interval"
    return f"recording costs {cost:.2f}% of its steps' time ({interval}; {allowed})"


def short_overhead(sampling: Sampling | None) -> str:
    """Format the minimum cost of recording with its 95 % interval: `≥0.62 % (0.41–0.80)`."""
    if sampling is None or sampling.overhead_percent is None:
        return NOT_MEASURED
    low, high = sampling.low_percent, sampling.high_percent
    bounds = "" if low is None or high is None else f" ({low:.2f}–{high:.2f})"
    return f"≥{sampling.overhead_percent:.2f} %{bounds}"


def limit_of_overhead(sampling: Sampling) -> str:
    """Format the cost of recording in few words: `up to 0.8%`, or `at least 0.6%` if its interval is not known."""
    if sampling.high_percent is not None:
        return f"up to {sampling.high_percent:.1f}%"
    return NOT_MEASURED if sampling.overhead_percent is None else f"at least {sampling.overhead_percent:.1f}%"


def no_bricks(view: SourceView) -> str:
    """Return why no brick is shown, and what to do: `none of the 7,000 decode steps was recorded: one in 10,000 is:
    recording costs …`.
    """
    steps, every = view.steps, view.sample_every
    if steps is None or not steps.count or steps.recorded or every is None or every <= 1:
        return "no brick of this phase was recorded in this time"
    way_out = "`cbtop run --overhead PERCENT` lets it cost more"
    why = f": {overhead(view.overhead)}; {way_out}" if view.overhead is not None else ""
    return f"none of the {counted(steps.count, f'{steps.phase} step')} was recorded: one in {every:,} is{why}"


def losses(loss: LossView) -> str:
    """Format the numbers of lost records: `95,879 produced, 1,200 lost (1.3 % since the daemon looked), 300 before
    attach, …`.
    """
    share = f" ({percent(loss.lost_percent)} since the daemon looked)" if loss.lost else ""
    parts = [f"{count(loss.produced)} produced", f"{count(loss.lost)} lost{share}"]
    parts += [f"{count(loss.before_attach)} before attach", f"{count(loss.unread)} unread"]
    parts += [f"{count(loss.left_out)} announcements left out"] if loss.left_out else []
    return ", ".join(parts)
