"""Tests of tokens that a GPU chooses: they equal the tokens that the references choose.

The tests use whole vocabularies and equal logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbtop.compute.gpu.device import Gpu
from cbtop.compute.kernels.base import floats
from cbtop.compute.kernels.sampling import DRAWN, GREEDY, drawn_reference

pytestmark = pytest.mark.gpu
VOCABULARY = 152_064


def logits(kind: str) -> Any:
    made = 3 * floats(np.random.default_rng(5), 1, VOCABULARY)
    return {
        "spread": made,
        "in steps": np.round(made),  # Round the logits, so that many are equal.
        "all equal": np.zeros_like(made),
        "one far above": np.where(np.arange(VOCABULARY) == 77_777, np.float32(300), made),
        "all below zero": made - 40,
    }[kind]


KINDS = ("spread", "in steps", "all equal", "one far above", "all below zero")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.8, 40, 0.95), (1.0, 0, 1.0), (0.7, 0, 0.9), (1.3, 1000, 1.0), (1.0, 1, 0.5), (1.0, VOCABULARY + 1, 0.5)],
)
def test_what_is_drawn_is_what_the_reference_draws(
    gpu: Gpu, kind: str, temperature: float, top_k: int, top_p: float
) -> None:
    values, out = logits(kind), gpu.zeros(1, np.int64)
    on_gpu, expected = gpu.array(values), np.zeros(1, np.int64)
    position, sequence = gpu.zeros(1, np.int32), gpu.array(np.array([3], np.int32))
    settings = temperature, top_k, top_p, 11
    for number in range(5):
        position.fill(number)
        gpu.run(DRAWN, on_gpu, *settings, position, sequence, out)
        drawn_reference(values, *settings, number, 3, expected)
        assert gpu.host(out)[0] == expected[0]


def test_the_likeliest_is_the_first_of_the_largest(gpu: Gpu) -> None:
    values = np.concatenate([logits(kind) for kind in KINDS])
    values[0, [9, 140_000]] = 50
    values[2, 3] = -0.0
    values[2, :3] = -1
    out = gpu.zeros(len(values), np.int64)
    for _ in range(2):
        gpu.run(GREEDY, gpu.array(values), out)
        np.testing.assert_array_equal(gpu.host(out), values.argmax(axis=1))
