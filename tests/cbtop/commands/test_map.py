"""`cbtop map` and `cbtop ptx`, as a shell calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.ptx_registry import PtxRegistry
from tests.cbtop.help_examples import examples_of


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
    assert chosen[0]["launches"] == 2  # queries and keys
    _, out, _ = called(capsys, "map", model, "--reverse", "rope")
    assert out.splitlines()[1].split()[:2] == [chosen[0]["kernel"], "RopeEmbedding"]


def test_map_of_a_kernel_that_there_is_not_names_those_that_there_are(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, "map", model, "--kernel", "flash")
    assert (code, out) == (3, "")
    assert "no kernel has 'flash' in its name or in that of its file; there are add_rms_norm" in err
    assert ", attention" in err


@pytest.mark.parametrize("example", examples_of("map"), ids=" ".join)
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
