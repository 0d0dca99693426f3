"""Tests of `cbtop map` and `cbtop ptx` through the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.ptx_registry import PtxRegistry
from tests.cbtop.asked_host import NORM, Host, answers
from tests.cbtop.help_examples import examples_of

TESTS = Path(__file__).parents[1]
RECORDING = str(TESTS / "h100_own_kernels.cbtop")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, TINY, lambda text, fraction: None)
    return str(path)


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_map_prints_layers_bricks_kernels_and_where_they_are_written(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = called(capsys, "map", model)
    assert code == 0
    write = next(line for line in out.splitlines() if "KvWrite" in line)
    assert write.split()[:2] == ["KvWrite", "kv_write"]
    assert "compute/kernels/kv_write.py:" in write
    assert out.rstrip().endswith("launches a pass of 1 token on cpu, by the decoder's plan")


def test_map_of_one_kernel_counts_its_launches_alone(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(called(capsys, "map", model, "--json")[1])["launches"]
    chosen = json.loads(called(capsys, "map", model, "--kernel", "rope", "--json")[1])["launches"]
    assert chosen == [one for one in whole if "rope" in one["kernel"]]
    assert chosen[0]["launches"] == 2  # one launch for queries and one for keys
    _, out, _ = called(capsys, "map", model, "--reverse", "rope")
    assert out.splitlines()[1].split()[:2] == [chosen[0]["kernel"], "RopeEmbedding"]


def test_map_of_a_kernel_that_there_is_not_names_those_that_there_are(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, "map", model, "--kernel", "flash")
    assert (code, out) == (3, "")
    assert "no kernel has 'flash' in its name or in that of its file; there are add_rms_norm" in err
    assert ", attention" in err


@pytest.mark.parametrize("example", [one for one in examples_of("map") if "--running" not in one], ids=" ".join)
def test_map_runs_each_example_of_its_help(
    example: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, *(model if word.endswith(".gguf") else word for word in example))
    assert (code, err) == (0, "")
    assert " launches a pass of " in out


def test_map_finds_a_kernel_of_a_gpu_by_the_name_of_its_file(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "map", model, "--backend", "cuda", "--reverse", "attention")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:2]] == [["few_64", "Attention"]]


def test_map_of_no_model_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(capsys, "map", str(tmp_path / "none.gguf"))
    assert code == 2
    assert len(err.splitlines()) == 1


def test_ptx_is_listed_and_shown_by_as_many_digits_as_tell_it_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert called(capsys, "ptx", "list")[0] == 3
    texts = [b".visible .entry rms_norm(\n.param .u64 x)\n", b".visible .entry rope(\n"]
    norm, rope = (f"{PtxRegistry.hash_ptx(one):016x}" for one in texts)
    for one in texts:
        PtxRegistry().register("f", one)
    code, out, _ = called(capsys, "ptx", "list")
    assert code == 0
    assert sorted(out.splitlines()) == sorted([f"{norm}  rms_norm", f"{rope}  rope"])
    assert called(capsys, "ptx", "show", norm[:4]) == (0, ".visible .entry rms_norm(\n.param .u64 x)\n\n", "")
    assert called(capsys, "ptx", "show", f"0x{rope.upper()}")[1].startswith(".visible .entry rope(")
    assert called(capsys, "ptx", "show", "rope")[0] == 2
    assert called(capsys, "ptx", "show", "ff" * 8)[0] == 3
    other = tmp_path / "cbtop" / "ptx" / f"{norm[:15]}{int(norm[15], 16) ^ 1:x}.ptx"
    other.write_bytes(texts[1])
    assert called(capsys, "ptx", "show", norm[:15])[0] == 2
    assert f"{other.stem}  damaged" in called(capsys, "ptx", "list")[1].splitlines()
    assert called(capsys, "ptx", "show", other.stem)[0] == 3


def test_names_in_ptx_that_a_terminal_would_obey_are_shown_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    PtxRegistry().register("f", b".entry \x1b[2Jf(")
    assert "\x1b" not in called(capsys, "ptx", "list")[1]


def test_map_of_a_gpu_says_of_how_many_multiprocessors_its_grids_are(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = called(capsys, "map", model, "--backend", "cuda")
    assert out.rstrip().endswith("by the decoder's plan; grids are those of an H100's 132 multiprocessors")
    said = json.loads(called(capsys, "map", model, "--backend", "cuda", "--json")[1])
    assert said["multiprocessors"] == 132


def test_map_takes_kernel_or_reverse_and_not_both(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["map", model, "--kernel", "rope", "--reverse", "greedy"])
    assert "not allowed with argument" in capsys.readouterr().err


# --- kernels of a process ------------------------------------------------------------------------------------------


def test_map_of_a_recording_has_makers_and_the_bricks_that_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = called(capsys, "map", "--running", RECORDING)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split("  ")[0] == "brick"
    qkv = [line.split() for line in lines if line.startswith("QkvProjection") and " decode " in line]
    assert [(line[1], line[-4:]) for line in qkv] == [
        ("qkv_in_turn", ["PTX", "952356ae7faa3347", "n/a", "n/a"]),
        ("qkv_in_turn", ["PTX", "b9ca606e2967d193", "n/a", "n/a"]),
    ]
    assert lines[-1].startswith("808 places of ")


def test_map_of_a_recording_can_be_reversed_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, out, _ = called(capsys, "map", "--running", RECORDING, "--reverse", "gemm")
    assert [line.split()[:3] for line in out.splitlines()[:3]] == [
        ["kernel", "brick", "layer"],
        ["cublas_gemm_bf16", "DownProjection", "0-27"],
        ["cublas_gemm_bf16", "GateUpActivation", "(fused)"],
    ]
    found = json.loads(called(capsys, "map", "--running", RECORDING, "--kernel", "gemm", "--json")[1])
    assert found["schema"] == "cbtop.map-running/1"
    assert {(one["kernel"], one["maker"]["maker"], one["maker"]["evidence"]) for one in found["kernels"]} == {
        ("cublas_gemm_bf16", "cuBLAS", "name")
    }
    assert len(found["kernels"]) == 4 * 28
    code, _, err = called(capsys, "map", "--running", RECORDING, "--kernel", "flash")
    assert (code, "there are add_rms_norm_bf16, " in err) == (3, True)


def test_map_of_a_recording_names_ptx_that_is_registered_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(PtxRegistry, "hash_ptx", staticmethod(lambda ptx: 0xEB4854DD75B49BD9))
    PtxRegistry().register("sampling\x1b", b".entry greedy(", Path("a/sampling.cu"))
    found = json.loads(called(capsys, "map", "--running", RECORDING, "--kernel", "greedy", "--json")[1])
    assert {one["maker"]["source"] for one in found["kernels"]} == {"sampling\\x1b a/sampling.cu"}


def test_map_of_a_running_process_has_what_its_hooks_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(directory))
    with Host(directory, answers) as host:
        code, _, err = called(capsys, "map", "--running")
        assert (code, "`cbtop kernels` records those of its next steps" in err) == (3, True)
        host.kernels(1, 3)
        code, out, _ = called(capsys, "map", "--running", "--reverse", "norms.py")
    assert code == 0
    assert re.split(r"\s{2,}", out.splitlines()[1].removeprefix(NORM.name).strip()) == [
        "RmsNorm", "0-1", "decode", "Triton 3.9.0, 4 warps, 3 stages", "/a/norms.py:41", "Triton", "4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([], 2, "pass a MODEL.gguf, or --running"),
        (["m.gguf", "--source", "7"], 2, "--source chooses among processes only"),
        (["m.gguf", "--running"], 2, "--running takes no MODEL.gguf"),
        (["--running", "x.cbtop", "--prefill"], 2, "no --prefill"),
        (["--running", "none.cbtop"], 2, "none.cbtop"),
        (["--running", str(TESTS / "h100.cbtop")], 3, "no kernel of"),
        (["--running", __file__], 2, "test_map.py"),
    ],
)
def test_map_refuses_what_it_cannot_show_in_one_line(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = called(capsys, "map", *arguments)
    assert (found, out, len(err.splitlines())) == (code, "", 1)
    assert complaint in err
