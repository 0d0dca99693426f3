"""Tests of finding the module of a brick in one layer that differs from those of the other layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.attributes import NO_MODULE, ModuleAttributes
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.graph import GraphRow
from cbtop.viewmodels.odd_modules import OddModule, odd_module
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.verdicts.odd_layer import ODD_LAYER
from tests.cbtop.viewmodels.verdicts.cases import CAUSES

USUAL = ModuleAttributes(
    module_class="torch.nn.Linear", module_source="linear.py:9", weight_shape="4x8", weight_dtype="float32"
)
BRICK = "DownProjection"


def graph_of(path: Path, odd: ModuleAttributes, usual: ModuleAttributes = USUAL) -> tuple[Sequence[GraphRow], int]:
    """Return a graph and the id of its layer 5. This layer has the module `odd`, and all others have `usual`."""
    path.mkdir(exist_ok=True)
    graph = CAUSES["odd-layer"](path).graph
    (layer,) = [row.id for row in graph if row.kind is NodeKind.LAYER and row.name == "5"]
    return tuple(
        replace(row, node_label="down_proj", module=odd if row.parent == layer else usual)
        if row.name == BRICK
        else row
        for row in graph
    ), layer


QUANTIZED = replace(USUAL, module_class="Quantized", module_source="slow.py:10")


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (QUANTIZED, "; its `down_proj` is `Quantized`, slow.py:10; the others are `torch.nn.Linear`"),
        (
            replace(USUAL, weight_dtype="float64"),
            "; the weight of its `down_proj` is float64; those of the others are float32",
        ),
        (replace(USUAL, weight_shape="9x9"), "; the weight of its `down_proj` is 9x9; those of the others are 4x8"),
        (replace(USUAL, module_source="other.py:1"), "; its `down_proj` runs other.py:1; the others run linear.py:9"),
        (USUAL, ""),
        (NO_MODULE, ""),
    ],
)
def test_the_verdict_on_an_odd_layer_names_what_differs_in_it(
    odd: ModuleAttributes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    view = CAUSES["odd-layer"](tmp_path / "a")
    before, after = (
        ODD_LAYER.find(with_parts(view, graph=graph)) for graph in (view.graph, graph_of(tmp_path / "b", odd)[0])
    )
    assert before is not None
    assert after is not None
    assert after.sentence == before.sentence + said


def test_the_odd_module_has_its_label_and_the_usual_one(tmp_path: Path) -> None:
    graph, layer = graph_of(tmp_path, QUANTIZED)
    assert odd_module(graph, BRICK, layer) == OddModule("down_proj", QUANTIZED, USUAL)
    assert odd_module(graph, "AnotherBrick", layer) is None
    other = next(row.id for row in graph if row.kind is NodeKind.LAYER and row.id != layer)
    assert odd_module(graph, BRICK, other) is None


def test_no_module_is_odd_if_the_others_are_not_alike(tmp_path: Path) -> None:
    graph, layer = graph_of(tmp_path, QUANTIZED)
    mixed = tuple(
        replace(row, module=replace(USUAL, weight_shape=str(row.id))) if row.module == USUAL else row for row in graph
    )
    assert odd_module(mixed, BRICK, layer) is None
