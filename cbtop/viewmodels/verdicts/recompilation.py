"""Verdict "recompilation": code was compiled again because it did not fit its arguments."""

from __future__ import annotations

from cbtop.units import counted, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, in_turn

# One second in a minute or two does not matter. Recompilation above this percentage of the shown time is reported.
SHARE_PERCENT = 5.0


def _find(view: SourceView) -> Finding | None:
    steps, compiling = view.steps, view.compiling
    if steps is None or compiling is None or not compiling.again:
        return None
    share = 100 * compiling.again_us / compiling.wall_us
    if share < SHARE_PERCENT:
        return None
    # In training, the rate is over the time in training steps, which wait for the compiler.
    over_us = steps.rates_us if steps.is_training else compiling.wall_us
    rate, rest_us = steps.tokens_per_sec, over_us - compiling.again_us
    return Finding(
        f"It recompiled code that did not fit: {counted(compiling.again, 'time')}, {duration(compiling.again_us)} of "
        f"{duration(compiling.wall_us)} ({percent(share)})",
        (
            Evidence("recompilations", compiling.again, "times"),
            Evidence("they took", compiling.again_us, "µs"),
            Evidence("of the time shown", share, "%"),
        ),
        Subject(About.STEPS, steps.phase),
        rate * (over_us / rest_us - 1) if rate and rest_us > 0 and in_turn(view) else None,
        "it did not recompile",
    )


RECOMPILATION = Rule(
    id="recompilation",
    severity=Severity.WARNING,
    means="torch.compile had code that did not fit its arguments (another shape, type or flag), so it made new code "
    "while steps waited.",
    fires=f"{SHARE_PERCENT:g} % or more of the time shown was spent on compiling code again, as Dynamo counts it. "
    "Only for a process under `cbtop run` or with an attached model.",
    advice="TORCH_LOGS=recompiles names what did not fit. Mark sizes that change (dynamic=True, mark_dynamic), or "
    "pad to a few sizes.",
    find=_find,
)
