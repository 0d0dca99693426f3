"""Tests of the phase of a call (prefill or decode).

The phase follows from the arguments if the arguments contain positions.
"""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.model_call import ModelCall  # noqa: E402
from cbtop.profiler.instrument.model_traits import axis_of_sequences  # noqa: E402
from cbtop.profiler.instrument.phases import describe, describe_captured  # noqa: E402


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


def test_several_tokens_are_a_prompt_if_only_a_device_knows_the_cache_length() -> None:
    class Layer:
        is_initialized = True  # A static cache that was used and then emptied has these attributes.

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


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("input_ids", (2, 7), (14, 2)),
        ("inputs_embeds", (2, 7, 32), (14, 2)),
        ("input_features", (2, 80, 3000), (0, 2)),  # a batch of two spectrograms with 80 bins and 3,000 frames
        ("pixel_values", (2, 3, 224, 224), (0, 2)),
        # The first dimension counts patches of all images, so the number of images is unknown.
        ("pixel_values", (64, 1176), (0, 0)),
        ("src", (7, 2, 32), (0, 0)),  # The tokens may be in the first or the second dimension.
        ("src", (7, 32), (0, 0)),
        ("src", (2, 3, 32, 32), (0, 2)),
    ],
)
def test_tokens_are_known_for_ids_and_embeddings_and_sequences_if_named(
    name: str, shape: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    given = torch.zeros(shape, dtype=torch.long if name == "input_ids" else torch.float)
    for describe_it in (describe, describe_captured):
        for args, kwargs in (((), {name: given}), *([((given,), {})] if name == "src" else [])):
            call = describe_it(args, kwargs, has_cache=False)
            assert (call.tokens, call.sequences) == wanted


@pytest.mark.parametrize(("axis", "sequences"), [(None, 0), (0, 7), (1, 2)])
def test_the_axis_of_sequences_is_the_one_that_a_model_says(axis: int | None, sequences: int) -> None:
    embedded, ids = torch.zeros(7, 2, 32), torch.zeros(7, 2, dtype=torch.long)
    for describe_it in (describe, describe_captured):
        assert describe_it((embedded,), {}, has_cache=False, axis=axis)[1:3] == (0, sequences)
        assert describe_it((ids,), {}, has_cache=False, axis=axis)[1:3] == (14, sequences)
        assert describe_it((), {"input_ids": ids}, has_cache=False, axis=axis)[1:3] == (14, 7)


def test_rows_of_features_are_sequences_if_all_tensors_have_as_many_rows() -> None:
    rows, edges = torch.zeros(7, 32), torch.zeros(2, 20, dtype=torch.long)
    for describe_it in (describe, describe_captured):
        assert describe_it((rows, torch.zeros(7)), {}, has_cache=False, axis=0)[1:3] == (0, 7)
        assert describe_it((rows, edges), {}, has_cache=False, axis=0)[1:3] == (0, 0)
        assert describe_it((rows,), {}, has_cache=False)[1:3] == (0, 0)


@pytest.mark.parametrize("rows", [(6, 32), (6, 9, 32), (6, 4, 8, 8)], ids=["features", "patches", "pictures"])
@pytest.mark.parametrize("time", [torch.tensor(0.5), torch.zeros(6), torch.zeros(1), torch.tensor(3)], ids=str)
def test_a_denoiser_has_as_many_sequences_as_rows_wherever_its_time_is(
    rows: tuple[int, ...], time: torch.Tensor
) -> None:
    latents, labels = torch.zeros(rows), torch.zeros(6, dtype=torch.long)
    is_known = len(rows) > 2 or time.numel() != 1 or not time.dim()
    for args in ((time, latents, labels), (latents, time, labels)):
        call = describe(args, {}, has_cache=False, axis=0, takes_ids=False)
        assert (call.tokens, call.sequences) == (0, 6 if is_known else 0)
    after = describe((latents, time, labels), {}, has_cache=False, axis=0)  # it has an embedding of labels
    assert (after.tokens, after.sequences) == (0, 6 if is_known else 0)


def test_one_token_before_a_hidden_state_is_a_token() -> None:
    hidden = torch.zeros(1, 1, 32)
    for token in (torch.tensor(3), torch.tensor([3])):
        call = describe((token, hidden), {}, has_cache=False, axis=0)
        assert (call.tokens, call.sequences) == (1, 1)


@pytest.mark.parametrize(("batch_first", "axis"), [(None, 0), (True, 0), (False, None)])
def test_the_first_axis_has_the_sequences_unless_a_module_inside_differs(
    batch_first: bool | None, axis: int | None
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(4, 4) if batch_first is None else torch.nn.GRU(4, 4, batch_first=batch_first)

    assert axis_of_sequences(Model()) == axis


def test_a_call_that_nothing_names_is_a_forward_and_an_encoders_an_encode() -> None:
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

        def forward(self, ids: Any) -> Any:
            return ids

    class Encoder(Decoder):
        pass

    class Attention(torch.nn.Module):
        is_causal = False

    both_ways = Decoder()
    both_ways.attention = Attention()
    ids = torch.ones((2, 5), dtype=torch.long)
    steps: Any = None
    for model, phase in ((Decoder(), "forward"), (Encoder(), "encode"), (both_ways, "encode")):
        call = ModelCall(model, steps)
        assert call.describe((ids,), {}, None).phase == phase
        assert call.describe_captured((ids,), {}).phase == phase
