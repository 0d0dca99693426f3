"""Measure the cost of the checks of a user's bricks, next to a call of a Python function that does nothing.

- "Not checked": what checks add to a timed call that is not checked. Checks take at most 1 % of the time, so most
  calls of a short brick are of this kind. No call is checked while this is measured.
- "Counted": a check that does nothing, evaluated and counted.
- A check of 1,024 floats with `Finite`, next to NumPy alone, which is the limit for code in Python.
- A condition of a contract with five conditions, for an array of 4x64 floats.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.base import Figure, Ratio, interleaved_cpu_ns
from cbtop.compute.contracts.own import read_own
from cbtop.compute.own_contracts import KeepsContract
from cbtop.profiler import brick_checks
from cbtop.profiler.brick_checks import BrickChecks
from cbtop.profiler.checks import PASSED, Check, CheckOutcome, Finite
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickId

CALLS, ROUNDS = 2_000, 41
NO_SHARE = 1e-12  # after the first checks, no check is due for years
PYTHON = "a call of a Python function"
CONTRACT = """\
equations: out[t, i] = x[t, i] * weight[i]
arguments: [x, weight, out]
outputs: [out]
reference: benchmarks.checks:scaled
tolerance: 1.0e-5
preconditions:
  finite(x): {x: x / 0}
  finite(weight): {weight: weight / 0}
  size(weight) == columns(x): {weight: "weight[1:]"}
postconditions:
  finite(out): {out: out / 0}
  columns(out) == columns(x): {out: "out[:, 1:]"}
falsification:
  outputs: [scaled by 1.5]
  arguments:
    the weight left out: {weight: 1 + 0 * weight}
cases:
  - {x: [1, 8], weight: [8]}
"""


class NoCheck:
    """A check that does nothing."""

    name = "nothing"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        return PASSED


def scaled(x: Any, weight: Any) -> Any:
    """The reference of CONTRACT."""
    return x * weight


def _nothing(value: object) -> object:
    return value


def run() -> list[Figure]:
    floats = np.random.default_rng(1).standard_normal(1024, np.float32)
    x, weight = floats[:256].reshape(4, 64), floats[:64]
    profiler = BrickProfiler()
    unchecked = profiler.timed(BrickDefinition.of(BrickId.RMS_NORM))(_nothing)
    checked = profiler.timed(BrickDefinition.of(BrickId.RMS_NORM, checks=(Finite(),)))(_nothing)
    with patch.object(brick_checks, "SHARE", NO_SHARE):
        for _ in range(brick_checks.FIRST):
            checked(floats)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scaled.yaml"
        path.write_text(CONTRACT, encoding="utf-8")
        contract = read_own(path)
    taken = interleaved_cpu_ns(
        {
            PYTHON: lambda: _nothing(floats),
            "unchecked": lambda: unchecked(floats),
            "checked": lambda: checked(floats),
            "counted": _evaluating(NoCheck(), floats),
            "finite": _evaluating(Finite(), floats),
            "NumPy": lambda: np.isfinite(floats).all(),
            "contract": _evaluating(KeepsContract(contract), x * weight, x, weight),
        },
        CALLS,
        ROUNDS,
    )
    added = [max(0.0, on - off) for on, off in zip(taken["checked"], taken["unchecked"], strict=True)]
    conditions = len(contract.conditions)
    return [
        Figure(PYTHON, statistics.median(taken[PYTHON]), "ns"),
        _figure("a timed call, not checked: added by checks", added, PYTHON, taken),
        _figure("a check that does nothing, counted", taken["counted"], PYTHON, taken),
        _figure("Finite of 1,024 floats, evaluated and counted", taken["finite"], "NumPy", taken),
        _figure(
            f"one of {conditions} conditions of a contract, evaluated and counted",
            [one / conditions for one in taken["contract"]],
            PYTHON,
            taken,
        ),
    ]


def _figure(what: str, found: list[float], peer: str, taken: dict[str, list[float]]) -> Figure:
    return Figure(what, statistics.median(found), "ns", peer, Ratio.of(found, taken[peer]))


def _evaluating(check: Check, output: Any, *args: Any) -> Callable[[], None]:
    definition = BrickDefinition.of(BrickId.RMS_NORM, checks=(check,))
    checks = BrickChecks(lambda _: None)
    return lambda: checks.evaluate(definition, output, args, {})
