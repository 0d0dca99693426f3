"""Tests of the demo's workload with a tiny model.

They test which messages the workload sends, in which order, and when it stops.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbtop.compute import backends, brick, ceilings, workload
from cbtop.compute.contracts import WEIGHTS
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.decoder.machine import Host
from cbtop.compute.demo_model import TINY_GEMMA2, write_model
from cbtop.compute.errors import ComputeError, GuardError, NoTokenError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.gguf_header import read_header
from cbtop.compute.jit import cpu
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, TIER
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.settings import Crossovers, WorkloadOptions, with_crossovers
from cbtop.compute.tokenizer import read_tokenizer
from cbtop.compute.workload import run, verify_model, verify_pass
from cbtop.profiler.analysis import roofline
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Ceiling, CheckResult, Manifest, Node
from cbtop.protocol.structure_messages import Conditions
from cbtop.protocol.vocabulary import NodeKind, Provenance
from tests.representatives import first_by_default

from .conftest import ListRecorder
from .rewritten import rewritten


def silent(what: str, done: float | None) -> None:
    """A progress function that does nothing."""


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small buffer to measure peak rates, because a gigabyte is too much for a test."""
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER_BYTES", 16 << 20)


def steps_of(recorder: ListRecorder) -> Counter[str]:
    names = {m.id: m.name for m in recorder.messages if isinstance(m, Node) and m.parent is None}
    return Counter(names[tag] for tag, _ in recorder.records if tag in names)


@pytest.fixture(autouse=True)
def no_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that kernels are compiled, because a first run would compile them in a forked process."""
    monkeypatch.setattr(backends, "is_first_run", lambda: False)


def test_it_says_what_it_runs_before_it_runs(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    told: list[str] = []
    options = WorkloadOptions(model=model_files["qwen2"], steps=3, threads=1)
    run(options, profiler, lambda: False, lambda text, fraction: told.append(text))
    kinds = [type(message) for message in recorder.messages]
    assert list(dict.fromkeys(kinds)) == [Manifest, Conditions, CheckResult, Ceiling, Node]
    assert told == ["reading the model", "compiling kernels", "checking the bricks", "measuring ceilings", ""]
    manifest = next(m for m in recorder.messages if isinstance(m, Manifest))
    assert (manifest.architecture, manifest.quantization, manifest.layers) == ("qwen2", "Q4_K+Q6_K", 2)
    assert manifest.threads == 1
    assert manifest.backend.endswith("×1")
    assert all(message.passed for message in recorder.messages if isinstance(message, CheckResult))


def roof(name: str, value: float, median: float) -> Ceiling:
    return Ceiling(name, "bandwidth", value, "GB/s", Provenance.MEASURED, median)


ROOFS = {name: roof(name, value, value) for name, value in (("dram_read", 20.0), (WEIGHTS, 18.0))}
IN_CACHE = ROOFS | {WEIGHTS: roof(WEIGHTS, 50.0, 50.0)}
UNSURE = ROOFS | {WEIGHTS: roof(WEIGHTS, 18.0, 16.0)}
of_better_processors = pytest.mark.skipif(TIER == "generic", reason="bounds in contracts are of better processors")


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow budgets of any length. Tiny models have few weights, so their budgets are below the usual minimum."""
    monkeypatch.setattr(brick, "LEAST_BUDGET_US", 0.0)


def budgets_in(phase: str, recorder: ListRecorder) -> dict[str, float | None]:
    """Return the budget of each brick in GB/s, by name. Bricks without a budget have None."""
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    found = {}
    for one in nodes.values():
        outer = one
        while outer.parent is not None:
            outer = nodes[outer.parent]
        if outer.name == phase and one.kind is NodeKind.BRICK:
            found[one.name] = one.budget_gb_per_sec
    return found


