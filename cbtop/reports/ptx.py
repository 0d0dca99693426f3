"""Write the analysis of PTX files as text and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from cbtop.profiler.analysis.graph.nodes import printable
from cbtop.profiler.analysis.machine_code.examination import Examination
from cbtop.profiler.analysis.ptx.lints.base import LintFinding, LintSeverity
from cbtop.profiler.analysis.ptx.model import Module
from cbtop.profiler.analysis.ptx.summary import EntrySummary
from cbtop.reports.machine_code import entry_json, entry_lines
from cbtop.units import counted

SCHEMA = "cbtop.ptx/1"
MAX_NAMES = 4  # A line lists at most this many entries or line numbers.
_PLACES = re.compile(r"%\w+|\bline \d+|\S+:\d+ \(PTX line \d+\)")


@dataclass(frozen=True, slots=True)
class PtxFile:
    """The analysis of a PTX file: its module, a summary of each entry, the problems found, and its machine code."""

    name: str
    module: Module
    entries: Sequence[EntrySummary]
    findings: Sequence[LintFinding]
    machine_code: Examination


def ptx_text(files: Sequence[PtxFile], *, verbose: bool) -> str:
    lines: list[str] = []
    for file in files:
        lines.append(f"{file.name}: PTX {file.module.version}, {file.module.target} (static)")
        for entry in file.entries:
            lines.append(f"  {_entry(entry)}")
            lines += [f"    {line}" for line in entry_lines(file.machine_code, entry.name, verbose=verbose)]
        lines += [f"  machine code: {problem}" for problem in file.machine_code.problems]
        for alike in [[one] for one in file.findings] if verbose else _grouped(file.findings):
            one = alike[0]
            lines.append(f"{file.name}:{one.line}: {one.lint.severity} {one.lint.id}: {_message(one)}{_times(alike)}")
            if verbose:
                lines.append(f"    fix: {one.lint.fix}")
    lines += _assumptions(files)
    lines.append(_conclusion(files))
    return "\n".join(map(printable, lines))


def _grouped(findings: Sequence[LintFinding]) -> list[list[LintFinding]]:
    """Return the findings in groups. Findings of one lint in one function or source line have one cause. Their
    messages differ only in registers and lines.
    """
    groups: dict[tuple[object, ...], list[LintFinding]] = {}
    for one in findings:
        key = one.lint.id, one.source or one.function, _PLACES.sub("", one.message)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _times(alike: Sequence[LintFinding]) -> str:
    if len(alike) == 1:
        return ""
    lines = [str(line) for line in dict.fromkeys(one.line for one in alike[1:])]
    return f" ({len(alike)} times, also at PTX line{'s' * (len(lines) > 1)} {_listed(lines)}; --verbose has each)"


def _assumptions(files: Sequence[PtxFile]) -> Iterator[str]:
    """Yield a line for each assumption that the checks of the PTX make about thread blocks."""
    assumed: dict[int | None, list[str]] = {}
    for file in files:
        for entry in file.entries:
            if entry.is_assumed:
                assumed.setdefault(entry.checked_threads, []).append(entry.name)
    for threads, names in assumed.items():
        which = _listed(names) if len(names) < sum(len(file.entries) for file in files) else ""
        if threads is None:
            yield f"not checked for races{which and ' in '}{which}: pass --launch, because threadIdx.y or z is used"
        else:
            yield f"checked for blocks of {threads} threads{which and ': '}{which}; --launch checks yours"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _conclusion(files: Sequence[PtxFile]) -> str:
    """Return one line with the number of problems of each kind."""
    severities = Counter(one.lint.severity for file in files for one in file.findings)
    errors = severities[LintSeverity.CORRECTNESS]
    parts = [counted(errors, "error") if errors else "no error found"]
    if likely := severities[LintSeverity.LIKELY]:
        parts.append(counted(likely, "likely error"))
    if advice := severities[LintSeverity.ADVICE]:
        parts.append(f"{counted(advice, 'finding')} of advice")
    wastes = Counter(
        waste.is_possible for file in files for one in file.machine_code.entries.values() for waste in one.waste
    )
    sure, possible = wastes[False], wastes[True]
    if sure:
        parts.append(counted(sure, "waste") + (f", {possible} possible" if possible else ""))
    elif possible:
        parts.append(counted(possible, "possible waste"))
    return "; ".join(parts)


def ptx_json(files: Sequence[PtxFile]) -> str:
    document = {
        "schema": SCHEMA,
        "files": [
            {
                "file": file.name,
                "version": file.module.version,
                "target": file.module.target,
                "entries": [
                    asdict(one) | {"source": "static", "machine_code": entry_json(file.machine_code, one.name)}
                    for one in file.entries
                ],
                "machine_code_problems": file.machine_code.problems,
                "findings": [_finding(one) for one in file.findings],
            }
            for file in files
        ],
    }
    return json.dumps(document, indent=2)


def _entry(one: EntrySummary) -> str:
    parts = [
        counted(one.instructions, "instruction"),
        counted(one.barriers, "barrier"),
        f"{one.shared_bytes} bytes of shared memory" + (" and what the launch adds" * one.has_dynamic_shared),
    ]
    for what, threads in (("requires", one.required_threads), ("at most", one.max_threads)):
        if threads:
            parts.append(f"{what} {'x'.join(map(str, threads))} threads")
    return f"{one.name} (line {one.line}): {', '.join(parts)}"


def _message(one: LintFinding) -> str:
    return f"{one.function}: {one.message}" + (f" ({one.source[0]}:{one.source[1]})" if one.source else "")


def _finding(one: LintFinding) -> dict[str, object]:
    return {
        "id": one.lint.id,
        "severity": one.lint.severity.value,
        "function": one.function,
        "line": one.line,
        "source_file": one.source[0] if one.source else None,
        "source_line": one.source[1] if one.source else None,
        "message": one.message,
        "fix": one.lint.fix,
    }
