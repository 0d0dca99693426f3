"""Tests of a model that is split over several ranks.

They check which parts each rank has, and that the result equals that of one rank.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, Projection, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.machine import Host
from cbtop.compute.decoder.on_gpu import GpuDecoder, GpuMachine, model_on
from cbtop.compute.decoder.ranks import ALONE, Rank, _bytes_of, part_of
from cbtop.compute.errors import ComputeError, ModelError
from cbtop.compute.gpu import device, nccl
from cbtop.compute.gpu.nccl import NcclLink, new_id
from cbtop.compute.gpu.passes import LaunchedPass
from cbtop.compute.kernels.kv_caches import padded
from cbtop.compute.places import OnGpu
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.compute.settings import DecoderSettings, RankOptions, Split, TokenSampling, WorkloadOptions
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from tests.compute.conftest import ListRecorder
from tests.compute.cuda_on_cpu import CpuAsGpu
from tests.compute.fake_gpu import FakeGpu
from tests.compute.linked import together
from tests.compute.test_on_gpu import PROMPT

LAYERS = 5
CONTEXT = 64


def deeper(model: Model, layers: int = LAYERS) -> Model:
    """Return the tiny model with `layers` layers. No two layers are equal."""
    own = [model.layers[at % len(model.layers)] for at in range(layers)]
    varied = (
        replace(one, attention_norm=replace(one.attention_norm, weight=one.attention_norm.weight * (1 + at / 8)))
        for at, one in enumerate(own)
    )
    return replace(model, layers=tuple(varied))


@pytest.fixture
def tiny(model_files: dict[str, Path]) -> Model:
    return deeper(read_model(model_files["qwen2"], FAMILIES))


def ran(decoder: Decoder) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens and logits of two sequences. Ranks other than the last have no logits."""
    tokens, logits = [], []
    for _ in range(2):
        decoder.restart()
        tokens.append(decoder.prefill(PROMPT))
        for _ in range(5):
            logits.append(decoder.logits.copy())
            tokens.append(decoder.decode(tokens[-1]))
    return tokens, logits


# --- parts of a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "shares"), [(28, (14, 14)), (5, (3, 2)), (7, (3, 2, 2)), (3, (1, 1, 1))])
def test_shares_are_even_and_in_order_and_the_last_is_never_a_larger_one(
    layers: int, shares: tuple[int, ...]
) -> None:
    found = [Rank(number, len(shares), None).layers_of(layers) for number in range(len(shares))]
    assert [len(own) for own in found] == list(shares)
    assert [layer for own in found for layer in own] == list(range(layers))


def test_more_ranks_than_layers_are_one_line(tiny: Model) -> None:
    with pytest.raises(ModelError, match=r"^a model of 5 layers for 6 GPUs; give --gpus 5 or fewer$"):
        part_of(tiny, Rank(2, 6, None))


# Together, these models have biases, norms of heads, and a router of experts.
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral"])
def test_parts_hold_each_layer_once_and_their_sizes_add_up_to_the_file(
    family: str, model_files: dict[str, Path]
) -> None:
    model = read_model(model_files[family], FAMILIES)
    first, last = (part_of(model, Rank(number, 2, None)) for number in range(2))
    assert (*first.layers, *last.layers) == model.layers
    assert (first.first_layer, last.first_layer) == (0, 1)
    twice = model.embedding.size_bytes if model.embedding is model.lm_head else 0
    assert first.weights_bytes + last.weights_bytes == model.weights_bytes + twice
    assert part_of(model, ALONE) is model


