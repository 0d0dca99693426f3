"""Verdict "over budget": a brick takes more time per token than its budget."""

from __future__ import annotations

from cbtop.units import counted, number, percent
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside


def _find(view: SourceView) -> Finding | None:
    over = [row for row in view.bricks if row.budget_met is False]
    if not over:
        return None
    worst = max(over, key=_over_us)
    used = worst.budget_used_percent or 0.0
    assert worst.us_per_token is not None
    assert worst.budget_us_per_token is not None
    steps = view.steps
    step_us_per_token = (
        steps.mean_us * steps.count / steps.tokens if steps and steps.mean_us and steps.tokens else None
    )
    saved = 100 * _over_us(worst) / step_us_per_token if step_us_per_token else 0.0
    more = f"; {counted(len(over) - 1, 'more brick')} over theirs" if len(over) > 1 else ""
    return Finding(
        f"{worst.name} is over its budget: {number(worst.us_per_token)} of {number(worst.budget_us_per_token)} "
        f"µs/token ({percent(used)}){more}",
        (
            Evidence("takes", worst.us_per_token, "µs/token"),
            Evidence("budget", worst.budget_us_per_token, "µs/token"),
            Evidence("of its budget", used, "%"),
            Evidence("bricks over budget", len(over), "bricks"),
        ),
        Subject(About.BRICK, worst.name),
        gain_inside(view, saved),
        "it kept its budget",
        is_inside=True,
    )


def _over_us(row: BrickRow) -> float:
    return (row.us_per_token or 0.0) - (row.budget_us_per_token or 0.0)


OVER_BUDGET = Rule(
    id="over-budget",
    severity=Severity.WARNING,
    means="A brick takes more time per token than the budget that the process declared for it.",
    fires="Any brick's µs/token exceed its budget. The brick that exceeds it by the most µs is named.",
    advice="Its details (Enter) show layers and kernels. Or the budget was made for another machine.",
    find=_find,
)
