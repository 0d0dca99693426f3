"""`cbtop map` and `cbtop ptx`, as a shell calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.ptx_registry import PtxRegistry


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
    norm = next(line for line in out.splitlines() if "RmsNorm" in line)
    assert norm.split()[-4:-2] == ["RmsNorm", "rms_norm"]
    assert "compute/kernels/rms_norm.py:" in norm
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
    assert "no kernel has 'flash' in its name; there are attention, " in err


def test_map_of_no_model_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(capsys, "map", str(tmp_path / "none.gguf"))
    assert code == 2
    assert len(err.splitlines()) == 1


def test_ptx_is_listed_and_shown_by_as_many_digits_as_tell_it_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert called(capsys, "ptx", "list")[0] == 3
    registry = PtxRegistry()
    registry.add(0xAB00 << 48, b".visible .entry rms_norm(\n.param .u64 x)\n")
    registry.add(0xAB01 << 48, b".visible .entry rope(\n")
    code, out, _ = called(capsys, "ptx", "list")
    assert code == 0
    assert sorted(out.splitlines()) == ["ab00000000000000  rms_norm", "ab01000000000000  rope"]
    assert called(capsys, "ptx", "show", "ab00") == (0, ".visible .entry rms_norm(\n.param .u64 x)\n\n", "")
    assert called(capsys, "ptx", "show", "0xAB01")[1].startswith(".visible .entry rope(")
    assert called(capsys, "ptx", "show", "ab")[0] == 2
    assert called(capsys, "ptx", "show", "rope")[0] == 2
    assert called(capsys, "ptx", "show", "ff")[0] == 3