class CountingGpu(FakeGpu):
    """A fake GPU that records the shapes of the arrays of zeros that it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def zeros(self, shape: Any, dtype: Any) -> Any:
        self.shapes.append(shape)
        return super().zeros(shape, dtype)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_rank_has_only_the_weights_and_cache_of_its_own_layers_on_its_gpu(number: int, tiny: Model) -> None:
    gpu: Any = CountingGpu()
    rank = Rank(number, 3, None)
    on = model_on(gpu, part_of(tiny, rank), is_exact=False, rank=rank)
    GpuDecoder(gpu, on, BrickProfiler(enabled=False), CONTEXT, rank=rank)
    caches = gpu.shapes.count((tiny.kv_heads, CONTEXT, padded(tiny.head_dim)))
    assert len(on.layers) == caches / 2 == len(rank.layers_of(LAYERS))  # keys and values
    # Only rank 0 copies the embedding to its GPU. The other ranks do not use it.
    assert (on.embedding is tiny.embedding) == (number != 0)
    assert (on.lm_head is tiny.lm_head) == (number != 2)


# --- common results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling", [TokenSampling(), TokenSampling(temperature=1.5, seed=3)], ids=["greedy", "drawn"]
)
def test_ranks_choose_the_tokens_and_have_the_logits_of_one_decoder(
    count: int, family: str, sampling: TokenSampling, model_files: dict[str, Path]
) -> None:
    model = deeper(read_model(model_files[family], FAMILIES))

    def decoder_of(rank: Rank) -> Decoder:
        profiler, machine = BrickProfiler(enabled=False), Host(1)
        return Decoder(
            part_of(model, rank), "numba", 1, profiler, 64, DecoderSettings(sampling=sampling), machine, rank
        )

    tokens, logits = ran(decoder_of(ALONE))
    found = together(count, lambda rank: ran(decoder_of(rank)))
    assert [own for own, _ in found] == [tokens] * count
    np.testing.assert_array_equal(found[-1][1], logits)


def in_small_blocks(model: Model) -> Model:
    """Return the model with blocks of 32 columns, which can be split between ranks.

    The tiny model has only one or two blocks of 256 columns.
    """

    def small(one: Projection) -> Projection:
        assert isinstance(one.weight, QuantizedMatrix)
        return replace(one, weight=QuantizedMatrix.of(Q8_0, one.weight.dequantized()))

    layers = (replace(one, output=small(one.output), down=small(one.down)) for one in model.layers)
    return replace(model, layers=tuple(layers))


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen2", "mixtral", pytest.param("phi3", marks=pytest.mark.slow)])
def test_ranks_that_share_every_layer_have_the_tokens_and_logits_of_one(
    count: int, family: str, model_files: dict[str, Path]
) -> None:
    # The test runs with a model that has biases, and with a model that has experts.
    model = in_small_blocks(deeper(read_model(model_files[family], FAMILIES)))
    # For three ranks, give each query head its own keys and values. The ranks then get 2, 1 and 1 heads.
    if count > model.kv_heads:
        model = with_heads_of_their_own(model)

    def decoder_of(rank: Rank) -> Decoder:
        profiler, machine = BrickProfiler(enabled=False), Host(1)
        return Decoder(part_of(model, rank), "numba", 1, profiler, 64, DecoderSettings("f32"), machine, rank)

    tokens, logits = ran(decoder_of(ALONE))
    found = together(count, lambda rank: ran(decoder_of(replace(rank, split="heads"))))
    assert [own for own, _ in found] == [tokens] * count
    np.testing.assert_array_equal([of_rank for _, of_rank in found[1:]], [found[0][1]] * (count - 1))
    np.testing.assert_allclose(found[0][1], logits, rtol=0, atol=1e-4 * float(np.std(logits)))


def with_heads_of_their_own(model: Model) -> Model:
    def more(one: Projection) -> Projection:
        assert isinstance(one.weight, QuantizedMatrix)
        times = model.heads // model.kv_heads
        data = np.repeat(one.weight.data.reshape(model.kv_heads, -1), times, 0).reshape(-1, one.weight.data.shape[1])
        bias = np.repeat(one.bias.reshape(model.kv_heads, -1), times, 0).reshape(-1)
        return Projection(replace(one.weight, data=data), bias)

    layers = (replace(one, k=more(one.k), v=more(one.v)) for one in model.layers)
    return replace(model, layers=tuple(layers), kv_heads=model.heads)


def test_shares_of_every_layer_hold_each_weight_once_and_report_their_size(tiny: Model) -> None:
    model = in_small_blocks(tiny)
    shares = [part_of(model, Rank(number, 2, None, "heads")) for number in range(2)]
    for one in shares:
        assert (one.heads, one.kv_heads, one.feed_forward) == (2, 1, 256)
    for whole, *parts in zip(model.layers, *(one.layers for one in shares), strict=True):
        for names, axis in ((("q", "k", "v", "gate", "up"), 0), (("output", "down"), 1)):
            for name in names:
                together_again = np.concatenate([getattr(one, name).weight.dequantized() for one in parts], axis)
                np.testing.assert_array_equal(together_again, getattr(whole, name).weight.dequantized())
        biases = [np.concatenate([getattr(one, name).bias for one in parts]) for name in ("q", "k", "v")]
        for found, name in zip(biases, ("q", "k", "v"), strict=True):
            np.testing.assert_array_equal(found, getattr(whole, name).bias)
    assert model.embedding is model.lm_head
    norms = sum(one.attention_norm.size_bytes + one.ffn_norm.size_bytes for one in model.layers)
    in_each = norms + model.lm_head.size_bytes + model.final_norm.size_bytes
    of_layers = sum(_bytes_of(one) for one in model.layers) - norms
    assert sum(one.weights_bytes for one in shares) == of_layers + 2 * in_each


def test_heads_and_columns_that_cannot_be_shared_out_are_one_line(tiny: Model) -> None:
    with pytest.raises(ModelError, match=r"^2 heads of keys and values are 1 x 2 for 2 GPUs; give --split layers$"):
        # All four query heads are in one block of 256 columns, so they cannot be split.
        part_of(tiny, Rank(0, 2, None, "heads"))
    several = r"^2 heads of keys and values are 2 x 1 for 3 GPUs; give --gpus 2 or fewer, or --split layers$"
    with pytest.raises(ModelError, match=several):
        part_of(in_small_blocks(tiny), Rank(0, 3, None, "heads"))


def test_a_prompt_longer_than_passes_together_goes_on_in_parts(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "most_together", 4)

    def decoder_of(rank: Rank) -> Decoder:
        return Decoder(part_of(tiny, rank), "numba", 1, BrickProfiler(enabled=False), 64, rank=rank)

    tokens, logits = ran(decoder_of(ALONE))
    found = together(2, lambda rank: ran(decoder_of(rank)))
    assert found[0][0] == tokens
    np.testing.assert_array_equal(found[-1][1], logits)


def test_checks_of_ranks_are_of_their_own_bricks_and_hold(tiny: Model) -> None:
    def checked(rank: Rank) -> set[str]:
        decoder = Decoder(part_of(tiny, rank), "numba", 1, BrickProfiler(enabled=False), 64, rank=rank)
        results = decoder.verify(PROMPT)
        assert all(one.passed for one in results)
        return {one.brick for one in results}

    first, last = together(2, checked)
    assert first - last == {"Embedding"}
    assert last - first == {"LmHead", "Sampling"}


class InTurn(CpuAsGpu):
    """A simulated GPU for ranks that are threads. Only one thread at a time may run a compiled kernel."""

    lock = threading.Lock()

    def launch(self, one: Any, stamp: int | None = None, *, is_early: bool = False) -> None:
        if hasattr(one, "call"):
            one.call()
            return
        with self.lock:
            super().launch(one, stamp, is_early=is_early)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "split"),
    [*(pytest.param(count, "layers", marks=pytest.mark.slow) for count in (2, 3)), (2, "heads")],
)
def test_what_a_gpu_launches_of_ranks_has_the_logits_of_one(
    count: int, split: Split, model_files: dict[str, Path]
) -> None:
    try:
        InTurn()
    except ComputeError as error:
        pytest.skip(str(error))
    model = in_small_blocks(deeper(read_model(model_files["qwen2"], FAMILIES), count))

    def logits_of(rank: Rank) -> tuple[list[Any], list[list[str]]]:
        gpu = InTurn()
        on = model_on(gpu, part_of(model, rank), is_exact=False, rank=rank)
        machine = GpuMachine(gpu, 64)
        decoder = Decoder(on, "cuda", 1, BrickProfiler(enabled=False), 64, machine=machine, rank=rank)
        logits, names = [], []
        for tokens in (PROMPT[:-1], PROMPT[-1:]):
            ran = LaunchedPass(gpu, None, decoder.int8_scratch)
            decoder.plan(tokens, ran.run, ran.layer)
            logits.append(decoder.logits.copy())
            names.append([one.what.name for one in ran.launched if "nccl" in one.what.name])
        return logits, names

    expected, none = logits_of(ALONE)
    assert none == [[], []]
    if split == "heads":
        found = together(count, lambda rank: logits_of(replace(rank, split="heads")))
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_allclose(found[0][0], expected, rtol=0, atol=1e-4 * float(np.std(expected)))
        assert [names for _, names in found] == [[["ncclAllReduce"] * 2 * count] * 2] * count
        return
    found = together(count, logits_of)
    np.testing.assert_array_equal(found[-1][0], expected)
    ends = ["ncclSend", "ncclBroadcast"], ["ncclRecv", "ncclBroadcast"]
    middle = [["ncclRecv", "ncclSend", "ncclBroadcast"]] * (count - 2)
    assert [names[0] for _, names in found] == [names[1] for _, names in found] == [ends[0], *middle, ends[1]]


# --- exchanges between ranks as bricks ------------------------------------------------------------------------------


class CountingLink:
    """A link for the fake GPU. It records each transfer when it runs, also if a graph runs it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.done: list[tuple[str, int, int]] = []
        self._gpu = gpu

    def _do(self, what: str, array: Any, peer: int) -> None:
        done = self.done  # The closure keeps only the list, so that the graph does not keep the link alive.
        self._gpu.do(lambda: done.append((what, array.nbytes, peer)))

    def send(self, array: Any, to: int) -> None:
        self._do("send", array, to)

    def recv(self, array: Any, sender: int) -> None:
        self._do("recv", array, sender)

    def broadcast(self, array: Any, sender: int) -> None:
        self._do("broadcast", array, sender)

    def all_reduce(self, array: Any) -> None:
        self._do("all_reduce", array, -1)


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_each_exchange_is_a_brick_with_its_own_bytes_and_time_in_every_token(
    is_eager: bool, tiny: Model, recorder: ListRecorder
) -> None:
    gpu: Any = FakeGpu()
    link = CountingLink(gpu)
    rank = Rank(1, 3, link)
    on = model_on(gpu, part_of(tiny, rank), is_exact=False, rank=rank)
    decoder = GpuDecoder(gpu, on, BrickProfiler(recorder=recorder), 64, is_eager=is_eager, rank=rank)
    decoder.decode(1)
    decoder.tell()
    recorder.records.clear()
    link.done.clear()
    for _ in range(2):
        decoder.decode(1)
    decoder.tell()
    hidden_bytes = 4 * tiny.hidden
    assert link.done == [("recv", hidden_bytes, 0), ("send", hidden_bytes, 2), ("broadcast", 8, 2)] * 2
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    bricks = [one for one in nodes.values() if one.kind is NodeKind.BRICK]
    exchanges = {one.name: one for one in bricks if one.category is BrickCategory.COMMUNICATION}
    assert set(exchanges) == {"Recv", "Send", "Broadcast"}
    for name, one in exchanges.items():
        assert (one.label, nodes[one.parent or 0].kind) == ("3 ranks", NodeKind.STEP)
        count = 1 if name == "Broadcast" else tiny.hidden
        assert one.work.size_bytes(1, count) == one.work.bytes(1, count) == (8 if count == 1 else hidden_bytes)
        assert [elements for tag, elements in recorder.records if tag & 0xFFFFFF == one.id] == [count] * 2
        (kernel,) = [other for other in nodes.values() if other.parent == one.id]
        assert (kernel.kind, kernel.name) == (NodeKind.KERNEL, f"nccl{name}")
    layers = {one.name for one in nodes.values() if one.kind is NodeKind.LAYER}
    assert layers == {str(layer) for layer in rank.layers_of(LAYERS)} == {"2", "3"}


