"""Measure parsing and linting PTX, compared with finding its instructions by one regular expression.

The text is a matmul that Triton compiled, repeated under other names, about a megabyte. The peer finds the opcode and
the operands of each instruction. Any reader in Python must do at least that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from cbtop.profiler.analysis.ptx.control_flow import ControlFlow
from cbtop.profiler.analysis.ptx.lints import findings
from cbtop.profiler.analysis.ptx.parser import parse

KERNEL = Path(__file__).parents[1] / "tests" / "profiler" / "analysis" / "ptx" / "clean" / "triton_matmul.ptx"
MEGABYTE = 1_000_000
ROUNDS = 9
INSTRUCTION = re.compile(r"^\s*(?:@!?\S+\s+)?([a-z][\w.:]*)\s*([^;\n]*);", re.MULTILINE)


def run() -> list[Figure]:
    text = _megabyte()
    calls: dict[str, Callable[[], object]] = {
        "parsed": lambda: [ControlFlow(one).post_dominators for one in parse(text).entries],
        "linted": lambda: findings(parse(text)),
        "peer": lambda: INSTRUCTION.findall(text),
    }
    found = interleaved_cpu_ns(calls, 1, ROUNDS)
    return [
        Figure(what, min(found[name]) / 1e6, "ms", "one regular expression", Ratio.of(found[name], found["peer"]))
        for name, what in (("parsed", "1 MB parsed, control flow"), ("linted", "1 MB parsed, all lints"))
    ]


def _megabyte() -> str:
    """Return a PTX module that contains the kernel many times under different names."""
    head, begin, body = KERNEL.read_text().partition(".visible .entry ")
    name = body.partition("(")[0]
    count = MEGABYTE // len(body)
    return head + "\n".join(begin + body.replace(f"{name}(", f"{name}_{number}(") for number in range(count))
