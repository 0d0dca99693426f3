"""Tests with pairs of programs that have different contents of steps: `cbtop check` reports the difference.

Three steps are enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands.run import EVERY_STEP
from tests.real.programs import Outcome, Run

pytest.importorskip("torch", reason="torch is not installed: make torch")


def verdicts(new: Outcome, base: Outcome, *thresholds: str, code: int, to: Path) -> list[dict[str, Any]]:
    """Run `cbtop check` on two runs and check that it ends with `code`. Returns its verdicts."""
    words = ["check", "--baseline", str(base.file), *thresholds, "--new", str(new.file), "--format", f"json={to}"]
    assert main(words) == code
    found: list[dict[str, Any]] = json.loads(to.read_text())["verdicts"]
    return found


def test_a_copy_a_type_and_a_lost_fusion_are_named_after_three_steps(run: Run, tmp_path: Path) -> None:
    healthy, faulty = (run("other_contents", kind, EVERY_STEP) for kind in ("healthy", "faulty"))
    to = tmp_path / "check.json"
    (equal, few) = verdicts(healthy, healthy, "graph==base", "forward.bricks==29", code=0, to=to)
    assert (equal["outcome"], few["outcome"]) == ("holds", "holds")
    assert equal["said"] == "4 layers, 29 bricks, 53 operations are equal"
    found = {one["said"]: one["guilty"] for one in verdicts(faulty, healthy, "graph==base", code=4, to=to)}
    assert found["Layer 1: one more operation clone"] == "Layer 1"
    assert found["Layer 2 › DownProjection: float32 → bfloat16"] == "Layer 2 › DownProjection"
    assert found["Layer 3 › Attention (fused): gone"] == "Layer 3 › Attention (fused)"
    assert any(said.startswith("Layer 3: ") and "_softmax" in said for said in found)
    assert {guilty.partition(" › ")[0] for guilty in found.values()} == {"Layer 1", "Layer 2", "Layer 3"}
    unknown = verdicts(healthy, healthy, "transfers.h2d==0", "allocations<=9", "launches>=0", code=5, to=to)
    # A process without a GPU reports no transfers, no allocations and no launches.
    assert {one["outcome"] for one in unknown} == {"unknown"}


@pytest.mark.slow
def test_a_graph_break_and_a_recompilation_are_counted_and_placed(run: Run, tmp_path: Path) -> None:
    healthy, faulty = (run("graph_break", kind, EVERY_STEP) for kind in ("healthy", "faulty"))
    thresholds = ("graph_breaks==0", "recompilations==0")
    assert verdicts(healthy, healthy, *thresholds, code=0, to=tmp_path / "check.json")
    breaks, again = verdicts(faulty, healthy, *thresholds, code=4, to=tmp_path / "check.json")
    assert (breaks["outcome"], breaks["guilty"], again["outcome"]) == ("broken", "Layer 0", "broken")
    assert "graph_break" in breaks["said"]
    assert again["said"].endswith(", was 0")
