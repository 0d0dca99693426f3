"""Tests of a model on two GPUs with NCCL: tokens, logits and the records of a step equal those on one GPU."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.decoder.on_gpu import GpuDecoder, model_on
from cbtop.compute.decoder.ranks import ALONE, Rank, part_of
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu.nccl import NcclLink, new_id
from cbtop.compute.settings import Split
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from tests.compute.conftest import ListRecorder

pytestmark = pytest.mark.gpu
RANKS, STEPS, DEADLINE_S = 2, 8, 120.0
PROMPT = [(7 * place) % 300 for place in range(40)]  # This prompt is long enough that products use bfloat16.


def ran(gpu: Gpu, path: Path, rank: Rank, *, is_eager: bool) -> tuple[list[int], Any, dict[str, int]]:
    """Return the tokens, the last logits, and how often each exchange between ranks was recorded with a time."""
    on = model_on(gpu, part_of(read_model(path, FAMILIES), rank), is_exact=True, rank=rank)
    recorder = ListRecorder()
    decoder = GpuDecoder(gpu, on, BrickProfiler(recorder=recorder), 64, is_eager=is_eager, rank=rank)
    tokens = [decoder.prefill(PROMPT)]
    for _ in range(STEPS):
        tokens.append(decoder.decode(tokens[-1]))
    decoder.tell()
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    found: dict[str, int] = {}
    for tag, _ in recorder.records:
        node = nodes.get(tag & 0xFFFFFF)
        if node and node.kind is NodeKind.BRICK and node.category is BrickCategory.COMMUNICATION:
            found[node.name] = found.get(node.name, 0) + 1
    return tokens, decoder.logits, found


def of_rank(number: int, path: Path, is_eager: bool, split: Split, ids: Connection, results: Connection) -> None:
    """Run one rank of a model in a separate process. Send what the function `ran` returns there."""
    gpu = Gpu(number)
    if number == 0:
        ids.send(new_id(gpu))
    unique_id = ids.recv()
    rank = Rank(number, RANKS, NcclLink(gpu, number, RANKS, unique_id), split)
    results.send(ran(gpu, path, rank, is_eager=is_eager))


def of_both(path: Path, split: Split, *, is_eager: bool) -> list[tuple[list[int], Any, dict[str, int]]]:
    """Return what the function `ran` returns in each of the two ranks."""
    spawn = multiprocessing.get_context("spawn")
    ids, results = ([spawn.Pipe() for _ in range(RANKS)] for _ in range(2))
    processes = [
        spawn.Process(target=of_rank, args=(at, path, is_eager, split, ids[at][1], results[at][1]), daemon=True)
        for at in range(RANKS)
    ]
    try:
        for process in processes:
            process.start()
        assert ids[0][0].poll(DEADLINE_S)
        unique_id = ids[0][0].recv()
        for ours, _ in ids:
            ours.send(unique_id)
        found = []
        for ours, _ in results:
            assert ours.poll(DEADLINE_S)
            found.append(ours.recv())
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.fixture
def wide_model(tmp_path: Path) -> Path:
    """Write a model with heads that can be split between ranks, because the heads are whole blocks of 256 columns."""
    path = tmp_path / "wide.gguf"
    write_model(path, replace(TINY, heads=8, key_length=64), lambda text, fraction: None)
    return path


@pytest.fixture
def two_gpus(gpu: Gpu) -> Gpu:
    if (count := gpu.cupy.cuda.runtime.getDeviceCount()) < RANKS:
        pytest.skip(f"{count} GPU: two ranks need one each")
    return gpu


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_a_rank_that_is_alone_tells_itself_its_token_by_nccl(
    is_eager: bool, model_files: dict[str, Path], gpu: Gpu
) -> None:
    path, rank = model_files["qwen2"], Rank(0, 1, NcclLink(gpu, 0, 1, new_id(gpu)))
    tokens, logits, _ = ran(gpu, path, ALONE, is_eager=is_eager)
    found, same, times = ran(gpu, path, rank, is_eager=is_eager)
    assert found == tokens
    np.testing.assert_array_equal(same, logits)
    assert set(times) == {"Broadcast"}


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3moe"])
def test_two_gpus_have_the_tokens_and_logits_of_one_and_time_each_exchange(
    family: str, is_eager: bool, model_files: dict[str, Path], two_gpus: Gpu
) -> None:
    path = model_files[family]
    tokens, logits, none = ran(two_gpus, path, ALONE, is_eager=is_eager)
    found = of_both(path, "layers", is_eager=is_eager)
    assert none == {}
    assert [own for own, _, _ in found] == [tokens, tokens]
    np.testing.assert_array_equal(found[-1][1], logits)
    # If other processes use the GPU, its clock cannot always be compared with the host's, and a step would be lost.
    for (_, _, times), name in zip(found, ("Send", "Recv"), strict=True):
        assert set(times) == {name, "Broadcast"}
        assert STEPS / 2 < times[name] <= STEPS + 1


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_two_gpus_that_share_layers_have_the_logits_of_one_and_time_each_sum(
    is_eager: bool, wide_model: Path, two_gpus: Gpu
) -> None:
    tokens, logits, _ = ran(two_gpus, wide_model, ALONE, is_eager=is_eager)
    found = of_both(wide_model, "heads", is_eager=is_eager)
    assert [own for own, _, _ in found] == [tokens, tokens]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_allclose(found[0][1], logits, rtol=0, atol=1e-3 * float(np.std(logits)))
    for _, _, times in found:
        assert set(times) == {"AllReduce"}
        assert STEPS / 2 < times["AllReduce"] / (2 * TINY.layers) <= STEPS + 1
