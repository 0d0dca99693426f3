"""Tests of what is known about a call of a model: its phase, its tokens, sequences and cached positions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.ring import FLAG_AMOUNTS, UNKNOWN_AMOUNT
from tests.profiler.instrument.engines import steps_of
from tests.profiler.instrument.tiny import WORDS, model_of, torch, transformers, words
from tests.profiler.memory import Memory

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_what_a_caller_gives_by_position_or_as_one_mapping_is_known(profiler: BrickProfiler, memory: Memory) -> None:
    model, ids = model_of("qwen2"), words(2, 6)
    attach(model, profiler)
    cache = transformers.DynamicCache(config=model.config)
    for new in (ids, ids[:, :1], ids[:, :3]):
        model(new, None, None, cache)

    class Sentences(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of("qwen2")

        def forward(self, batch: dict[str, Any]) -> Any:
            return self.inner(**batch)

    sentences = Sentences()
    attach(sentences, profiler)
    sentences({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert [tokens for _, tokens in steps_of(memory)] == [12, 2, 6, 12]
    assert [phase for phase, _ in steps_of(memory)][:3] == ["prefill", "decode", "extend"]


class Written(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A hand-written decoder with a cache inside its attention.

    Its arguments include the positions of the new tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(WORDS, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2))
        self.output = torch.nn.Linear(8, WORDS)

    def run(self, ids: Any) -> Any:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Meta(Written):
    """A model with the arguments of the reference code of Llama."""

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(self, tokens: Any, start_pos: int) -> Any:
        return self.run(tokens)


class Fast(Written):
    """Like gpt-fast."""

    def forward(self, mask: Any, idx: Any, input_pos: Any = None) -> Any:
        return self.run(idx)


def _cached(memory: Memory) -> list[tuple[str, int, int | None]]:
    """Return phase, tokens and cached positions of each step."""
    amounts = [cached for tag, _, cached, _ in memory.records if tag & FLAG_AMOUNTS]
    steps = steps_of(memory)
    return [
        (*step, None if cached == UNKNOWN_AMOUNT else cached) for step, cached in zip(steps, amounts, strict=True)
    ]


def test_where_new_tokens_stand_says_how_many_are_cached(profiler: BrickProfiler, memory: Memory) -> None:
    model = Meta()
    attach(model, profiler)
    model(words(2, 6), 0)
    model(words(2, 1), 6)
    model(words(2, 3), start_pos=7)
    model(words(2, 1), torch.tensor(10))
    assert _cached(memory) == [("prefill", 12, 0), ("decode", 2, 6), ("extend", 6, 7), ("decode", 2, 10)]


def test_positions_on_the_host_say_how_many_are_cached(profiler: BrickProfiler, memory: Memory) -> None:
    model = Fast()
    attach(model, profiler)
    mask = torch.ones(1, 1)
    model(mask, words(6, 6), torch.arange(6))
    model(mask, words(2, 1), torch.tensor([6]))
    model(mask, words(2, 1), torch.tensor([7, 7]))
    model(mask, words(2, 3), input_pos=torch.arange(8, 11)[None])
    model(mask, words(2, 2), torch.tensor([[4, 5], [4, 5]]))
    model(mask, words(1, 6))
    first, last = ("prefill", 36, 0), ("prefill", 6, 0)
    assert _cached(memory) == [first, ("decode", 2, 6), ("decode", 2, 7), ("extend", 6, 8), ("extend", 4, 4), last]


def test_positions_of_sequences_that_differ_or_make_no_sense_are_no_number(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = Fast()
    attach(model, profiler)
    for positions in (torch.tensor([[4], [9]]), torch.tensor([4, 9]), torch.tensor([-1]), torch.ones(0), "here", -3):
        model(None, words(2, 1), positions)
    assert _cached(memory) == [("decode", 2, None)] * 6


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_positions_on_a_device_are_not_waited_for(
    device: str, profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    model = Fast()
    attach(model, profiler)
    lengths = (6, 1, 1)
    given = [torch.arange(length, device=device) for length in lengths]
    if device == "cuda":
        with warnings.catch_warnings():  # torch warns that this setting is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
    try:
        for length, positions in zip(lengths, given, strict=True):
            model(None, words(1, length), positions)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert _cached(memory) == [("prefill", 6, None), ("decode", 1, None), ("decode", 1, None)]


def _amounts(memory: Memory) -> list[int]:
    """Return the number of sequences of each step."""
    return [start for tag, start, _, _ in memory.records if tag & FLAG_AMOUNTS]


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_encoder_of_torch_gives_its_sequence_axis_but_no_token_count(
    batch_first: bool, profiler: BrickProfiler, memory: Memory
) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attach(encoder, profiler)
    encoder(torch.ones(2, 7, 32) if batch_first else torch.ones(7, 2, 32))
    assert steps_of(memory) == [("encode", 0)]
    assert _amounts(memory) == [2]


@pytest.mark.parametrize(
    ("shapes", "sequences"),
    [
        (((7, 32),), 7),
        (((7, 5, 32),), 7),
        (((7, 32), (7,)), 7),
        (((7, 32), ()), 7),
        (((7,), (7, 4, 8, 8)), 7),
        (((7, 32), (2, 20)), None),
        (((7,),), None),
    ],
)
def test_plain_steps_count_the_same_sequences_as_recorded_ones(
    shapes: tuple[tuple[int, ...], ...], sequences: int | None, memory: Memory
) -> None:
    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return tensors[0]

    profiler, model = BrickProfiler(sample_every=2, recorder=memory), Rows()
    attach(model, profiler)
    for _ in range(4):
        model(*(torch.zeros(shape) for shape in shapes))
    counts = [amount for amount in _amounts(memory) if amount < 100]  # plain steps also have their begins here
    assert counts == ([] if sequences is None else [sequences] * 4)


@pytest.mark.parametrize("sample_every", [1, 2], ids=["recorded", "plain"])
@pytest.mark.parametrize("is_doubled", [False, True], ids=["two calls", "a doubled batch"])
def test_guidance_counts_each_row_that_a_denoiser_computes(
    is_doubled: bool, sample_every: int, memory: Memory
) -> None:
    class Denoiser(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.labels = torch.nn.Embedding(10, 4)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x) + t[:, None, None, None] + self.labels(y)[:, None, None]
            return x

    model = Denoiser()
    attach(model, BrickProfiler(sample_every=sample_every, recorder=memory))
    x, t, y = torch.zeros(3, 2, 4, 4), torch.zeros(3), torch.zeros(3, dtype=torch.long)
    for _ in range(4):
        if is_doubled:
            model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, y + 9]))
        else:
            model(x, t, y)
            model(x, t=t, y=y + 9)
    counts = [amount for amount in _amounts(memory) if amount < 100]  # plain steps also have their begins here
    assert counts == ([6] * 4 if is_doubled else [3] * 8)
    assert {tokens for _, tokens in steps_of(memory)} == {0}


def test_the_frames_and_bins_of_a_spectrogram_are_no_tokens(profiler: BrickProfiler, memory: Memory) -> None:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    attach(model, profiler)
    model.model.encoder(torch.ones(3, 8, 40))
    model(input_features=torch.ones(3, 8, 40), decoder_input_ids=words(3, 4))
    assert steps_of(memory) == [("encode", 0), ("prefill", 12)]
    assert _amounts(memory) == [3, 3]