def test_each_sum_of_a_shared_layer_is_a_brick_with_its_bus_bytes_and_time(
    tiny: Model, recorder: ListRecorder
) -> None:
    gpu: Any = FakeGpu()
    link = CountingLink(gpu)
    rank = Rank(1, 2, link, "heads")
    on = model_on(gpu, part_of(in_small_blocks(tiny), rank), is_exact=False, rank=rank)
    decoder = GpuDecoder(gpu, on, BrickProfiler(recorder=recorder), 64, rank=rank)
    decoder.decode(1)
    link.done.clear()
    decoder.decode(1)
    decoder.tell()
    assert link.done == [("all_reduce", 4 * tiny.hidden, -1)] * 2 * LAYERS
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    sums = [
        one for one in nodes.values() if one.category is BrickCategory.COMMUNICATION and one.kind is NodeKind.BRICK
    ]
    assert {(one.name, one.label, nodes[one.parent or 0].kind) for one in sums} == {
        ("AllReduce", "2 ranks", NodeKind.LAYER)
    }
    assert len(sums) == LAYERS
    for one in sums:
        # An all-reduce sends 2 * (ranks - 1) / ranks times its bytes. With two ranks, the factor is 1.
        assert one.work.bytes(1, tiny.hidden) == 4 * tiny.hidden
        assert [elements for tag, elements in recorder.records if tag & 0xFFFFFF == one.id] == [tiny.hidden] * 4


