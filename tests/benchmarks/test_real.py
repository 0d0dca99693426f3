"""The benchmark of real programs: each program runs, and its figures are compared and written correctly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.base import Ratio
from benchmarks.real import run, turns
from benchmarks.real.comparison import HEADER, Comparison, Overhead, Row, Share, beyond, comparison, details, line
from benchmarks.real.names import brick_of
from benchmarks.real.programs import FOLDER, PROGRAMS, Program, ProgramError

HELPERS = {"steady", "llama", "blocks", "slow_layer", "training_loops"}
DEADLINE_S = 300
ROOT = FOLDER.parents[1]


def output_of(*arguments: str) -> str:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_program_of_the_folder_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - HELPERS == {one.path.stem for one in PROGRAMS.values()}


def test_no_program_imports_cbtop() -> None:
    assert [path.name for path in FOLDER.glob("*.py") if "cbtop" in path.read_text()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_on_a_cpu_and_prints_its_steps(name: str) -> None:
    program = PROGRAMS[name]
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    if program.needs_cuda or "vllm" in program.needs:
        pytest.skip("it needs a CUDA device")
    for needed in program.needs:
        pytest.importorskip(needed)
    steps = turns.STEPS.search(output_of(str(program.path), "1", *program.arguments))
    assert steps is not None
    assert int(steps[1]) > 0
    assert float(steps[2]) >= 1
    assert float(steps[3]) > 0


def test_a_program_that_cannot_run_here_is_skipped_with_its_reason() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    assert run.skipped(Program("serve", needs=("no_such_module",)), True) == "no_such_module is not installed"
    assert run.skipped(PROGRAMS["captured"], False) == "it needs a CUDA device"
    assert run.skipped(PROGRAMS["captured"], True) == ""


def test_a_program_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.options_of(["gpt", "gtp"])
    assert stopped.value.code == 2
    assert "no program is called 'gtp'" in capsys.readouterr().err


def test_a_program_that_fails_is_reported_with_its_last_line() -> None:
    options = run.Options(["gpt"], 1.0)
    with pytest.raises(ProgramError, match="exit code 1: ZeroDivisionError"):
        run.output([sys.executable, "-c", "1 / 0"], options)
    for failing, expected in (("print('hello')", "it wrote nothing on stderr"), ("1 / 0", "ZeroDivisionError")):
        with (
            turns.Turns(Program("gpt"), [sys.executable, "-c", failing]) as program,
            pytest.raises(ProgramError, match=expected),
        ):
            program.step_ms(0.1)


@pytest.mark.slow
def test_programs_run_only_in_their_turns() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    with turns.Turns(PROGRAMS["gpt"], []) as program:
        found = [program.step_ms(0.2) for _ in range(2)]
    assert all(0 < step.processor <= 2 * step.wall for step in found)


def test_the_overhead_is_that_of_turns_between_bare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, float]] = []
    bare_ms = [10.0, 11.0, 12.0]  # duration of the bare step in ms; it grows during the run

    class Fake:
        def __init__(self, program: Program, before: list[str]) -> None:
            self._is_bare = not before

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def step_ms(self, seconds: float) -> turns.StepMs:
            asked.append((self._is_bare, seconds))
            if seconds not in (turns.BARE_SECONDS, turns.WATCHED_SECONDS):
                return turns.StepMs(99, 99)  # The time of a warm-up. It must not be counted.
            index = asked.count((True, turns.BARE_SECONDS)) - 1
            wall = bare_ms[index] if self._is_bare else 1.1 * (bare_ms[index] + 0.5)
            return turns.StepMs(wall, wall / 2)

    monkeypatch.setattr(turns, "Turns", Fake)
    found = turns.pair(PROGRAMS["gpt"], 2, "")
    assert found == pytest.approx((11.5, 1.1, (1.1 + 12 / 11) / 2, 1.1))
    assert turns.WATCHED_SECONDS > turns.BARE_SECONDS


@pytest.mark.slow
def test_the_oracle_times_the_modules_of_an_unedited_program(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    result = tmp_path / "oracle.json"
    output_of("-m", "benchmarks.real.oracle", str(result), str(PROGRAMS["gpt"].path), "0.2")
    (kind,) = json.loads(result.read_text()).values()
    assert kind["calls"] > 0
    assert {"QkvProjection", "Attention (fused)", "LayerNorm", "LmHead"} < {one["name"] for one in kind["bricks"]}


@pytest.mark.parametrize(
    ("path", "class_name", "is_leaf", "brick"),
    [
        ("model.layers.3.self_attn.q_proj", "Linear", True, ("QkvProjection", "Attention")),
        ("base_model.layers.0.self_attn.q_proj.lora_A.default", "Linear", True, ("QkvProjection", "Attention")),
        ("encoder.layer.0.attention.output.dense", "Linear", True, ("OutputProjection", "Attention")),
        ("encoder.layer.0.output.dense", "Linear", True, ("DownProjection", "FFN")),
        ("encoder.layer.0.output.LayerNorm", "LayerNorm", True, ("LayerNorm", "Norm")),
        ("layers.0.attn", "Attention", False, ("AttentionBlock", "Attention")),
        ("layers.0.attn.attn", "Attention", True, ("Attention (fused)", "Attention")),
        ("layers.0.mlp", "MLP", False, ("FeedForwardBlock", "FFN")),
        ("classifier", "Linear", True, ("Linear", "Other")),
        ("layers.0", "Block", False, None),
    ],
)
def test_the_oracle_names_a_module_by_path_and_class(
    path: str, class_name: str, is_leaf: bool, brick: tuple[str, str] | None
) -> None:
    assert brick_of(path, class_name, is_leaf) == brick


def annotation(name: str, begin: float, end: float) -> dict[str, object]:
    return {"cat": "user_annotation", "name": name, "tid": 1, "ts": begin, "dur": end - begin}


def launch(correlation: int, at: float, name: str = "cudaLaunchKernel") -> dict[str, object]:
    return {"cat": "cuda_runtime", "name": name, "tid": 1, "ts": at, "dur": 1, "args": {"correlation": correlation}}


def kernel(correlation: int, at: float, took: float, name: str) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "tid": 7, "ts": at, "dur": took, "args": {"correlation": correlation}}


EAGER = [
    annotation("root:GPT 1, 48 positions", 0, 100),
    annotation("brick:", 1, 99),
    annotation("brick:LayerNorm/Norm", 10, 20),
    annotation("brick:LmHead/Other", 30, 50),
    launch(1, 12),
    launch(2, 40),
    launch(3, 60),
    launch(4, 200),  # The kernel with the id 4 is launched after all annotations of bricks have ended.
    kernel(1, 300, 5, "norm"),
    kernel(2, 310, 20, "gemm"),
    kernel(3, 340, 2, "copy"),
    kernel(4, 350, 9, "argmax"),
]


def test_a_traced_kernel_belongs_to_the_innermost_module_that_launched_it() -> None:
    oracle = pytest.importorskip("benchmarks.real.oracle")
    kinds, calls = oracle.of_trace(EAGER)
    assert kinds == {"GPT 1, 48 positions": {("LayerNorm", "Norm"): 5, ("LmHead", "Other"): 20, None: 2}}
    assert calls == {"GPT 1, 48 positions": 1}


def test_kernels_of_a_replay_belong_to_the_modules_of_a_similar_eager_call() -> None:
    oracle = pytest.importorskip("benchmarks.real.oracle")
    replays = [
        launch(5, 400, "cudaGraphLaunch"),
        kernel(5, 420, 3, "gemm"),
        kernel(5, 410, 1, "norm"),
        kernel(5, 430, 4, "copy"),
        launch(6, 500, "cudaGraphLaunch"),
        kernel(6, 510, 1, "another"),
    ]
    kinds, calls = oracle.of_trace([*EAGER, *replays])
    assert kinds["replay"] == {("LayerNorm", "Norm"): 1, ("LmHead", "Other"): 3, None: 4}
    assert (calls["replay"], calls["replay of unknown kernels"]) == (1, 1)


def brick(name: str, category: str, us: float) -> dict[str, object]:
    return {"name": name, "category": category, "total_exclusive_us": us, "us": us}


def test_shares_are_of_the_time_in_bricks_that_both_time() -> None:
    snapshot = {
        "phase": "decode",
        "bricks": [
            brick("QkvProjection", "Attention", 50),
            brick("RopeEmbedding", "Attention", 10),
            brick("LayerNorm", "Norm", 38),
            brick("Embedding", "Other", 2),
            # Embedding and Sampling are not modules of the model, so they are not compared.
            brick("Sampling", "Other", 500),
        ],
    }
    kinds = [
        {
            "kind": "GPT 1, 1 positions",
            "bricks": [
                brick("QkvProjection", "Attention", qkv),
                brick("AttentionBlock", "Attention", 10),
                brick("LayerNorm", "Norm", 90 - qkv),
                # The snapshot of cbtop lacks this brick, so it is not compared.
                brick("FeedForwardBlock", "FFN", 900),
            ],
        }
        for qkv in (42, 48)
    ]
    found = comparison(snapshot, kinds)
    assert found.categories == [
        Share("Attention", 60, 55, pytest.approx(6)),
        Share("Norm", 38, 45, pytest.approx(6)),
        Share("Other", 2, 0, 0),
    ]
    assert [share.name for share in found.bricks] == ["QkvProjection", "LayerNorm", "AttentionBlock"]


def test_kernels_that_no_brick_launched_are_compared_with_the_oracles() -> None:
    snapshot = {"phase": "decode", "bricks": [brick("LayerNorm", "Norm", 30), brick("Other kernels", "Other", 10)]}
    kind = {"kind": "GPT 1, 1 positions", "bricks": [brick("LayerNorm", "Norm", 60)], "between_us": 20}
    assert [(one.name, one.difference) for one in comparison(snapshot, [kind, kind]).bricks] == [
        ("LayerNorm", 0),
        ("Other kernels", 0),
    ]


def test_a_modules_own_kernels_are_compared_with_the_time_between_modules() -> None:
    own = [brick("GPT", "Other", 4) | {"backend": "torch on cuda"}, brick("Block", "Other", 6)]
    kind = {"kind": "GPT 1, 1 positions", "bricks": [brick("LayerNorm", "Norm", 60)], "between_us": 20}
    for rows, shares in ((own[:1], {"LayerNorm": 90, "Other kernels": 10}), (own[1:], {"LayerNorm": 100})):
        snapshot = {"phase": "decode", "bricks": [brick("LayerNorm", "Norm", 36), *rows]}
        assert {one.name: one.ours for one in comparison(snapshot, [kind, kind]).bricks} == shares


SHARES = Comparison(
    "decode",
    "GPT 1, 1 positions",
    [Share("FFN", 51.04, 50.0, 0.5), Share("Norm", 6.5, 10.0, 0.25)],
    [Share("UpProjection", 25.0, 27.0, 0.5)],
)
NOISE = Ratio(1.001, 0.99, 1.012)
HEALTHY = Row("gpt", Overhead(12.345, Ratio(1.012, 1.004, 1.02), NOISE, NOISE), SHARES, [], [])
SLOW = Row(
    "train", Overhead(7.0, Ratio(1.06, 1.02, 1.1), NOISE, NOISE), "the oracle failed: exit code 1: x", ["stuck"], []
)
FAILED = Row("vit", "overhead not measured: x", "not recorded: x", "not recorded: x", ["odd-layer"])


def test_the_table_has_a_line_per_program_and_marks_values_beyond_a_limit() -> None:
    assert [HEADER, line(HEALTHY), line(SLOW), line(FAILED)] == [
        "program            bare ms  with cbtop              bare again              processor time          "
        "worst category    worst brick               verdicts",
        "gpt                  12.35  1.012 (1.004 to 1.020)  1.001 (0.990 to 1.012)  1.001 (0.990 to 1.012)  "
        "Norm -3.5!        UpProjection -2.0         none, as expected",
        "train                 7.00  1.060 (1.020 to 1.100)! 1.001 (0.990 to 1.012)  1.001 (0.990 to 1.012)  "
        "n/a               n/a                       stuck! expected: none",
        "vit                    n/a  n/a                     n/a                     n/a                     "
        "n/a               n/a                       n/a",
    ]


def test_details_have_each_share_or_the_reason_why_there_is_none() -> None:
    assert details(HEALTHY) == [
        "  steps: decode; the oracle's: GPT 1, 1 positions",
        "  category                  cbtop %  oracle %  points  oracle again",
        "  FFN                          51.0      50.0    +1.0           0.5",
        "  Norm                          6.5      10.0    -3.5           0.2",
        "  brick                     cbtop %  oracle %  points  oracle again",
        "  UpProjection                 25.0      27.0    -2.0           0.5",
    ]
    assert details(FAILED) == ["  overhead not measured: x", "  not recorded: x"]


def test_what_is_beyond_a_limit_is_listed_in_sentences() -> None:
    assert beyond(HEALTHY) == ["gpt: category Norm is 6.5 %, by the oracle 10.0 % (its runs differ by 0.2 points)"]
    assert beyond(SLOW) == [
        "train: overhead 1.060 (1.020 to 1.100), at most 1.03 expected, but not in each pair; "
        "of processor time 1.001 (0.990 to 1.012)",
        "train: verdicts stuck! expected: none",
    ]
    assert beyond(FAILED) == []
