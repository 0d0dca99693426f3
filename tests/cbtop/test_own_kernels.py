"""Tests with a recording of our own kernels on an H100 (h100_own_kernels.py).

Times add up, and every kernel belongs to a brick.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECORDING = Path(__file__).parent / "h100_own_kernels.cbtop"
LAYERS, KERNELS = 28, 313  # the model has 28 layers; for one token, 313 kernels run
# The norm of a layer includes the addition before it, so the last layer has one more brick: its own addition.
BRICKS_OF_LAYER = 9


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    """Return the process in the JSON output of a replay."""
    replay = "-m", "cbtop", "replay", str(RECORDING), "--headless", "--format", "json", "--view", "all"
    said = json.loads(subprocess.run([sys.executable, *replay], capture_output=True, text=True, check=True).stdout)
    (found,) = [one for one in said["sources"] if one["model"] == "random 7B"]
    return found  # type: ignore[no-any-return]


def inside(source: dict[str, Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in source["graph"] if one["parent"] == node["id"]]


@pytest.mark.slow
def test_every_launch_stands_under_its_brick_with_how_it_was_launched(source: dict[str, Any]) -> None:
    graph = source["graph"]
    layers = [one for one in graph if one["kind"] == "layer"]
    assert len(layers) == LAYERS
    assert [len(inside(source, layer)) for layer in layers] == [
        *[BRICKS_OF_LAYER] * (LAYERS - 1),
        BRICKS_OF_LAYER + 1,
    ]
    kernels = [one for one in graph if one["kind"] == "kernel"]
    bricks = {one["id"] for one in graph if one["kind"] == "brick"}
    assert all(one["parent"] in bricks for one in kernels)
    assert all(one["ptx_hash"] and one["registers"] and one["occupancy_percent"] for one in kernels)
    assert all(one["grid"] and one["block"] for one in kernels)
    transfers = [one["name"] for one in graph if one["kind"] == "transfer"]
    assert transfers == ["host → device", "device → host"]
    assert len(kernels) == KERNELS


def test_launches_are_no_longer_than_their_brick_and_bricks_than_their_layer(source: dict[str, Any]) -> None:
    for node in source["graph"]:
        if node["kind"] in ("layer", "brick"):
            parts = sum(one["total_inclusive_us"] for one in inside(source, node))
            assert 0 < parts <= 1.000001 * node["total_inclusive_us"], node["name"]


def test_bricks_gaps_and_what_is_of_neither_add_up_to_the_steps(source: dict[str, Any]) -> None:
    books = source["books"]
    parts = books["bricks_us"] + books["gaps_us"] + books["unattributed_us"]
    assert books["close"]
    assert parts == pytest.approx(books["wall_us"], rel=1e-6)
