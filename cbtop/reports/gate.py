"""Write the results of a gate as text, Markdown, JSON, JUnit, SARIF and GitHub annotations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.run_diff import RunDiff
from cbtop.reports.run_diff import diff_fields, diff_markdown, diff_text
from cbtop.reports.single_run import run_markdown, run_text
from cbtop.reports.tables import Table, escaped, markdown_table, table

SCHEMA = "cbtop.check/1"
_BETWEEN_CLAUSES = "; "  # separator of the clauses in the text of a result (`Judged.said`)


def gate_text(judged: Sequence[Judged], found: RunDiff | None) -> str:
    """Return the text of a gate: the verdicts and, if one is broken, the whole comparison.

    Without a baseline, the run's figures replace the comparison. `found` is None without a run.
    """
    rows, remarks = _rows(judged)
    lines = [table(rows, left=4), *remarks, "", tally(judged)]
    if found is None:
        return "\n".join(lines)
    found = _without_repetition(found, judged)
    if any(one.outcome is Outcome.BROKEN for one in judged) and found.parts:
        lines += ["", diff_text(found, with_verdicts=False) if found.has_baseline else run_text(found)]
    elif not found.why_not:
        lines += [f"  {note}" for note in found.notes]
    return "\n".join(lines)


def gate_markdown(judged: Sequence[Judged], found: RunDiff | None) -> str:
    """Return the Markdown summary of a gate that a step in CI shows."""
    rows, remarks = _rows(judged)
    lines = ["## cbtop check", "", f"**{escaped(tally(judged))}**", "", *markdown_table(rows)]
    for remark in remarks:
        lines += ["", escaped(remark)]
    # If the runs are not comparable (`why_not`), the only verdict already states the reason.
    if found is not None and not found.why_not:
        shown = _without_repetition(found, judged)
        lines += ["", diff_markdown(shown, with_verdicts=False) if shown.has_baseline else run_markdown(shown)]
    return "\n".join(lines)


def gate_json(judged: Sequence[Judged], found: RunDiff | None) -> str:
    """Return every verdict and the comparison of a gate as JSON."""
    verdicts = []
    for one in judged:
        fields = asdict(one) | {"outcome": one.outcome.value, "where": one.where[0] or None, "passes": one.passes}
        del fields["must_be_sure"]
        verdicts.append(fields)
    passed = all(one.passes for one in judged)
    diff = None if found is None else diff_fields(found)
    document = {"schema": SCHEMA, "passed": passed, "verdicts": verdicts, "diff": diff}
    return json.dumps(document, allow_nan=False)


def gate_github(judged: Sequence[Judged], found: RunDiff | None) -> str:
    """Return the verdicts as workflow commands, at least one line. GitHub shows them as annotations of the commit."""
    lines = []
    for one in judged:
        if one.outcome is not Outcome.HOLDS:
            level = "warning" if one.passes else "error"
            file, line = one.where
            place = f"file={_property(file)},line={line}," if file else ""
            lines.append(f"::{level} {place}title={_property(f'cbtop check: {one.rule}')}::{_message(line_of(one))}")
    return "\n".join([*lines, f"::notice title=cbtop check::{_message(tally(judged))}"])


def line_of(one: Judged) -> str:
    """Return a verdict as one line. It names the brick and layer that cause it."""
    guilty = f" [{one.guilty}]" if one.guilty else ""
    return ": ".join(part for part in (one.rule, f"{one.outcome.value}{guilty}", one.about, one.said) if part)


def summary(judged: Sequence[Judged]) -> str:
    """Return a summary of the verdicts, such as `1 of 3 broken: …`. The first verdict with the worst outcome follows
    the number.
    """
    worst = _worst(judged)
    return f"{tally(judged)}: {line_of(worst[0])}" if worst else tally(judged)


def tally(judged: Sequence[Judged]) -> str:
    """Return a text with the number of verdicts that have the worst outcome, such as `1 of 3 broken` or `all 3
    hold`.
    """
    worst = _worst(judged)
    return f"{len(worst)} of {len(judged)} {worst[0].outcome.value}" if worst else f"all {len(judged)} hold"


def _worst(judged: Sequence[Judged]) -> list[Judged]:
    """Return the verdicts that have the worst outcome. Return [] if all thresholds hold."""
    for outcome in (Outcome.BROKEN, Outcome.UNKNOWN, Outcome.UNSURE):
        if some := [one for one in judged if one.outcome is outcome]:
            return some
    return []


def _rows(judged: Sequence[Judged]) -> tuple[Table, list[str]]:
    """Return a table row for each verdict. Remarks of several rows are lines below the table."""
    counts = Counter(clause for one in judged for clause in _clauses(one)[1:])
    rows: Table = [("verdict", "threshold", "of", "measured", "guilty")]
    marks: dict[str, str] = {}
    for one in judged:
        measured, *clauses = _clauses(one)
        own = _BETWEEN_CLAUSES.join([measured, *(clause for clause in clauses if counts[clause] == 1)])
        if shared := _BETWEEN_CLAUSES.join(clause for clause in clauses if counts[clause] > 1):
            own += f" {marks.setdefault(shared, f'[{len(marks) + 1}]')}"
        passes = f", {'passes' if one.passes else 'fails'}" if one.outcome is Outcome.UNSURE else ""
        rows.append((f"{one.outcome.value}{passes}", one.rule, one.about, own, one.guilty))
    return rows, [f"{mark} {remark}" for remark, mark in marks.items()]


def _clauses(one: Judged) -> list[str]:
    """Return two texts about a verdict: its measurement, and the remarks."""
    return one.said.split(_BETWEEN_CLAUSES)


def _without_repetition(found: RunDiff, judged: Sequence[Judged]) -> RunDiff:
    """Return the comparison without the notes that a verdict already contains."""
    notes = tuple(note for note in found.notes if not any(note in one.said for one in judged))
    return replace(found, notes=notes)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
