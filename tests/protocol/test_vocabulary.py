"""Tests of the vocabulary: the fifteen bricks and their categories have the numbers of cbtop's predecessor."""

from __future__ import annotations

import pytest

from cbtop.protocol.vocabulary import TRAIN, WARM_UP, BrickCategory, BrickId, is_training, shows_training

EXPECTED = [
    ("RmsNorm", "Norm"),
    ("LayerNorm", "Norm"),
    ("QkvProjection", "Attention"),
    ("RopeEmbedding", "Attention"),
    ("AttentionScore", "Attention"),
    ("AttentionSoftmax", "Attention"),
    ("AttentionOutput", "Attention"),
    ("OutputProjection", "Attention"),
    ("GateProjection", "FFN"),
    ("UpProjection", "FFN"),
    ("Activation", "FFN"),
    ("DownProjection", "FFN"),
    ("Embedding", "Other"),
    ("LmHead", "Other"),
    ("Sampling", "Other"),
]


def test_the_bricks_stand_in_index_order_with_their_categories() -> None:
    assert [(brick.display_name, brick.category.display_name) for brick in BrickId] == EXPECTED
    assert [int(brick) for brick in BrickId] == list(range(15))
    names = [category.display_name for category in BrickCategory]
    assert names == ["Norm", "Attention", "FFN", "Other", "Communication"]


@pytest.mark.parametrize("brick", BrickId)
def test_every_brick_is_found_by_its_name(brick: BrickId) -> None:
    assert BrickId.from_name(brick.display_name) is brick


@pytest.mark.parametrize(
    ("alias", "brick"),
    [("Qkv", BrickId.QKV_PROJECTION), ("RoPE", BrickId.ROPE_EMBEDDING), ("SiLU", BrickId.ACTIVATION)],
)
def test_the_usual_aliases_are_known(alias: str, brick: BrickId) -> None:
    assert BrickId.from_name(alias) is brick


def test_an_unknown_brick_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no brick is called 'Conv'.*RmsNorm.*Sampling"):
        BrickId.from_name("Conv")


@pytest.mark.parametrize("phase", [TRAIN, TRAIN + WARM_UP, f"{TRAIN} Adam 2", f"{TRAIN} Adam 2{WARM_UP}"])
def test_a_training_step_is_known_by_its_name(phase: str) -> None:
    assert is_training(phase)
    assert not is_training(f"encode {phase}")
    assert not is_training("trainer")
    assert shows_training(phase)
    assert shows_training(f"Net 2 {phase}")
    assert not shows_training("Net 2 trainer")
