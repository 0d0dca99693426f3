"""`cbtop kernels` asks a process for its kernels, waits for the answer and prints the kernels of each brick."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.protocol.requests import WHY, State
from tests.cbtop.asked_host import NORM, Host, answers
from tests.integration.hosts import DEADLINE_S


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(path))
    monkeypatch.setenv("COLUMNS", "160")
    return path


def test_kernels_are_printed_per_brick_with_launches_shape_and_times(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Host(directory, answers):
        assert main(["kernels", "--steps", "5", "--timeout", f"{DEADLINE_S:g}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"decode: 5 steps recorded of pid {os.getpid()}, 8 launches a step, 12.00 µs in kernels"
    assert [line.split()[:3] for line in lines if "layers" in line] == [
        ["DownProjection", "(2", "layers)"],
        ["RmsNorm", "(2", "layers)"],
    ]
    gemm = next(line for line in lines if "nvjet" in line).split()
    assert gemm == [
        "nvjet_tst_64x8",
        "4",
        "4×6×1",
        "384×1×1",
        "168",
        "0+164,308",
        "0.18",
        "1.50",
        "0.51",
        "0.90",
        "2.50",
        "6.00",
    ]
    norm = next(line for line in lines if "vectorized" in line)
    assert "…" in norm
    assert len(norm) <= 160
    assert any("4 launches in no call" in line for line in lines)
    assert any("in no other times" in line for line in lines)
    head = next(at for at, line in enumerate(lines) if line.startswith("maker "))
    assert lines[head + 1].split(maxsplit=5) == ["cuBLAS,", "tile", "64x8", "(by", "name)", "nvjet_tst_64x8"]
    assert lines[head + 2].startswith(
        "Triton 3.9.0, 4 warps, 3 stages  /a/norms.py:41  vectorized_layer_norm_kernel<"
    )
    assert [line.partition("  vec")[0] for line in lines if "have nothing to do" in line] == [
        "  6.00 µs/step  nvjet_tst_64x8 of DownProjection: 24 blocks for 132 multiprocessors: 108 have nothing to do",
        "  6.00 µs/step",
    ]


def test_the_same_is_printed_as_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Host(directory, answers) as host:
        assert main(["kernels", "--json", "--source", str(os.getpid()), "--timeout", f"{DEADLINE_S:g}"]) == 0
        del host
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["steps"], document["unplaced_launches"]) == ("cbtop.kernels/1", 3, 4)
    (phase,) = document["phases"]
    assert (phase["phase"], phase["steps"], phase["launches_per_step"]) == ("decode", 3, 8)
    brick = phase["bricks"][1]
    assert (brick["brick"], brick["layers"], brick["launches_per_step"]) == ("RmsNorm", 2, 4)
    (kernel,) = brick["kernels"]
    assert kernel["name"] == NORM.name
    assert (kernel["grid"], kernel["block"], kernel["registers"]) == ([1, 1, 1], [32, 4, 1], 27)
    assert (kernel["shared_memory_bytes"], kernel["static_shared_memory_bytes"]) == (24, 16)
    assert kernel["mean_us"] == pytest.approx(1.5)
    assert kernel["us_per_step"] == pytest.approx(6)
    assert brick["us_per_step"] == pytest.approx(6)
    assert kernel["maker"] == {
        "maker": "Triton 3.9.0, 4 warps, 3 stages", "source": "/a/norms.py:41", "loader": "Triton", "tile": "",
        "evidence": "hook",
    }  # fmt: skip
    assert (kernel["waves"]["blocks"], kernel["waves"]["blocks_per_multiprocessor"]) == (1, 16)
    assert [one["kernel"] for one in phase["findings"]] == ["nvjet_tst_64x8", NORM.name]


@pytest.mark.parametrize("state", [state for state in State if state.is_refused])
def test_a_refusal_is_one_line_with_its_reason(
    directory: Path, capsys: pytest.CaptureFixture[str], state: State
) -> None:
    with Host(directory, lambda host, request: host.say(request.number, state)):
        assert main(["kernels", "--timeout", f"{DEADLINE_S:g}"]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert f"pid {os.getpid()} refuses: {WHY[state]}" in said.err


def test_a_process_that_takes_no_requests_is_not_asked(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Host(directory, answers) as host:
        host.recorder.answer(0)
        assert main(["kernels"]) == 1
    assert "takes no requests" in capsys.readouterr().err


def test_an_idle_process_is_waited_for_and_the_request_taken_back(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Host(directory, lambda host, request: None) as host:
        assert main(["kernels", "--timeout", "0.2"]) == 3
        assert host.recorder.asked == 0
    assert "begun no step" in capsys.readouterr().err


def test_an_answer_that_makes_no_sense_is_one_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Host(directory, lambda host, request: host.recorder.answer(-1)):
        assert main(["kernels", "--timeout", f"{DEADLINE_S:g}"]) == 1
    assert "run the same cbtop on both sides" in capsys.readouterr().err


def test_where_nothing_runs_that_is_said(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 3
    assert "nothing runs here" in capsys.readouterr().err


def test_of_several_processes_one_is_to_be_chosen(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Host(directory, answers), Host(directory, answers):
        assert main(["kernels"]) == 2
        assert "choose one by --source" in capsys.readouterr().err
        assert main(["kernels", "--source", "999999"]) == 3


@pytest.mark.parametrize("steps", ["0", "-1", "1001", "three", "99999999999"])
def test_steps_are_bounded(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kernels", "--steps", steps])
    assert "number from 1 to 1000" in capsys.readouterr().err


def test_the_graph_shows_the_kernels_of_the_last_burst_and_names_their_times(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Host(directory, answers):
        assert main(["kernels", "--timeout", f"{DEADLINE_S:g}"]) == 0
        capsys.readouterr()
        shown = ["--headless", "--once", "--window=all", "--phase", "decode", "--timeout", f"{DEADLINE_S:g}"]
        assert main([*shown, "--view", "tree"]) == 0
        text = capsys.readouterr().out
        assert main([*shown, "--format", "json"]) == 0
        graph = json.loads(capsys.readouterr().out)["sources"][0]["graph"]
    line = next(line for line in text.splitlines() if "nvjet" in line)
    assert "<<<4,384,1>>> smem=164308B  [1.00 µs ± 0.10, 2 a step, in a burst of 3 steps]" in line
    kernel = next(node for node in graph if node["name"] == "nvjet_tst_64x8")
    assert kernel["burst"] == {
        "steps": 3,
        "launches": 6,
        "mean_us": 1.0,
        "deviation_us": 0.1,
        "min_us": 0.9,
        "max_us": 2.5,
        "maker": None,
        "source": None,
    }
    assert kernel["count"] is None  # the number of launches is unknown
    assert kernel["registers"] == 168
