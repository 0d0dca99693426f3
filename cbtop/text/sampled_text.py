"""Write the sampled functions of untimed places."""

from __future__ import annotations

from cbtop.units import counted, percent
from cbtop.viewmodels.cpu_samples import LEAST_SAMPLES, FunctionShare, SampledTimeView

ASLEEP_PERCENT = 50.0  # A function that waits in at least this share of its samples is marked.


def heading(view: SampledTimeView) -> str:
    """Return the place and the number of samples: `between steps (sampled, n = 132 in 41 s)`."""
    beside = [f"{percent(view.own_percent)} cbtop's own"] if view.own_percent >= 1 else []
    beside += [f"{percent(view.unread_percent)} not read"] if view.unread_percent >= 1 else []
    more = "".join(f", {text}" for text in beside)
    return f"{view.place} (sampled, n = {view.samples:,} in {view.over_s:.0f} s{more})"


def function_place(one: FunctionShare) -> str:
    """Return the location of a function: `Tokenizer.encode tok/fast.py:88, from serve.py:12 main`."""
    caller = f", from {one.called_from}" if one.called_from else ""
    return f"{one.name} {one.file}:{one.line}{caller}{waits(one)}"


def waits(one: FunctionShare) -> str:
    """Return the share of samples that waited, if it is large: ` (waits 97 %)`."""
    return f" (waits {percent(one.asleep_percent)})" if one.asleep_percent >= ASLEEP_PERCENT else ""


def share(one: FunctionShare) -> str:
    """Return the share of a function with its interval: `61 % (52 to 69)`."""
    if one.percent is None or one.low_percent is None or one.high_percent is None:
        return counted(one.samples, "sample")
    return f"{one.percent:.0f} % ({one.low_percent:.0f} to {one.high_percent:.0f})"


def lines(view: SampledTimeView) -> list[str]:
    """Return a line about the untimed time, then a line for each of its functions."""
    if not view.is_enough:
        return [f"{heading(view)}: fewer than {LEAST_SAMPLES} samples, so no shares"]
    shares = [share(one) for one in view.functions]
    width = max((len(text) for text in shares), default=0)
    found = [f"  {text:>{width}}  {function_place(one)}" for text, one in zip(shares, view.functions, strict=True)]
    return [heading(view), *found]


def brief(view: SampledTimeView) -> str:
    """Return one line with the most frequent function, or "" if there are too few samples."""
    if not view.is_enough or not view.functions:
        return ""
    first = view.functions[0]
    return f"{heading(view)}: {share(first)} in {function_place(first)}"


def briefest(view: SampledTimeView) -> str:
    """Return `brief` without the caller, the file's folder and the facts about all samples."""
    if not brief(view):
        return ""
    first = view.functions[0]
    what = f"{first.name} {first.file.rpartition('/')[2]}:{first.line}{waits(first)}"
    return f"{view.place} (sampled, n = {view.samples:,}): {share(first)} in {what}"
