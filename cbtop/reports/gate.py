"""Results of a gate as text, Markdown, JSON, JUnit, SARIF and GitHub annotations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.thresholds import Judged, Outcome
from cbtop.reports.run_diff import diff_fields, diff_markdown, diff_text, escaped
from cbtop.reports.tables import Table, table

SCHEMA = "cbtop.check/1"
_LEVELS = {Outcome.BROKEN: "error", Outcome.UNKNOWN: "error", Outcome.UNSURE: "warning"}


def gate_text(judged: Sequence[Judged], found: RunDiff) -> str:
    """Return the verdicts as text for terminals and logs.

    If one of them is broken, the whole comparison follows.
    """
    lines = [table(_rows(judged), left=4), "", summary(judged)]
    if any(one.outcome is Outcome.BROKEN for one in judged) and found.parts:
        lines += ["", diff_text(found)]
    elif not found.why_not:
        lines += [f"  {note}" for note in found.notes]
    return "\n".join(lines)


def gate_markdown(judged: Sequence[Judged], found: RunDiff) -> str:
    """Return the Markdown summary of a CI step."""
    first, *others = _rows(judged)
    lines = ["## cbtop check", "", f"**{escaped(summary(judged))}**", ""]
    lines += [f"| {' | '.join(escaped(cell) for cell in row)} |" for row in (first, ("---",) * len(first), *others)]
    return "\n".join([*lines, "", diff_markdown(found)])


def gate_json(judged: Sequence[Judged], found: RunDiff) -> str:
    """Return every verdict and the comparison as JSON."""
    verdicts = [asdict(one) | {"outcome": one.outcome.value, "where": one.where[0] or None} for one in judged]
    passed = not any(one.outcome in (Outcome.BROKEN, Outcome.UNKNOWN) for one in judged)
    document = {"schema": SCHEMA, "passed": passed, "verdicts": verdicts, "diff": diff_fields(found)}
    return json.dumps(document, allow_nan=False)


def gate_github(judged: Sequence[Judged], found: RunDiff) -> str:
    """Return workflow commands, at least one line. GitHub shows them next to the commit."""
    lines = []
    for one in judged:
        if level := _LEVELS.get(one.outcome):
            file, line = one.where
            place = f"file={_property(file)},line={line}," if file else ""
            lines.append(f"::{level} {place}title={_property(f'cbtop check: {one.rule}')}::{_message(line_of(one))}")
    return "\n".join([*lines, f"::notice title=cbtop check::{_message(summary(judged))}"])


def line_of(one: Judged) -> str:
    """Return a verdict as one line, with the guilty brick and layer."""
    guilty = f" [{one.guilty}]" if one.guilty else ""
    return ": ".join(part for part in (one.rule, f"{one.outcome.value}{guilty}", one.about, one.said) if part)


def summary(judged: Sequence[Judged]) -> str:
    """Return for example `1 of 3 broken: …`. After the colon is the first verdict with the worst outcome."""
    for outcome in (Outcome.BROKEN, Outcome.UNKNOWN, Outcome.UNSURE):
        some = [one for one in judged if one.outcome is outcome]
        if some:
            return f"{len(some)} of {len(judged)} {outcome.value}: {line_of(some[0])}"
    return f"all {len(judged)} hold"


def _rows(judged: Sequence[Judged]) -> Table:
    rows: Table = [("verdict", "threshold", "of", "measured", "guilty")]
    return rows + [(one.outcome.value, one.rule, one.about, one.said, one.guilty) for one in judged]


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
