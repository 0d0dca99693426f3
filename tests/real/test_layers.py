"""Tests with pairs of programs under `cbtop run`, with and without a slow layer.

The slow layer is named. If all layers are equal, none is named.
"""

from __future__ import annotations

import pytest

from tests.real.programs import Run

pytest.importorskip("torch", reason="torch is not installed: make torch")


@pytest.mark.slow  # test_verdicts.py tests the rule
@pytest.mark.parametrize(
    ("script", "layer", "bricks"),
    [
        ("odd_layer", 5, {"UpProjection", "DownProjection"}),
        pytest.param("shared_core", 3, {"UpProjection", "DownProjection"}, marks=pytest.mark.slow),
        pytest.param("heavy_first_layer", 4, {"UpProjection", "DownProjection"}, marks=pytest.mark.slow),
        pytest.param("unet", 6, {"Conv2d"}, marks=pytest.mark.slow),
        pytest.param("vit", 4, {"UpProjection", "DownProjection"}, marks=pytest.mark.slow),
        pytest.param("trailing_dropout", 3, {"Dropout"}, marks=pytest.mark.slow),
    ],
)
def test_a_slow_layer_is_named_and_layers_that_are_alike_are_not(
    run: Run, script: str, layer: int, bricks: set[str]
) -> None:
    if script == "vit":
        pytest.importorskip("transformers", reason="transformers is not installed")
    faulty, healthy = run.faulty(script, "odd-layer"), run.healthy(script)
    assert "odd-layer" in faulty.verdicts
    assert faulty.verdicts["odd-layer"].about.name == f"Layer {layer}"
    (named,) = [each.name for each in faulty.verdicts["odd-layer"].evidence if each.name.startswith("more in ")]
    assert named.removeprefix("more in ") in bricks
    assert faulty.warnings == {"odd-layer"}
    assert not healthy.warnings
    if script in ("unet", "vit"):  # These models read images, and no tokens are known.
        for outcome in (faulty, healthy):
            assert outcome.view.steps is not None
            assert outcome.view.steps.known_tokens is None
            assert outcome.view.steps.samples_per_sec
