"""Tests of llama.cpp, which is instrumented by its callback: the library is xllamacpp of PyPI.

Tests of the names of nodes need no library.
"""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.llama_peer import Llama, library, write_model
from cbtop.compute.demo_model import TINY, TINY_LLAMA
from cbtop.profiler.instrument import llama_cpp
from cbtop.profiler.instrument.llama_cpp import BACKEND, bricks_of, callback, ggml_functions
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.integration.hosts import eventually
from tests.profiler.instrument.engines import NODE, places_of, steps_of
from tests.profiler.memory import Memory

compiled = pytest.importorskip("cbtop.profiler._llama_cpp", reason="there was no compiler where cbtop was installed")
SHAPES = {"qwen2": TINY, "llama": TINY_LLAMA}
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    directory = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        write_model(directory / f"{name}.gguf", shape)
    return {name: directory / f"{name}.gguf" for name in SHAPES}


def _generate(llama: Llama, tokens: int) -> list[np.ndarray]:
    """Return the logits of a prompt and of `tokens` further tokens, chosen greedily."""
    logits = [llama.decode(PROMPT)]
    for _ in range(tokens):
        logits.append(llama.decode([int(logits[-1].argmax())]))
    return logits


@pytest.fixture
def recorded(models: dict[str, Path], memory: Memory) -> Iterator[Any]:
    """Yield a function that creates a model in llama.cpp. One in `sample_every` steps of this model is recorded."""
    made = []

    def make(name: str = "qwen2", sample_every: int = 1) -> Llama:
        library()
        made.append(Llama(models[name], *callback(BrickProfiler(recorder=memory, sample_every=sample_every))))
        return made[-1]

    yield make
    for llama in made:
        llama.close()


@pytest.mark.parametrize("name", SHAPES)
def test_each_graph_is_a_step_with_every_layer_and_brick(name: str, recorded: Any, memory: Memory) -> None:
    _generate(recorded(name), 2)
    eventually(lambda: len(steps_of(memory)) == 3)
    assert steps_of(memory) == [("prefill", 5), ("decode", 1), ("decode", 1)]
    places = places_of(memory)
    bricks = {"RmsNorm": 2, "QkvProjection": 3, "RopeEmbedding": 2, "Attention (fused)": 1, "OutputProjection": 1}
    bricks |= {"GateProjection": 1, "UpProjection": 1, "Activation": 1, "DownProjection": 1}
    for phase, steps in (("prefill", 1), ("decode", 2)):
        for layer in range(SHAPES[name].layers):
            assert places[f"{phase} / {layer}"] == steps
            assert {brick: places[f"{phase} / {layer} / {brick}"] for brick in bricks} == {
                brick: count * steps for brick, count in bricks.items()
            }
            # llama.cpp may write keys and values together, or in two operations.
            assert places[f"{phase} / {layer} / KvWrite"] in (steps, 2 * steps)
        assert [places[f"{phase} / {brick}"] for brick in ("Embedding", "RmsNorm", "LmHead")] == [steps] * 3
    labels = {node.label for node in memory.said if isinstance(node, Node) and node.name == "QkvProjection"}
    assert labels == {"Qcur", "Kcur", "Vcur"}
    assert {node.backend for node in memory.said if isinstance(node, Node) and node.brick is not None} == {BACKEND}


def test_one_step_in_three_is_recorded_and_all_logits_are_unchanged(
    models: dict[str, Path], recorded: Any, memory: Memory
) -> None:
    llama, bare = recorded(sample_every=3), Llama(models["qwen2"])
    ours, theirs = _generate(llama, 7), _generate(bare, 7)
    bare.close()
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    eventually(lambda: len(steps_of(memory)) == 3)
    # One in three steps is recorded: the first, the fourth and the seventh.
    assert steps_of(memory) == [("prefill", 5), ("decode", 1), ("decode", 1)]
    assert places_of(memory)["decode / LmHead"] == 2


