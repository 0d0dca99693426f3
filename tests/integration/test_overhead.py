"""Test of `cbtop overhead` with real measurements: it reports the results, and what it compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.commands import overhead
from cbtop.compute.demo_model import TINY, write_model
from tests.integration.hosts import cbtop


def test_every_mode_is_measured_beside_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("BRICKS_A_ROUND", 200), ("ROUNDS", 3), ("STEPS_A_TURN", 1), ("TURNS", 2)):
        monkeypatch.setattr(overhead, name, few)
    write_model(tmp_path / "tiny.gguf", TINY, lambda *_: None)
    done = cbtop("overhead", "--model", str(tmp_path / "tiny.gguf"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "cbtop.overhead/2"
    assert found["recorder"] in ("compiled", "python")
    costs = {cost["mode"]: cost for cost in found["costs"]}
    modes = ["immediate", "per_layer", "deferred", "none"]
    assert list(costs) == ["two clock reads", "disabled", "plain step", "host clock", *modes]
    assert all(isinstance(cost["ns_per_brick"]["median"], float) for cost in costs.values())
    assert costs["two clock reads"]["step_us"] is None
    assert all(costs[mode]["step_us"]["median"] > 0 for mode in list(costs)[1:])
