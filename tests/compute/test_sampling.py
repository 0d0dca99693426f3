"""Tests of sampled tokens: a seed and a position give the same token everywhere, with the right probabilities."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.compute.decoder.base import Model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.philox import philox, uniform
from cbtop.compute.kernels.sampling import drawn, drawn_launches, drawn_reference
from cbtop.compute.settings import DecoderSettings, TokenSampling
from cbtop.profiler.profiler import BrickProfiler

from .conftest import of_each_kind

PROMPT = [3, 141, 59]
ALL_ONES = 0xFFFFFFFF
# Known results of the random number generator Philox4x32-10: counter, key, output (Random123, kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def choice(logits: np.ndarray, *settings: float) -> int:
    out = np.full(1, -1, np.int64)
    drawn(logits[None], *settings, out)
    return int(out[0])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(map(int, philox(*map(np.uint64, (*counter, *key))))) == expected


def test_uniform_numbers_are_spread_evenly_and_seeds_are_uncorrelated() -> None:
    numbers = np.array(
        [[uniform(np.uint64(position), np.uint64(0), np.uint64(seed)) for position in range(2000)] for seed in (0, 1)]
    )
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts = np.histogram(numbers[0], 20, (0, 1))[0]
    # This is chi-squared with 19 degrees of freedom. Only 0.1 % of fair samples exceed 44.
    assert ((counts - 100) ** 2 / 100).sum() < 44
    assert abs(np.corrcoef(numbers[0], numbers[1])[0, 1]) < 0.1
    assert abs(np.corrcoef(numbers[0, :-1], numbers[0, 1:])[0, 1]) < 0.1


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=400),
    temperature=st.floats(0.05, 5),
    top_k=st.one_of(st.integers(0, 30), st.integers(250, 500)),
    top_p=st.floats(0.01, 1),
    position=st.integers(0, 1 << 40),
)
def test_any_logits_and_settings_draw_what_the_reference_draws(
    logits: list[float], temperature: float, top_k: int, top_p: float, position: int
) -> None:
    values = np.array([logits], np.float32)
    expected = np.zeros(1, np.int64)
    drawn_reference(values, temperature, top_k, top_p, 5, position, 1, expected)
    assert choice(values[0], temperature, top_k, top_p, 5, position, 1) == expected[0]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    probabilities = np.array([0.5, 0.1, 0.3, 0.1])
    logits = np.log(probabilities).astype(np.float32)
    draws = Counter(choice(logits, 1.0, 0, 1.0, 11, position, 0) for position in range(4000))
    expected = 4000 * probabilities
    # This is chi-squared with 3 degrees of freedom. Only 0.1 % of fair samples exceed 16.3.
    assert sum((draws[token] - n) ** 2 / n for token, n in enumerate(expected)) < 16.3
    only_two = Counter(choice(logits, 1.0, 2, 1.0, 11, position, 0) for position in range(400))
    assert set(only_two) == {0, 2}
    assert set(Counter(choice(logits, 1.0, 0, 0.75, 11, position, 0) for position in range(400))) == {0, 2}
    assert {choice(logits, 0.01, 0, 1.0, 11, position, 0) for position in range(400)} == {0}


@of_each_kind
def test_a_seed_draws_the_same_tokens_again_and_another_others(model: Model, profiler: BrickProfiler) -> None:
    def tokens(sampling: TokenSampling, threads: int = 1) -> list[int]:
        decoder = Decoder(model, "numba", threads, profiler, model.context_length, DecoderSettings(sampling=sampling))
        sequence = [decoder.prefill(PROMPT)]
        for _ in range(12):
            sequence.append(decoder.decode(sequence[-1]))
        return sequence

    # The temperature is high because Gemma gives the previous token a much larger logit than all others.
    warm = TokenSampling(temperature=20, top_k=0, top_p=1.0, seed=3)
    assert tokens(warm) == tokens(warm) == tokens(warm, threads=2)
    assert tokens(warm) != tokens(TokenSampling(temperature=20, top_k=0, top_p=1.0, seed=4))
    # A temperature of 1e-6 must choose the token with the largest logit. On processors without VNNI, two logits
    # differ by less than 2e-4.
    assert tokens(TokenSampling(temperature=1e-6)) == tokens(TokenSampling())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": -1.0}, {"temperature": 1e-310},
        {"top_k": -1},
        {"top_k": 1 << 63}, {"top_k": 2.5}, {"seed": 1.5},
        {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": float("nan")}, {"seed": -1}, {"seed": 1 << 64},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_draw_nothing_sensible_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ComputeError, match=f"^{next(iter(wrong))} is "):
        TokenSampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("top_k", "top_p", "searches"),
    [(40, 0.9, 2), (0, 0.9, 1), (40, 1.0, 1), (0, 1.0, 0), (400, 1.0, 0)],
)
def test_on_a_gpu_only_what_leaves_tokens_out_is_searched_for(top_k: int, top_p: float, searches: int) -> None:
    logits, place = np.zeros((1, 400), np.float32), np.zeros(1, np.int32)
    entries = [one.entry for one in drawn_launches(logits, 1.0, top_k, top_p, 1, place, place, np.zeros(1, np.int64))]
    assert entries == ["find_logits_range", "weigh_logits", *["find_last"] * searches, "draw"]