@of_better_processors
@pytest.mark.usefixtures("shortest")
@pytest.mark.parametrize("family", ["qwen2", "qwen3moe"])
def test_bricks_that_read_weights_have_a_budget_of_twice_the_contract_time(
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    # Accept any variation of the measured peak rates, because the machine may be busy.
    monkeypatch.setattr(roofline, "UNSURE_PERCENT", 100)
    run(WorkloadOptions(model=model_files[family], steps=2, threads=1), profiler, lambda: False, silent)
    ceilings = {one.name: one.value for one in recorder.messages if isinstance(one, Ceiling)}
    lower = min(ceilings["dram_read"], ceilings[WEIGHTS])
    dense = {"GateUpActivation (fused)": 0.85, "DownProjection": 0.86}
    fractions = {"QkvProjection": 0.87, "OutputProjection": 0.86, "LmHead": 0.86}
    # By brick: the fraction of the peak rate that the contract of its kernel requires.
    fractions |= {"MoeExperts": 0.81} if family == "qwen3moe" else dense
    found = {name: rate for name, rate in budgets_in("decode", recorder).items() if rate}
    assert found == pytest.approx({name: lower * fraction / 2 for name, fraction in fractions.items()})
    of_many = {name for name, rate in budgets_in("prefill", recorder).items() if rate}
    # In a prefill, only the LM head has a budget, because it multiplies only the last token.
    assert of_many == {"LmHead"}


@of_better_processors
@pytest.mark.usefixtures("shortest")
@pytest.mark.parametrize(
    ("roofs", "is_exact", "of_qkv"),
    [
        (ROOFS, False, 18 * 0.87 / 2),
        (IN_CACHE, False, 20 * 0.87 / 2),
        (UNSURE, False, None),
        ({WEIGHTS: ROOFS[WEIGHTS]}, False, None),
        (ROOFS, True, None),
    ],
    ids=["from memory", "from a cache", "an unsure roof", "one roof", "activations as they are"],
)
def test_a_budget_is_of_int8_and_of_the_lower_of_two_roofs_that_are_sure(
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    roofs: dict[str, Ceiling],
    is_exact: bool,
    of_qkv: float | None,
) -> None:
    decoder = Decoder(model_to_run(model_files["qwen2"], is_exact=is_exact), "numba", 1, profiler, context=16)
    workload.set_budgets(decoder, roofs)
    decoder.decode(1)
    found = budgets_in("decode", recorder)
    assert found["QkvProjection"] == (None if of_qkv is None else pytest.approx(of_qkv))
    assert found["RmsNorm"] is None
    assert of_qkv or not any(found.values())


@of_better_processors
@pytest.mark.usefixtures("shortest")
def test_a_brick_that_also_multiplies_activations_as_they_are_has_no_budget(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    path = model_files["qwen2"]
    q, k = (one.weight.size_bytes for one in (model_to_run(path).layers[0].q, model_to_run(path).layers[0].k))
    assert k < q
    with with_crossovers(Crossovers(exact_bytes=q)):
        decoder = Decoder(model_to_run(path), "numba", 1, profiler, context=16)
    workload.set_budgets(decoder, ROOFS)
    decoder.decode(1)
    assert budgets_in("decode", recorder)["QkvProjection"] is None


@of_better_processors
@pytest.mark.parametrize("why", ["calls are short", "the format is further from reading", "it fell back"])
def test_there_is_no_budget_where(
    why: str,
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder(model_to_run(model_files["qwen2"]), "numba", 1, profiler, context=16)
    if why != "calls are short":
        monkeypatch.setattr(brick, "LEAST_BUDGET_US", 0.0)
    if why == "the format is further from reading":
        monkeypatch.setitem(FORMATS, Q6_K.code, replace(Q6_K, has_budget=False))
    workload.set_budgets(decoder, ROOFS)
    if why == "it fell back":
        for one in decoder.bricks.places():
            one.fall_back()
    decoder.decode(1)
    assert set(budgets_in("decode", recorder).values()) == {None}


def test_a_full_context_starts_the_sequence_again(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    options = WorkloadOptions(model=model_files["llama"], steps=20, threads=1, context=16)
    run(options, profiler, lambda: False, lambda text, fraction: None)
    # A context of 16 positions has room for a prompt of 8 tokens and 8 decode steps, so there are three sequences.
    assert steps_of(recorder) == {"prefill": 3, "decode": 20}


@pytest.mark.parametrize(
    ("context", "said"),
    [(64, []), (None, []), (4096, ["a context of 4,096 tokens is cut to the 64 that the model was trained for"])],
)
def test_a_longer_context_than_the_model_was_trained_for_is_cut_and_said_so(
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    caplog: pytest.LogCaptureFixture,
    context: int | None,
    said: list[str],
) -> None:
    options = WorkloadOptions(model=model_files["llama"], steps=1, threads=1, context=context)
    run(options, profiler, lambda: False, lambda text, fraction: None)
    assert caplog.messages == said
    assert next(m for m in recorder.messages if isinstance(m, Manifest)).context_length == 64


def test_a_prompt_is_gone_on_from_until_the_end_of_the_text(
    model_files: dict[str, Path], tmp_path: Path, profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'cbtop[text]'")
    from .vocabularies import byte_level

    def written(steps: int | None, keys: dict[str, int]) -> str:
        path = rewritten(model_files["qwen2"], tmp_path / "model.gguf", byte_level() | keys)
        texts: list[str] = []
        options = WorkloadOptions(model=path, steps=steps, threads=1, prompt="Hello")
        run(options, profiler, lambda: False, lambda text, fraction: None, texts.append)
        return "".join(texts)

    of_three = written(3, {})
    assert steps_of(recorder) == {"prefill": 1, "decode": 3}
    assert of_three.startswith("Hello")
    with GgufFile.open(tmp_path / "model.gguf") as file:
        tokenizer = read_tokenizer(file)
    chosen: list[int] = []
    model = read_model(tmp_path / "model.gguf", FAMILIES)
    decoder = Decoder(model, "numba", 1, BrickProfiler(enabled=False), 16)
    token = decoder.prefill(tokenizer.encode("Hello"))
    for _ in range(3):
        chosen.append(token)
        token = decoder.decode(token)
    assert of_three == tokenizer.decode([*tokenizer.encode("Hello"), *chosen, token]) + "\n"
    recorder.records.clear()
    assert written(None, {"tokenizer.ggml.eos_token_id": chosen[0]}) == "Hello\n"
    assert steps_of(recorder) == {"prefill": 1}


@pytest.mark.parametrize(
    ("prompt", "context", "wanted"),
    [
        (
            "weights " * 40,
            32,
            r"no room in a context of 32; give a shorter one, or a larger --context \(the model's: 64\)$",
        ),
        ("weights " * 80, 99, "no room in a context of 64; give a shorter one$"),
        ("", None, "the prompt is empty, and the model has no token to begin with; give a word$"),
    ],
    ids=["longer than the context", "longer than the model's", "empty"],
)
def test_a_prompt_that_cannot_be_continued_is_refused_with_a_usable_way_out(
    model_files: dict[str, Path],
    tmp_path: Path,
    profiler: BrickProfiler,
    prompt: str,
    context: int | None,
    wanted: str,
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'cbtop[text]'")
    from .vocabularies import byte_level

    path = rewritten(model_files["qwen2"], tmp_path / "model.gguf", byte_level())
    options = WorkloadOptions(model=path, threads=1, context=context, prompt=prompt)
    with pytest.raises(ComputeError, match=wanted):
        run(options, profiler, lambda: False, lambda text, fraction: None)


@pytest.fixture
def overflowing(model_files: dict[str, Path], tmp_path: Path) -> Path:
    """Write a model whose last layer has a norm that computes infinity."""
    path = tmp_path / "overflowing.gguf"
    data = bytearray(model_files["qwen2"].read_bytes())
    with model_files["qwen2"].open("rb") as stream:
        tensor = read_header(stream, model_files["qwen2"]).tensors["blk.1.ffn_norm.weight"]
    np.frombuffer(data, np.float32, tensor.size_bytes // 4, tensor.offset)[:] = 3e38
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("guard", "met"), [(None, NoTokenError), ("stop", GuardError)])
def test_a_model_with_non_finite_results_runs_until_checks_name_the_brick(
    overflowing: Path, profiler: BrickProfiler, recorder: ListRecorder, guard: str | None, met: type[Exception]
) -> None:
    options = WorkloadOptions(model=overflowing, steps=1, threads=1, guard=guard)
    with pytest.raises(met):
        run(options, profiler, lambda: False, lambda *_: None)
    checks = [message for message in recorder.messages if isinstance(message, CheckResult)]
    assert {check.brick for check in checks if not check.passed} == {"AddRmsNorm (fused)"}


def test_a_whole_pass_without_a_number_fails_as_not_finite(overflowing: Path) -> None:
    for found in verify_pass(overflowing, 1, is_exact=True):
        assert (found.passed, found.max_error, found.not_finite) == (False, None, "NaN or infinity")


def test_it_stops_between_steps_when_told(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    options = WorkloadOptions(model=model_files["llama"], threads=1)
    run(options, profiler, lambda: steps_of(recorder)["decode"] >= 5, lambda text, fraction: None)
    assert steps_of(recorder) == {"prefill": 1, "decode": 5}


def test_a_context_without_room_to_decode_is_refused(model_files: dict[str, Path], profiler: BrickProfiler) -> None:
    for context in (-1, 0, 1):
        options = WorkloadOptions(model=model_files["llama"], steps=1, threads=1, context=context)
        with pytest.raises(ComputeError, match=f"a context of {context} leaves no room to decode; give 2 or more"):
            run(options, profiler, lambda: False, lambda text, fraction: None)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (WorkloadOptions(threads=-1, steps=1), "^-1 threads: this process may use 1 to "),
        (WorkloadOptions(threads=0, steps=1), "^0 threads: this process may use 1 to "),
        (WorkloadOptions(threads=1, steps=0), "^0 steps; give 1 or more$"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_model_is_read(
    profiler: BrickProfiler, options: WorkloadOptions, wanted: str
) -> None:
    told: list[str] = []
    with pytest.raises(ComputeError, match=wanted):
        run(options, profiler, lambda: False, lambda text, fraction: told.append(text))
    assert told == []


OF_PRODUCTS = [
    *["dot_int8"] * (TIER != "generic"),
    *["dot_bfloat16"] * BF16_PAYS,
    *["tiles_bfloat16"] * HAS_TILES,
]


def test_ceilings_are_of_the_right_order() -> None:
    measured = {ceiling.name: ceiling for ceiling in ceilings.measure_ceilings(1, 1 << 20)}
    assert [name for name, found in measured.items() if found.kind != "cache"] == [
        "dram_read", "weights_read", "fma_float32", *OF_PRODUCTS
    ]  # fmt: skip
    assert [measured[name].unit for name in ("fma_float32", *OF_PRODUCTS)] == [
        "GFLOP/s", *["GOP/s" if name == "dot_int8" else "GFLOP/s" for name in OF_PRODUCTS]
    ]  # fmt: skip
    assert [measured[name].dtype for name in ("dram_read", "fma_float32", *OF_PRODUCTS)] == [
        "", "float32", *[name.partition("_")[2] for name in OF_PRODUCTS]
    ]  # fmt: skip
    assert {c.unit for c in measured.values() if c.kind in ("bandwidth", "cache")} == {"GB/s"}
    assert {name for name, found in measured.items() if found.kind == "cache"} <= {"l1_read", "l2_read", "l3_read"}
    assert all(0.1 < ceiling.value < 100_000 for ceiling in measured.values())


def test_a_cache_is_as_large_as_what_each_thread_has_of_it(tmp_path: Path) -> None:
    said = [("1", "Data", "32K", "0-1"), ("1", "Instruction", "32K", "0-1"), ("2", "Unified", "1024K", "0"),
            ("3", "Unified", "32768K", "0-3,8-11"), ("4", "Unified", "odd", "0")]  # fmt: skip
    for at, values in enumerate(said):
        (tmp_path / f"index{at}").mkdir()
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (tmp_path / f"index{at}" / name).write_text(f"{value}\n")
    assert ceilings.cache_bytes(1, tmp_path) == {1: 32 << 10, 2: 1 << 20, 3: 32 << 20}
    assert ceilings.cache_bytes(2, tmp_path) == {1: 16 << 10, 2: 1 << 20, 3: 16 << 20}
    assert ceilings.cache_bytes(16, tmp_path)[3] == 4 << 20
    assert ceilings.cache_bytes(1, tmp_path / "nowhere") == {}


@pytest.mark.parametrize(("has_tiles", "together"), [(False, [5, 1]), (True, [5, 1, 13, 1])])
def test_bricks_are_also_checked_with_many_tokens_if_products_use_tiles(
    has_tiles: bool,
    together: list[int],
    model_files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    put = Host.put

    def seen(host: Host, array: Any, values: Sequence[int]) -> Any:
        passes.append(len(values))
        return put(host, array, values)

    monkeypatch.setattr(Host, "put", seen)
    monkeypatch.setattr(cpu, "HAS_TILES", has_tiles)
    assert all(result.passed for result in verify_model(model_files["llama"], 1, is_exact=False))
    assert passes == together


def test_the_options_do_not_load_numba() -> None:
    code = (
        "import sys, cbtop.compute, cbtop.compute.workload;print([m for m in ('numba', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_pass_agrees_with_float64_and_reports_the_window_it_does_not_reach(tmp_path: Path, is_exact: bool) -> None:
    for name, shape, unseen in (("narrow", TINY_GEMMA2, ""), ("wide", replace(TINY_GEMMA2, window=4096), "4,096")):
        path = tmp_path / f"{name}.gguf"
        write_model(path, shape, lambda *_: None)
        for found in verify_pass(path, 1, is_exact=is_exact):
            assert found.passed
            assert found.note == (f"the window of {unseen} tokens is not reached" if unseen else "")


@first_by_default(
    "fault",
    [
        pytest.param(
            lambda model: replace(model, attention_scale=1.5 * model.attention_scale), id="attention's scale"
        ),
        pytest.param(lambda model: replace(model, window=0), id="no window"),
        pytest.param(lambda model: replace(model, layers=model.layers[:-1]), id="a layer less"),
        pytest.param(lambda model: replace(model, rope=replace(model.rope, layout="normal")), id="RoPE's layout"),
        pytest.param(lambda model: replace(model, embedding_scale=1.0), id="the embedding's scale"),
    ],
    2,
)
def test_a_decoder_that_combines_sound_bricks_wrongly_fails_only_as_a_whole(
    fault: Callable[[Model], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = workload.bare_decoder
    monkeypatch.setattr(workload, "bare_decoder", lambda model, *rest: right(fault(model), *rest))
    path = tmp_path / "model.gguf"
    write_model(path, TINY_GEMMA2, lambda *_: None)
    assert all(one.passed for one in verify_model(path, 1, is_exact=True))
    assert not verify_pass(path, 1, is_exact=True)[0].passed
    assert not verify_pass(path, 1, is_exact=False)[0].passed


@pytest.mark.parametrize("architecture", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3moe"])
def test_two_swapped_logits_fail_alone_though_all_together_are_close_enough(
    architecture: str, model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = workload.bare_decoder

    def broken(*arguments: object) -> Decoder:
        decoder = made(*arguments)
        (right,) = decoder.bricks.lm_head.implementations

        def wrong(*call: Any) -> None:
            right(*call)
            call[4][:, [100, 101]] = call[4][:, [101, 100]]

        decoder.bricks.lm_head.implementations = (wrong,)
        return decoder

    monkeypatch.setattr(workload, "bare_decoder", broken)
    together, each = verify_pass(model_files[architecture], 1, is_exact=False)
    assert together.passed
    assert (each.passed, each.brick) == (False, "LmHead")


@pytest.mark.parametrize(
    ("threads", "tiles", "instructions"), [(1, False, "AVX2"), (1, True, "AVX2, AMX"), (None, True, None)]
)
def test_its_conditions_name_the_instructions_of_kernels_on_a_processor(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, tiles: bool, instructions: str | None
) -> None:
    monkeypatch.setattr(cpu, "TIER", "AVX2")
    monkeypatch.setattr(cpu, "HAS_TILES", tiles)
    place: Any = SimpleNamespace(threads=threads)
    found = {one.name: one.value for one in workload.conditions_of(place).conditions}
    assert found.get("instructions") == instructions
    assert found["NumPy"] == np.__version__
