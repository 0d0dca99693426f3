"""The lints, in the order in which their findings are shown."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Finding, Lint, Severity
from cbtop.profiler.analysis.ptx.model import Module

LINTS: tuple[Lint, ...] = ()


def findings(module: Module, severities: Sequence[Severity] = tuple(Severity)) -> list[Finding]:
    """Return the findings of these severities in all functions of a module, by line."""
    found = []
    for function in module.functions:
        if function.is_declaration:
            continue
        analysis = FunctionAnalysis(module, function)
        for lint in LINTS:
            if lint.severity in severities:
                for index, message in lint.find(analysis):
                    line, source = analysis.place_of(index)
                    found.append(Finding(lint, function.name, line, source, message))
    return sorted(found, key=lambda one: one.line)