def test_bricks_are_within_layers_and_layers_within_their_step_in_order(recorded: Any, memory: Memory) -> None:
    _generate(recorded(), 0)
    eventually(lambda: bool(steps_of(memory)))
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    times = {kind: [] for kind in NodeKind}
    for tag, start, end, _ in memory.records:
        times[nodes[tag & NODE].kind].append((start, end))
    (step,) = times[NodeKind.STEP]
    assert all(step[0] <= start <= end <= step[1] for kind in times.values() for start, end in kind)
    for kind in (NodeKind.BRICK, NodeKind.LAYER):
        assert all(before[1] <= after[0] for before, after in pairwise(times[kind]))
    for start, end in times[NodeKind.LAYER]:
        assert any(
            (start, end) == (first[0], last[1]) for first in times[NodeKind.BRICK] for last in times[NodeKind.BRICK]
        )


def test_graphs_for_which_there_is_no_room_are_counted(models: dict[str, Path]) -> None:
    library()
    function, user_data = compiled.create(*ggml_functions(), 1, os.eventfd(0))
    llama = Llama(models["qwen2"], function, user_data)
    _generate(llama, 11)
    lost, graphs = compiled.take(user_data)
    assert (lost, [graph[0] for graph in graphs]) == (4, list(range(8)))
    llama.decode([1])
    assert [graph[2:4] for graph in compiled.take(user_data)[1]] == [(1, 1)]
    compiled.stop(user_data)
    llama.decode([1])
    assert compiled.take(user_data) == (0, [])
    llama.close()


def test_what_was_lost_is_counted_by_the_profiler(memory: Memory) -> None:
    BrickProfiler(recorder=memory).parts.steps.record("decode", 1, 10, 20, [], lost=2)
    assert [tag & NODE for tag, *_ in memory.records] == [1, 0, 0]


