"""Tests of NVIDIA's tools: they are found in the usual folders. Limits of time and output apply when they run."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from cbtop.profiler.analysis.machine_code import tools as module
from cbtop.profiler.analysis.machine_code.tools import Tool, ToolError, missing, run, tools


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def ptxas(path: Path, version: str) -> Path:
    return program(path, f"echo 'Cuda compilation tools, release 1, V{version}'")


def test_tools_of_the_path_the_toolkit_and_packages_are_found_newest_first(tmp_path: Path) -> None:
    on_path = ptxas(tmp_path / "path" / "ptxas", "12.0.1")
    of_toolkit = ptxas(tmp_path / "cuda" / "bin" / "ptxas", "13.5.37")
    of_nvidia = ptxas(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "ptxas", "13.10.2")
    of_triton = ptxas(tmp_path / "site" / "triton" / "backends" / "nvidia" / "bin" / "ptxas-blackwell", "12.9.86")
    environment = {"PATH": f"{tmp_path / 'path'}:{tmp_path / 'nothing'}:.", "CUDA_HOME": str(tmp_path / "cuda")}
    found = tools("ptxas", environment, [str(tmp_path / "site"), ""])
    assert [one.path for one in found] == [str(one) for one in (of_nvidia, of_toolkit, of_triton, on_path)]
    assert found[0].label == "ptxas 13.10.2"


def test_a_tool_that_two_folders_name_is_found_once(tmp_path: Path) -> None:
    ptxas(tmp_path / "bin" / "ptxas", "13.0.1")
    environment = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path), "CUDA_PATH": str(tmp_path)}
    assert len(tools("ptxas", environment, [])) == 1


def test_a_tool_whose_version_is_not_printed_comes_last(tmp_path: Path) -> None:
    program(tmp_path / "a" / "nvdisasm", "exit 1")
    program(tmp_path / "b" / "nvdisasm", "echo V12.0.0")
    found = tools("nvdisasm", {"PATH": f"{tmp_path / 'a'}:{tmp_path / 'b'}"}, [])
    assert [one.label for one in found] == ["nvdisasm 12.0.0", "nvdisasm"]


def test_without_a_tool_one_line_says_how_to_get_it() -> None:
    assert tools("nvdisasm", {}, []) == []
    assert missing("nvdisasm").endswith("pip install nvidia-cuda-nvdisasm")
    assert "\n" not in missing("ptxas")


def test_a_run_gets_the_content_as_a_file_and_returns_what_it_wrote(tmp_path: Path) -> None:
    tool = Tool(
        "ptxas", str(program(tmp_path / "ptxas", 'echo "$1"; echo note >&2; cat "$2" > output; pwd >> output')), ()
    )
    ran = run(tool, ["-v"], b"content\n", writes="output")
    assert (ran.output, ran.notes) == (b"-v\n", b"note\n")
    content, folder = (ran.written or b"").decode().splitlines()
    assert content == "content"
    assert not os.path.exists(folder)


def test_a_failed_run_is_an_error_with_its_first_problem(tmp_path: Path) -> None:
    tool = Tool(
        "ptxas", str(program(tmp_path / "ptxas", "echo note; echo 'line 3; fatal: no' >&2; exit 255")), (13, 5)
    )
    with pytest.raises(ToolError, match=r"^ptxas 13\.5 failed \(exit code 255\): line 3; fatal: no$"):
        run(tool, [], b"")


def test_a_run_that_writes_no_result_is_an_error(tmp_path: Path) -> None:
    tool = Tool("ptxas", str(program(tmp_path / "ptxas", "exit 0")), ())
    with pytest.raises(ToolError, match="wrote no result"):
        run(tool, [], b"", writes="output")


def test_a_run_that_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    tool = Tool("ptxas", str(program(tmp_path / "ptxas", f"sleep 60 & echo $! > {tmp_path}/child; wait")), ())
    with pytest.raises(ToolError, match="took longer"):
        run(tool, [], b"", max_seconds=0.5)
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_run_that_writes_too_much_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 1 << 20)
    tool = Tool("ptxas", str(program(tmp_path / "ptxas", "yes")), ())
    with pytest.raises(ToolError, match="wrote more than 1 MiB"):
        run(tool, [], b"")
