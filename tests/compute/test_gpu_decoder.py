"""Tests of errors and interrupts in the decoder on a GPU. The GPU is fake."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute.decoder import FAMILIES, on_gpu
from cbtop.compute.decoder.base import read_model
from cbtop.compute.decoder.on_gpu import GpuDecoder, GpuMachine, model_on
from cbtop.compute.errors import ComputeError, ModelError
from cbtop.compute.gpu.passes import have_run
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.compute.conftest import ListRecorder
from tests.compute.fake_gpu import FakeGpu

NODE = 0xFFFFFF


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def decoder_on(gpu: Any, path: Path, profiler: BrickProfiler, *, is_eager: bool = False) -> GpuDecoder:
    on = model_on(gpu, read_model(path, FAMILIES), is_exact=False)
    return GpuDecoder(gpu, on, profiler, 64, is_eager=is_eager)


def interrupted_at(count: int) -> Any:
    """Return a function that raises KeyboardInterrupt at call number `count`."""
    left = [count]

    def call(*arguments: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return call


def kinds(recorder: ListRecorder) -> list[NodeKind | None]:
    """Return the kind of node of each record. A record without a node (None) reports lost records."""
    nodes = {one.id: one.kind for one in recorder.messages if isinstance(one, Node)}
    return [nodes.get(tag & NODE) for tag, _ in recorder.records]


# Interrupt one of four calls. For each of two graphs, one call is in the first pass, and one in the capture of the
# graph.
@pytest.mark.parametrize("count", [5, 37, 69, 101])
def test_an_interrupt_while_a_graph_is_made_leaves_no_token_and_no_capture(
    count: int, gpu: FakeGpu, model_files: dict[str, Path]
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    decoder.prefill([1, 2, 3])
    gpu.before_launch = interrupted_at(count)
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(1)
    assert (decoder.position, gpu.stream.capturing, gpu.in_flight, decoder._on.takes_inputs) == (3, None, 0, False)
    gpu.before_launch = lambda one: None
    decoder.decode(1)
    assert decoder.position == 4


@pytest.mark.parametrize("has_ended", [False, True])
def test_an_interrupt_at_the_end_of_a_capture_leaves_no_stream_that_captures(
    has_ended: bool, gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    end = gpu.stream.end_capture

    def interrupted() -> None:
        monkeypatch.setattr(gpu.stream, "end_capture", end)
        if has_ended:
            end()
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu.stream, "end_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(1)
    assert (decoder.position, gpu.stream.capturing) == (0, None)
    decoder.decode(1)
    assert decoder.position == 1


def test_an_interrupt_while_a_step_is_recorded_waits_and_appends_nothing(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    decoder.decode(1)
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "tell", interrupted_at(1))
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(1)
    assert (decoder.position, gpu.in_flight) == (1, 0)


def test_an_interrupt_while_a_prompt_that_has_run_is_told_of_appends_nothing(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    # The first call of `tell` reports the previous step, so interrupt the second call.
    monkeypatch.setattr(decoder, "tell", interrupted_at(2))
    with pytest.raises(KeyboardInterrupt):
        decoder.prefill([1, 2, 3])
    assert decoder.position == 0


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_a_pass_runs_in_its_turn(is_eager: bool, gpu: FakeGpu, model_files: dict[str, Path]) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False), is_eager=is_eager)
    turns: list[int] = []
    gpu.before_launch = lambda one: turns.append(gpu.turns)
    decoder.prefill([1, 2])
    decoder.decode(1)
    assert 0 not in turns


def test_a_decoder_waits_for_the_gpu_in_its_turn_while_no_graph_is_captured(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    monkeypatch.setattr(gpu, "synchronize", lambda: turns.append(gpu.turns))
    decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    assert turns == [1]


def test_a_pass_with_too_many_launches_to_stamp_runs_and_its_parts_are_lost(
    gpu: FakeGpu,
    model_files: dict[str, Path],
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_gpu, "MOST_LAUNCHES", 4)
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder))
    decoder.prefill([1, 2, 3])
    assert kinds(recorder) == [None, NodeKind.STEP]


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_a_step_with_a_skipped_kernel_has_no_parts_and_the_next_one_has_all(
    is_eager: bool, gpu: FakeGpu, model_files: dict[str, Path], recorder: ListRecorder
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder), is_eager=is_eager)
    decoder.decode(1)
    decoder.tell()
    whole = kinds(recorder)
    assert whole.count(NodeKind.KERNEL) > 10
    recorder.records.clear()
    gpu.skipped = "greedy"  # The fake GPU skips this kernel. So its time stamps are those of the step before.
    decoder.decode(1)
    decoder.tell()
    assert kinds(recorder) == [None, NodeKind.STEP]
    recorder.records.clear()
    gpu.skipped = ""
    decoder.decode(1)
    decoder.tell()
    assert kinds(recorder) == whole


@pytest.mark.parametrize("is_eager", [True, False], ids=["launch by launch", "captured graph"])
def test_a_step_says_how_many_positions_were_cached_before_it(
    is_eager: bool, gpu: FakeGpu, model_files: dict[str, Path], recorder: ListRecorder
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder), is_eager=is_eager)
    decoder.prefill([1, 2, 3])
    decoder.decode(decoder.decode(4))
    decoder.restart()
    decoder.decode(5)
    decoder.tell()
    assert recorder.amounts == [(1, 0), (1, 3), (1, 4), (1, 0)]


def test_one_step_is_lost_and_the_next_recorded_if_a_gpu_clock_is_set_back(
    gpu: FakeGpu, model_files: dict[str, Path], recorder: ListRecorder
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder))
    decoder.decode(1)
    decoder.tell()
    whole = kinds(recorder)
    gpu.now_ns = 1_000
    for expected in ([None, NodeKind.STEP], whole):
        recorder.records.clear()
        decoder.decode(1)
        decoder.tell()
        assert kinds(recorder) == expected


def test_a_step_is_recorded_without_its_parts_if_the_gpu_clock_is_unreadable(
    gpu: FakeGpu, model_files: dict[str, Path], recorder: ListRecorder
) -> None:
    gpu.offset = None
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder))
    decoder.decode(1)
    decoder.restart()
    assert kinds(recorder) == [None, NodeKind.STEP]


def test_a_fork_tells_nothing_of_the_last_step_of_its_parent(
    gpu: FakeGpu, model_files: dict[str, Path], recorder: ListRecorder
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder))
    decoder.decode(1)
    gpu.is_of_parent = True
    decoder.restart()
    assert recorder.records == []


def test_a_token_that_is_none_of_the_vocabulary_is_no_result(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    copy = gpu.copy

    def spoilt(target: Any, source: Any, kind: int) -> None:
        if kind == gpu.cupy.cuda.runtime.memcpyDeviceToHost and source.dtype == np.int64:
            source[0] = 1 << 22  # The GPU reports a token that the vocabulary does not have.
        copy(target, source, kind)

    monkeypatch.setattr(gpu, "copy", spoilt)
    with pytest.raises(ComputeError, match="a logit is NaN or infinite"):
        decoder.prefill([1])
    assert decoder.position == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim": 320}, "heads of 320 numbers"),
        ({"vocabulary": (1 << 22) + 1}, "4,194,305 tokens"),
    ],
)
def test_what_no_kernel_is_made_for_is_refused_before_anything_is_moved(
    changed: dict[str, int], said: str, gpu: Any, model_files: dict[str, Path]
) -> None:
    model = replace(read_model(model_files["qwen2"], FAMILIES), **changed)
    with pytest.raises(ModelError, match=said):
        model_on(gpu, model, is_exact=False)


def test_a_matrix_whose_rows_are_not_of_whole_eights_is_refused(gpu: Any, model_files: dict[str, Path]) -> None:
    model = read_model(model_files["qwen2"], FAMILIES)
    odd = QuantizedMatrix.of(F32, np.zeros((4, 12), np.float32))
    with pytest.raises(ModelError, match="12 columns, no multiple of 8"):
        model_on(gpu, replace(model, lm_head=odd), is_exact=True)


def test_what_is_checked_is_what_a_pass_launches(gpu: FakeGpu, model_files: dict[str, Path]) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False), is_eager=True)
    decoder.decode(1)  # The first step prepares the launches and runs them.
    launched: list[str] = []
    gpu.before_launch = lambda one: launched.append(one.entry)
    decoder.decode(1)
    expected = [*launched]
    assert "rms_norm_int8" in expected
    launched.clear()
    decoder.verify([1])
    assert launched == expected


def test_a_mixture_token_needs_no_copy_to_the_host_and_repeats_its_graph(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen3moe"], BrickProfiler(enabled=False))

    def host(array: Any) -> Any:
        raise AssertionError("a copy to the host")

    monkeypatch.setattr(gpu, "host", host)
    launched: list[str] = []
    gpu.before_launch = lambda one: launched.append(one.entry)
    decoder.decode(1)  # This step captures the launches as a graph.
    assert launched.count("expert_gated_in_turn") == launched.count("route") > 0
    launched.clear()
    decoder.decode(2)
    assert launched == []  # The graph runs the captured launches, so the host launches nothing.
    with pytest.raises(AssertionError, match="a copy to the host"):
        decoder.prefill([1, 2, 3])


def test_a_norm_of_a_gpu_reads_its_row_once(gpu: FakeGpu, model_files: dict[str, Path]) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    work = decoder.bricks.final_norm.definition.work
    assert work is not None
    assert work.bytes_per_element == 4 + 4


def test_what_a_decoder_has_on_a_gpu_goes_with_it(
    gpu: FakeGpu, model_files: dict[str, Path], recorder: ListRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros, made = gpu.zeros, []

    def noted(shape: Any, dtype: Any) -> Any:
        array = zeros(shape, dtype)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(gpu, "zeros", noted)
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(recorder=recorder))
    decoder.decode(decoder.prefill([1, 2]))
    assert any(array() is not None for array in made)
    del decoder
    assert not [array for array in made if array() is not None]


def test_stamps_are_valid_only_if_all_launches_begin_and_end_in_order() -> None:
    whole = np.array([(5_000, 6_000), (6_416, 9_000), (9_416, 9_416)], np.uint64)
    assert have_run(whole, 4_000)
    # The first kernel has time stamps of an earlier pass, so this pass has not run completely.
    assert not have_run(whole, 9_416)
    for at, value in (((1, 1), 4_000), ((1, 1), 90_000), ((2, 0), 1), ((2, 1), 9_415)):
        stamps = whole.copy()
        stamps[at] = value
        assert not have_run(stamps, 4_000), (at, value)


def given_to(gpu: FakeGpu, entry: str, kind: Any) -> list[list[int]]:
    """Return a list that grows with each later launch of `entry`.

    It gets the values of the argument arrays of type `kind`.
    """
    found: list[list[int]] = []

    def note(one: Any) -> None:
        if one.entry.startswith(entry):
            arrays = [array for array in one.arguments if isinstance(array, np.ndarray)]
            found.extend(array.tolist() for array in arrays if array.dtype == kind)

    gpu.before_launch = note
    return found


def test_parts_of_a_prompt_have_their_tokens_and_positions_also_if_repeated(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuMachine, "most_together", 4)
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    for first in (3, 20):
        decoder.restart()
        tokens = given_to(gpu, "embedding", np.int64)
        decoder.prefill(range(first, first + 6))
        assert tokens == [[first, first + 1, first + 2, first + 3], [first + 4, first + 5]]
    starts = given_to(gpu, "rope", np.int32)
    decoder.prefill(range(6))  # The second prompt continues the sequence after the first prompt.
    layers = len(decoder.model.layers)
    assert starts == [[6]] * layers + [[10]] * layers
    tokens = given_to(gpu, "embedding", np.int64)
    decoder.decode(7)
    assert tokens[-1] == [7]


def test_a_prompt_pass_is_made_once_per_length_and_position_and_few_are_kept(
    gpu: FakeGpu, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(gpu, model_files["qwen2"], BrickProfiler(enabled=False))
    made: list[int] = []
    prepared = gpu.prepared

    def noted(one: Any, *stamp: Any, **how: Any) -> Any:
        if one.entry.startswith("embedding"):
            arrays = [array for array in one.arguments if isinstance(array, np.ndarray)]
            made.extend(len(array) for array in arrays if array.dtype == np.int64)  # the tokens
        return prepared(one, *stamp, **how)

    monkeypatch.setattr(gpu, "prepared", noted)
    for count in (5, 5, 6, 7, 8, 5, 9, 6):
        decoder.restart()
        decoder.prefill(range(count))
    assert made == [5, 6, 7, 8, 9, 6]
    decoder.prefill(range(6))
    assert made[-1] == 6