def test_graphs_are_released_before_the_nccl_link_that_they_keep_alive(
    tiny: Model, recorder: ListRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = FakeGpu()
    ended: list[str] = []
    end_capture = gpu.stream.end_capture

    def watched() -> Any:
        graph = end_capture()
        weakref.finalize(graph.launch, ended.append, "graph")
        return graph

    monkeypatch.setattr(gpu.stream, "end_capture", watched)
    rank = Rank(0, 2, CountingLink(gpu))
    weakref.finalize(rank.link, ended.append, "link")
    on = model_on(gpu, part_of(tiny, rank), is_exact=False, rank=rank)
    decoder = GpuDecoder(gpu, on, BrickProfiler(recorder=recorder), 64, rank=rank)
    del rank
    decoder.prefill(PROMPT)
    decoder.decode(1)
    decoder.tell()
    del decoder
    assert ended == ["graph", "graph", "link"]


@pytest.mark.slow  # the test loads torch
def test_an_exchange_is_called_as_one_of_torch_is() -> None:
    collectives = pytest.importorskip("cbtop.profiler.instrument.collectives", reason="torch is not installed")
    from cbtop.compute import brick_specs

    specs = brick_specs.SEND, brick_specs.RECV, brick_specs.BROADCAST, brick_specs.ALL_REDUCE
    theirs = collectives.SEND, collectives.RECV, collectives.BROADCAST, collectives.ALL_REDUCE
    assert tuple(one.name for one in specs) == theirs


def test_what_begins_behind_a_call_of_a_library_waits_for_all_of_it(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = FakeGpu()
    early: list[bool | str] = []
    prepared = gpu.prepared

    def noted(one: Any, stamp: int | None = None, *, is_early: bool = False) -> Callable[[], None]:
        early.append(is_early)
        found: Callable[[], None] = prepared(one, stamp, is_early=is_early)
        return found

    monkeypatch.setattr(gpu, "prepared", noted)
    rank = Rank(1, 2, CountingLink(gpu))
    on = model_on(gpu, part_of(tiny, rank), is_exact=False, rank=rank)
    decoder = GpuDecoder(gpu, on, BrickProfiler(enabled=False), 64, rank=rank)
    decoder.decode(1)
    of_a_pass = early[: len(early) // 2]
    # The first launch may not begin early, because this launch needs data that this rank receives.
    assert of_a_pass[0] is False
    assert all(of_a_pass[1:])


# --- NCCL -----------------------------------------------------------------------------------------------------------


class FakeNcclError(RuntimeError):
    pass


class FakeCommunicator:
    """A fake of CuPy's NCCL communicator. It records calls with their addresses, counts, types, peer and stream."""

    wrong = ""

    def __init__(self, count: int, unique_id: bytes, number: int) -> None:
        self.begun = count, unique_id, number
        self.calls: list[tuple[Any, ...]] = []
        if self.wrong:
            raise FakeNcclError(self.wrong)

    def send(self, *arguments: int) -> None:
        self.calls.append(("send", *arguments))

    def allReduce(self, *arguments: int) -> None:  # noqa: N802 - as CuPy calls it
        self.calls.append(("allReduce", *arguments))

    def recv(self, *arguments: int) -> None:
        raise FakeNcclError("NCCL_ERROR_SYSTEM_ERROR")

    def bcast(self, *arguments: int) -> None:
        self.calls.append(("bcast", *arguments))


ID = bytes(range(128))


@pytest.fixture
def gpu_with_nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    communicators: list[FakeCommunicator] = []

    def communicator(*given: Any) -> FakeCommunicator:
        communicators.append(FakeCommunicator(*given))
        return communicators[-1]

    module = SimpleNamespace(
        NcclError=FakeNcclError, NcclCommunicator=communicator, get_unique_id=lambda: ID, available=True
    )
    monkeypatch.setattr(nccl, "_nccl", lambda gpu: module)
    gpu: Any = FakeGpu()
    gpu.cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=77)
    gpu.device = gpu.turn()
    gpu.communicators = communicators
    return gpu


def test_a_link_uses_the_id_of_the_first_rank_and_the_current_stream(
    gpu_with_nccl: Any,
) -> None:
    link = NcclLink(gpu_with_nccl, 1, 2, new_id(gpu_with_nccl))
    (communicator,) = gpu_with_nccl.communicators
    assert communicator.begun == (2, ID, 1)
    x, token = gpu_with_nccl.zeros((3, 8), np.float32), gpu_with_nccl.zeros((1,), np.int64)
    link.send(x, 0)
    link.broadcast(token, 1)
    link.all_reduce(x)
    # The numbers are constants of nccl.h: ncclFloat32 = 7 and ncclInt64 = 4 of ncclDataType_t, ncclSum = 0 of
    # ncclRedOp_t.
    assert communicator.calls == [
        ("send", x.data.ptr, 24, 7, 0, 77),
        ("bcast", token.data.ptr, 1, 4, 1, 77),
        ("allReduce", x.data.ptr, x.data.ptr, 24, 7, 0, 77),
    ]


def test_what_nccl_says_is_an_error_of_compute(gpu_with_nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link = NcclLink(gpu_with_nccl, 1, 2, new_id(gpu_with_nccl))
    with pytest.raises(ComputeError, match=r"^NCCL: NCCL_ERROR_SYSTEM_ERROR$"):
        link.recv(gpu_with_nccl.zeros((1,), np.float32), 0)
    monkeypatch.setattr(FakeCommunicator, "wrong", "NCCL_ERROR_INVALID_USAGE")
    gpu_with_nccl.device = gpu_with_nccl.turn()
    with pytest.raises(ComputeError, match=r"^NCCL cannot begin: NCCL_ERROR_INVALID_USAGE$"):
        NcclLink(gpu_with_nccl, 1, 2, new_id(gpu_with_nccl))


def test_a_rank_runs_its_part_on_its_own_gpu_with_the_link_id_of_the_first(
    model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus: dict[int, Any] = {}
    begun: list[tuple[Any, ...]] = []
    links: list[CountingLink] = []

    def begin(*given: Any) -> CountingLink:
        begun.append(given)
        links.append(CountingLink(given[0]))
        return links[-1]

    monkeypatch.setattr(device, "Gpu", lambda number: gpus.setdefault(number, FakeGpu()))
    monkeypatch.setattr(nccl, "NcclLink", begin)
    rank = RankOptions(1, 2, lambda make: b"of the first")
    place = OnGpu(WorkloadOptions(backend="cuda", rank=rank))
    model = place.model(model_files["qwen2"])
    decoder = place.decoder(model, BrickProfiler(enabled=False), 64)
    assert begun == [(gpus[1], 1, 2, b"of the first")]
    assert (list(gpus), model.first_layer, len(model.layers), len(decoder.bricks.layers)) == ([1], 1, 1, 1)
    decoder.decode(1)
    # Rank 1 is the last one, so it chooses the token and sends it to the other ranks.
    assert {(what, peer) for what, _, peer in links[0].done} == {("recv", 0), ("broadcast", 1)}


@pytest.mark.parametrize("there", [None, SimpleNamespace(nccl=SimpleNamespace(available=False))])
def test_without_nccl_it_says_what_to_install(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=there))
    monkeypatch.setitem(sys.modules, "cupy.cuda", there)
    with pytest.raises(ComputeError, match=r"pip install nvidia-nccl-cu13$"):
        new_id(FakeGpu())  # type: ignore[arg-type]
