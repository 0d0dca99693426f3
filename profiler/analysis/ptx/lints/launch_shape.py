"""Lint: a launch with a block size that the entry (kernel) does not allow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the entry if its directives do not allow the launch's block size. Yields nothing without a known
    launch.
    """
    if analysis.launch is None or not analysis.function.is_entry:
        return
    block = (*analysis.launch, 1, 1)[:3]
    given = "x".join(map(str, block))
    limits = analysis.function.limits
    required, most = limits.get("reqntid"), limits.get("maxntid")
    if required and (*required, 1, 1)[:3] != block:
        yield Problem(None, f"the launch has blocks of {given} threads, but .reqntid requires {_text(required)}")
    if most and math.prod(block) > math.prod(most):
        yield Problem(None, f"the launch has blocks of {given} threads, but .maxntid allows {_text(most)}")


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


LAUNCH_SHAPE = Lint(
    "launch-shape", LintSeverity.CORRECTNESS,
    "The block size of a launch is not one that .reqntid or .maxntid allows, so the launch fails.",
    "launch with the required block size, or compile the kernel for the one that is launched", _find,
)  # fmt: skip