def test_two_contexts_that_share_a_callback_give_whole_graphs_or_none(
    models: dict[str, Path], memory: Memory
) -> None:
    library()
    addresses = callback(BrickProfiler(recorder=memory))
    llamas = [Llama(models["qwen2"], *addresses) for _ in range(2)]
    threads = [threading.Thread(target=_generate, args=(llama, 20)) for llama in llamas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begun = 2 * 21

    def all_are_told() -> bool:
        """Run a step, and return whether all lost records have been reported by now.

        Losses are reported with the next record, so another step must run.
        """
        nonlocal begun
        before = begun
        told = len(steps_of(memory)) + sum(not tag & NODE for tag, *_ in list(memory.records))
        llamas[0].forget()
        llamas[0].decode([1])
        begun += 1
        return told == before

    eventually(all_are_told)
    eventually(lambda: len(steps_of(memory)) + sum(not tag & NODE for tag, *_ in memory.records) == begun)
    places = places_of(memory)
    for phase in {name for name, _ in steps_of(memory)}:
        assert {places[f"{phase} / {place}"] for place in ("Embedding", "0", "1", "LmHead")} == {places[phase]}
    for llama in llamas:
        llama.close()


@pytest.mark.slow
def test_the_last_run_before_exit_is_recorded_and_a_forked_child_exits_well(
    models: dict[str, Path], runtime: Path
) -> None:
    program = f"""
import os
from pathlib import Path
from benchmarks.llama_peer import Llama, library
from cbtop.profiler.instrument.llama_cpp import callback
from cbtop.profiler.profiler import BrickProfiler
library()
llama = Llama(Path({str(models["qwen2"])!r}), *callback(BrickProfiler()))
if not os.fork():
    raise SystemExit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
llama.decode([1, 2, 3])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    said = [node for path in runtime.glob("*.catalog") for node in CatalogReader(path).read()]
    assert [node.name for node in said if isinstance(node, Node) and node.kind is NodeKind.STEP] == ["prefill"]


def test_without_a_library_of_llama_cpp_that_is_said(tmp_path: Path) -> None:
    program = (
        "from cbtop.profiler.instrument.llama_cpp import callback\n"
        "from cbtop.profiler.profiler import BrickProfiler\n"
        "try: callback(BrickProfiler())\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "no library with ggml's functions is loaded: import llama.cpp's binding first\n"


def test_without_the_compiled_part_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cbtop.profiler._llama_cpp", None)
    monkeypatch.delattr("cbtop.profiler._llama_cpp")
    with pytest.raises(ValueError, match="without its compiled part"):
        callback(BrickProfiler(enabled=False))


def test_where_threads_are_greenlets_nothing_waits_in_them_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # gevent replaces this function, so that threads become greenlets.
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, args: function(*args))
    with pytest.raises(ValueError, match="threads are greenlets here"):
        callback(BrickProfiler(enabled=False))


def test_what_fails_of_ours_is_one_line_and_the_model_goes_on(
    recorded: Any, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(llama_cpp, "bricks_of", lambda nodes: 1 / 0)
    llama = recorded()
    with caplog.at_level("WARNING", "cbtop"):
        _generate(llama, 3)
        eventually(lambda: caplog.records)
        _generate(llama, 3)
    assert caplog.messages == ["cbtop: llama.cpp is no longer shown: ZeroDivisionError: division by zero"]
    assert memory.records == []


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("norm-0 RMS_NORM, a_norm-0 MUL, norm-0 RMS_NORM, f_norm-0 MUL", "0 RmsNorm a_norm, 0 RmsNorm f_norm"),
        ("norm-3 NORM, attn_norm-3 MUL, attn_norm-3 ADD", "3 LayerNorm attn_norm"),
        ("Qcur-0 MUL_MAT, Qcur-0 ADD, Qcur-0 ROPE", "0 QkvProjection Qcur, 0 RopeEmbedding Qcur"),
        ("wqkv-0 MUL_MAT, bqkv-0 ADD", "0 QkvProjection wqkv, 0 ADD bqkv"),
        ("Kcur_normed-7 RMS_NORM, Kcur_normed-7 MUL", "7 RmsNorm Kcur_normed"),
        ("cache_k_l12 (view) SET_ROWS, cache_v_l12 (view) CPY", "12 KvWrite"),
        (
            "kq-1 MUL_MAT, kq_soft_max-1 SOFT_MAX, kqv-1 MUL_MAT, kqv_out-1 CONT, node_44 MUL_MAT",
            "1 AttentionScore kq, 1 AttentionSoftmax, 1 AttentionOutput, 1 OutputProjection",
        ),
        ("node_27 FLASH_ATTN_EXT, attn_out-0 MUL_MAT", "- Attention (fused), 0 OutputProjection attn_out"),
        ("l_out-3 ADD, node_9 MUL_MAT", "3 ADD l_out, 3 MUL_MAT"),
        (
            "ffn_moe_logits-2 MUL_MAT, ffn_moe_probs-2 SOFT_MAX, ffn_moe_gate-2 MUL_MAT_ID, ffn_moe_swiglu-2 SWIGLU,"
            "ffn_moe_down-2 MUL_MAT_ID, ffn_moe_out-2 ADD",
            "2 MoeRouter, 2 MoeExperts",
        ),
        ("ffn_gate-0 MUL_MAT, ffn_silu-0 SILU, ffn_up-0 MUL_MAT, ffn_gate_par-0 MUL, ffn_out-0 MUL_MAT",
         "0 GateProjection ffn_gate, 0 Activation ffn_silu, 0 UpProjection ffn_up, 0 Activation ffn_gate_par,"
         "0 DownProjection ffn_out"),
        ("mamba-0 SSM_SCAN, l_out-0 FLUX", "0 Mixer, 0 FLUX l_out"),
        ("norm RMS_NORM, result_norm MUL, result_output MUL_MAT", "- RmsNorm result_norm, - LmHead result_output"),
    ],
)  # fmt: skip
def test_a_node_is_the_brick_its_name_and_operation_say(nodes: str, expected: str) -> None:
    ran = [(*line.strip().rsplit(" ", 1), 1, at, at + 1) for at, line in enumerate(nodes.split(","))]
    bricks = bricks_of(ran)  # type: ignore[arg-type]
    found = [f"{'-' if it.layer is None else it.layer} {it.kind.name} {it.label}".strip() for it in bricks]
    assert found == [line.strip() for line in expected.split(",")]
    assert (bricks[0].start_ns, bricks[-1].end_ns) == (0, len(ran))
