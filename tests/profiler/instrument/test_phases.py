"""What a call is by its arguments, where it is told where its new tokens stand."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.phases import describe  # noqa: E402


@pytest.mark.parametrize(
    ("shape", "given", "wanted"),
    [
        ((2, 5), 0, ("prefill", 10, 2, 0)),
        ((2, 1), 5, ("decode", 2, 2, 5)),
        ((2, 4), [5, 0], ("mixed", 8, 2, None)),
        ((2, 4), [0, 5], ("mixed", 8, 2, None)),
        ((2, 4), [5, 5], ("extend", 8, 2, 5)),
        ((2, 4), [5, 6], ("extend", 8, 2, None)),
        ((2, 1), [5, 6], ("decode", 2, 2, None)),
        ((2, 1), [9, 9], ("decode", 2, 2, 9)),
        ((1, 3), [5, 6, 7], ("extend", 3, 1, 5)),
        ((3, 3), [0, 1, 2], ("prefill", 9, 3, 0)),
        ((2, 2), [[0, 1], [4, 5]], ("mixed", 4, 2, None)),
        ((2, 3), [[0, 0, 1], [0, 1, 2]], ("prefill", 6, 2, 0)),
        ((5,), [0, 1, 2, 3, 4], ("prefill", 5, 1, 0)),
        ((4,), [7, 3, 9, 2], ("extend", 4, 0, None)),
        ((4,), [0, 1, 2, 7], ("mixed", 4, 0, None)),
        ((1, 4), [9, 9, 10, 10], ("extend", 4, 1, None)),
        ((2, 4), [[], []], ("prefill", 8, 2, None)),
        ((2, 4), [], ("prefill", 8, 2, None)),
        ((2, 4), [-1, 0], ("prefill", 8, 2, None)),
    ],
)
def test_of_sequences_that_begin_at_different_positions_none_is_told_for_all(
    shape: tuple[int, ...], given: Any, wanted: tuple[object, ...]
) -> None:
    tokens = torch.ones(shape, dtype=torch.long)
    stand = torch.tensor(given, dtype=torch.long)
    assert describe((), {"tokens": tokens, "input_pos": stand}, has_cache=True) == wanted
    if stand.dim() == 1:
        assert describe((), {"tokens": tokens, "input_pos": given}, has_cache=True) == wanted


def test_several_tokens_for_a_cache_whose_length_a_device_knows_are_taken_for_a_prompt() -> None:
    class Layer:
        is_initialized = True  # as of a static cache that was used and emptied

        def get_seq_length(self) -> Any:
            return torch.zeros((), dtype=torch.long, device="meta")

    class Cache(Layer):
        def __init__(self) -> None:
            self.layers = [Layer()]

    for length, wanted in ((6, "prefill"), (1, "decode")):
        tokens = torch.ones((2, length), dtype=torch.long)
        assert describe((), {"input_ids": tokens, "past_key_values": Cache()}, has_cache=True) == (
            wanted, 2 * length, 2, None,
        )  # fmt: skip
