"""Every example runs as its first line says, and is in the table of examples/README.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cbtop.made_recordings import made_recording
from tests.integration.hosts import CBTOP

EXAMPLES = Path(__file__).parents[1] / "examples"
OWN = ["loop", "self_verifying", "own_contract", "threads", "async_requests", "torch_model", "two_ranks"]
BRICKS = {
    "loop": "DownProjection",
    "own_contract": "RmsNorm",
    "self_verifying": "AttentionSoftmax",
    "threads": "Combine",
}


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", OWN)
def test_an_example_runs_and_reports_its_steps(runtime: Path, name: str) -> None:
    if name == "torch_model":
        pytest.importorskip("torch")
    done = _run(name, "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert " steps" in done.stdout
    assert BRICKS.get(name, "") in done.stdout


def test_the_example_for_recordings_sums_the_bricks(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 10)
    done = _run("read_recording", str(tmp_path / "run.cbtop"))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"a +\d+ calls +2\.\d ms +100\.0 µs p50", done.stdout)


def test_the_example_for_recordings_says_that_it_needs_one(runtime: Path) -> None:
    done = _run("read_recording")
    assert (done.returncode, "pass a recording" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_the_live_example_prints_rates_of_what_runs(runtime: Path) -> None:
    with subprocess.Popen([sys.executable, str(EXAMPLES / "loop.py"), "1000000"], stdout=subprocess.DEVNULL) as host:
        try:
            command = [sys.executable, str(EXAMPLES / "live_rates.py")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
                assert example.stdout is not None
                line = example.stdout.readline()
                example.kill()
        finally:
            host.kill()
    assert re.match(r"loop\.py decode \d+", line)


def test_the_example_with_a_contract_is_verified_and_linted(runtime: Path) -> None:
    for words, said in (
        (["verify", "own_contract:rms_norm"], "2 of 2 pass; 22 faults were planted"),
        (["contracts", "lint", "rms_norm.yaml"], "✓ rms_norm.yaml"),
    ):
        done = subprocess.run([*CBTOP, *words], capture_output=True, text=True, timeout=60, cwd=EXAMPLES)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout


def test_the_notebook_shows_its_cells(runtime: Path, tmp_path: Path) -> None:
    for package in ("torch", "ipykernel", "nbclient"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install ipykernel nbclient torch")
    import nbformat
    from nbclient import NotebookClient

    made_recording(runtime, tmp_path / "run.cbtop", 10)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources=resources).execute()
    shown = [[output.get("data", {}).get("text/html", "") for output in cell.get("outputs", [])]
             for cell in notebook.cells]  # fmt: skip
    assert [["UpProjection" in html for html in cell] for cell in shown] == [
        [], [], [], [True], [], [True], [], [False],
    ]  # fmt: skip
    assert "decode: 20 steps" in shown[-1][0]


def test_the_example_for_a_gpu_says_what_it_needs(runtime: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert "needs an NVIDIA GPU" in _run("cuda_stream").stderr


def test_the_example_for_wgpu_times_bricks_or_says_what_it_needs(runtime: Path) -> None:
    pytest.importorskip("wgpu", reason="wgpu is not installed: pip install 'cbtop[wgpu]'")
    done = _run("wgpu_bricks", "5")
    if done.returncode:
        assert "this example needs" in done.stderr
    else:
        assert {"RmsNorm", "DownProjection"} <= set(re.findall(r"RmsNorm|DownProjection", done.stdout)), done.stdout


@pytest.mark.slow
def test_the_gate_records_base_runs_and_judges_a_new_one(runtime: Path, tmp_path: Path) -> None:
    command = [str(EXAMPLES / "gate.sh"), str(EXAMPLES / "loop.py"), str(tmp_path / "base")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHON": sys.executable}
    )
    assert done.returncode in (0, 4), done.stderr
    assert len(list((tmp_path / "base").iterdir())) == 4


def test_every_example_is_in_the_table() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*")
        if path.suffix in (".ipynb", ".py", ".sh", ".yaml", ".yml")
    )
