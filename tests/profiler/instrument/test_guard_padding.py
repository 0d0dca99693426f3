"""Tests of padding masks: the guard ignores padding only in tensors that the mask surely belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach, guard, uninstall  # noqa: E402
from cbtop.profiler.instrument.guard_padding import Hiding, hidings, kept_in, mask_in, tokens_of  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.guard_messages import FAULTY, GuardedSteps, GuardFault  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip

KEPT = torch.tensor([[False, True, True], [True, True, True]])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(guard, "ANNOUNCE_NS", 0)
    torch.manual_seed(2)
    yield Memory()
    uninstall()


def fault_of_call(model: Any, memory: Memory, *args: Any, **kwargs: Any) -> GuardFault | None:
    attach(model, BrickProfiler(recorder=memory), guard="log")
    with torch.no_grad():
        model(*args, **kwargs)
    return [said for said in memory.said if isinstance(said, GuardedSteps)][-1].fault


def spoil(module: Any, *place: Any) -> None:
    """Make `module` return NaN at the index `place` from now on."""

    def hook(_: Any, args: Any, result: Any) -> Any:
        result = result.clone()
        result[place] = math.nan
        return result

    module.register_forward_hook(hook)


def translator() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make torch")
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    config = transformers.BartConfig(vocab_size=60, d_model=32, max_position_embeddings=32, pad_token_id=1, **sizes)
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("tokens", [4, 10], ids=["fewer tokens", "as many tokens"])
def test_the_mask_of_an_encoder_hides_nothing_of_a_decoder(memory: Memory, tokens: int) -> None:
    model, mask = translator(), torch.ones(2, 10, dtype=torch.int64)
    mask[1, 5:] = 0
    spoil(model.model.decoder.layers[0].fc2, 1, slice(max(0, tokens - 5), tokens))
    ids, decoded = torch.randint(4, 60, (2, 10)), torch.randint(4, 60, (2, tokens))
    found = fault_of_call(model, memory, input_ids=ids, attention_mask=mask, decoder_input_ids=decoded)
    assert found is not None
    assert found.module == "model.decoder.layers.0.fc2"


def test_the_mask_of_an_encoder_hides_its_own_padding(memory: Memory) -> None:
    model, mask = translator(), torch.ones(2, 10, dtype=torch.int64)
    mask[1, 5:] = 0
    layer = model.model.encoder.layers[1]
    spoil(layer.fc1, 1, slice(5, 10))
    layer.fc2.register_forward_pre_hook(lambda _, args: (torch.nan_to_num(args[0]),))
    ids = torch.randint(4, 60, (2, 10))
    assert fault_of_call(model, memory, input_ids=ids, attention_mask=mask, decoder_input_ids=ids) is None


@pytest.mark.parametrize("hidden", [32, 8], ids=["wide", "as wide as tokens"])
def test_channels_of_a_convolution_are_no_padding(memory: Memory, hidden: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, hidden), nn.Linear(8, 5)
            self.convolution = nn.Conv1d(hidden, 8, 3, padding=1)

        def forward(self, ids: Any, attention_mask: Any = None) -> Any:
            return self.head(self.convolution(self.embedding(ids).transpose(1, 2)).mean(-1))

    model, mask = Model(), torch.ones(2, 8, dtype=torch.int64)
    mask[:, 5:] = 0
    spoil(model.convolution, slice(None), 6)
    found = fault_of_call(model, memory, torch.randint(0, 50, (2, 8)), attention_mask=mask)
    assert found is not None
    assert found.module == "convolution"


def test_a_token_of_a_model_with_tokens_first_is_not_hidden(memory: Memory) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0)
            self.embedding = nn.Embedding(50, 32)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids: Any, src_key_padding_mask: Any = None) -> Any:
            return self.encoder(self.embedding(ids), src_key_padding_mask=src_key_padding_mask)

    model, mask = Model(), torch.zeros(6, 6, dtype=torch.bool)
    mask[0, 1:] = True  # The first sequence consists of one token and padding.
    # The NaN is in the first token of another sequence, which is no padding.
    spoil(model.encoder.layers[1].linear2, 0, 3)
    found = fault_of_call(model, memory, torch.randint(0, 50, (6, 6)), src_key_padding_mask=mask)
    assert found is not None
    assert found.module == "encoder.layers.1.linear2"


def test_an_input_with_a_fault_in_its_padding_is_not_called_finite(memory: Memory) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.up(x + x.mean(1, keepdim=True))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = nn.Embedding(50, 16), nn.ModuleList([Mean(), Mean()])

        def forward(self, ids: Any, attention_mask: Any = None) -> Any:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    model, mask, ids = Model(), torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    mask[1, 4:], ids[1, 6] = 0, 7
    with torch.no_grad():
        model.embedding.weight[7] = math.nan
    found = fault_of_call(model, memory, ids, attention_mask=mask)
    assert found is not None
    assert (found.module, found.given, found.inside) == ("layers.0.up", FAULTY, "")


def test_a_padding_mask_is_found_in_the_ways_of_transformers_and_torch() -> None:
    tokens = KEPT.long()
    for found in (
        tokens_of(mask_in((), (), {"attention_mask": tokens})),
        tokens_of(mask_in(("ids", "attention_mask"), (None, tokens), {})),
        tokens_of(mask_in((), (), {"src_key_padding_mask": ~KEPT, "tgt_key_padding_mask": KEPT})),
    ):
        assert found is not None
        assert torch.equal(found, KEPT)
    for none in (
        # This mask has floats that are added to attention scores, so it shows no padding.
        {"attention_mask": torch.ones(2, 3)},
        {"attention_mask": KEPT[0].long()},
        {"attention_mask": torch.ones(2, 3, dtype=torch.int64)},
        {"mask": tokens},
        {"tgt_key_padding_mask": ~KEPT},
        {},
    ):
        assert tokens_of(mask_in((), (), none)) is None


def test_a_call_with_a_cache_has_the_last_positions_of_the_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    ids = torch.ones(2, 3, dtype=torch.int64)
    last = tokens_of(mask_in(("input_ids",), (ids,), {"attention_mask": mask}))
    assert last is not None
    assert torch.equal(last, mask[:, 1:] != 0)
    decoder = tokens_of(mask_in((), (), {"decoder_input_ids": ids, "attention_mask": mask}))
    assert decoder is not None
    assert torch.equal(decoder, mask != 0)


def test_only_modules_with_features_last_hide_padding_if_axes_are_equal() -> None:
    modules = {"a": nn.Linear(3, 3), "b": nn.Conv1d(3, 3, 1), "c": nn.Tanh(), "bert.decoder": nn.Linear(3, 3)}
    found = [hidings(modules)[id(module)] for module in modules.values()]
    assert found == [Hiding.FEATURES_LAST, Hiding.NEVER, Hiding.BY_SHAPE, Hiding.FEATURES_LAST]
    hides = [kept_in(torch.zeros(2, 3, 3), KEPT, hiding) is not None for hiding in found]
    assert hides == [True, False, False, True]
