"""`cbtop doctor` reports what is missing and how to fix it. It exits with 1 if recording is impossible."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands import doctor
from cbtop.daemon.devices.nvml import Nvml
from cbtop.profiler.analysis.machine_code import tools
from cbtop.protocol import roofs
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, keep_roofs
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__
from tests.cbtop.daemon.devices.fake_nvml import FakeNvml, FakeNVMLError, Gpu
from tests.integration.hosts import DEADLINE_S, daemon, eventually, host
from tests.representatives import first_by_default

CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()


def facts(capsys: pytest.CaptureFixture[str], exit_code: int = 0) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json"]) == exit_code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["works"]) == ("cbtop.doctor/1", exit_code == 0)
    return {fact["name"]: fact for fact in found["facts"]}


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every later import of `module` fail."""
    real = builtins.__import__

    def fake(name: str, *rest: Any, **named: Any) -> Any:
        if f"{name}.".startswith(f"{module}."):
            raise ImportError(f"No module named {module!r}")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_every_fact_is_one_line_and_what_is_missing_has_a_way_out(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = facts(capsys)
    assert [line[2:20].strip() for line in lines] == list(said)
    assert all(fact["way_out"] for fact in said.values() if fact["state"] != "ok")
    assert all(line.startswith("–") and " → " in line for line in lines if not line.startswith("✓"))
    assert {"python", "platform", "recorder", "clock", "runtime directory", "daemon", "sources", "GPU", "roofs",
            "numba", "cuda", "ptxas", "nvdisasm", "cuobjdump", "terminal", "config",
            "prometheus", "opentelemetry"} == set(said)  # fmt: skip
    assert str(runtime) in said["runtime directory"]["value"]


def test_the_tools_of_nvidia_are_listed_with_version_and_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name, version in (("a", "ptxas", "12.8.93"), ("b", "ptxas", "13.5.37"), ("a", "nvdisasm", "")):
        (tmp_path / folder).mkdir(exist_ok=True)
        program = tmp_path / folder / name
        program.write_text(f"#!/bin/sh\necho '{version and f'Cuda compilation tools, V{version}'}'\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(tools, "_packages", lambda path: iter(()))
    found = facts(capsys)
    assert found["ptxas"]["value"] == f"13.5.37, {tmp_path}/b/ptxas, and 1 older"
    assert found["nvdisasm"]["value"] == f"of an unknown version, {tmp_path}/a/nvdisasm"
    assert (found["cuobjdump"]["state"], found["ptxas"]["state"]) == ("missing", "ok")
    assert found["cuobjdump"]["way_out"].startswith("pip install nvidia-cuda-cuobjdump: ")


def test_an_unsafe_runtime_directory_ends_profiling_and_says_how_to_fix_it(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.chmod(0o755)
    found = facts(capsys, exit_code=1)["runtime directory"]
    assert found["state"] == "failed"
    assert f"chmod 700 {runtime}" in found["value"]


def test_too_little_room_is_the_end_of_profiling(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DEFAULT_RING_BYTES", 1 << 62)
    assert "make room" in facts(capsys, exit_code=1)["runtime directory"]["way_out"]


def test_whether_roofs_are_known_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.159.04")
    monkeypatch.setattr(doctor, "FACTS", (doctor._roofs,))
    found = facts(capsys)["roofs"]
    assert (found["state"], found["value"]) == ("missing", "not known")
    assert "`cbtop calibrate`" in found["way_out"]
    read = Ceiling("read", "bandwidth", 3000.0, "GB/s", Provenance.MEASURED, measured_on="2026-11-22")
    gpu = DeviceRoofs("Made 100", (read,), None, "18a9-c4", 132, "580.159.04", 700)
    keep_roofs([replace(gpu, driver="535.54.03"), DeviceRoofs("Another Processor", (read,), 4)])
    assert facts(capsys)["roofs"]["state"] == "missing"
    keep_roofs([gpu, DeviceRoofs(cpu_name(), (read,), 4)])
    assert facts(capsys)["roofs"]["value"] == (
        f"Made 100, 18a9-c4, driver 580.159.04, power limit 700 W (2026-11-22), {cpu_name()}, 4 threads (2026-11-22)"
    )
    (tmp_path / "roofs.json").write_text("{")
    assert facts(capsys)["roofs"]["value"].startswith(f"{tmp_path / 'roofs.json'} holds no roofs")


@pytest.mark.slow
def test_a_daemon_and_what_it_watches_are_named(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts(capsys)
    assert (before["daemon"]["state"], before["sources"]["value"]) == ("missing", "none")
    with daemon() as serving, host() as process:
        eventually(lambda: list(runtime.glob("*.ring")))
        monkeypatch.setattr(doctor, "ANSWER_S", DEADLINE_S)
        found = facts(capsys)
        assert found["daemon"]["value"].startswith(f"cbtop {__version__}, pid {serving.pid}, at ipc://{runtime}")
        assert found["sources"]["value"] == f"1 live (pid {process.pid}), 0 ended"


def test_a_recorder_in_python_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
    assert facts(capsys)["recorder"]["value"] == "python: CBTOP_PURE_PYTHON is set"
    monkeypatch.delenv("CBTOP_PURE_PYTHON")
    monkeypatch.setitem(sys.modules, "cbtop.profiler._hot_path", None)
    monkeypatch.delattr("cbtop.profiler._hot_path", raising=False)
    found = facts(capsys)["recorder"]
    assert found["value"].startswith("python: ")
    assert "C compiler" in found["way_out"]


@pytest.mark.parametrize(("module", "fact"), [("cbtop.compute.jit.cpu", "numba")])
def test_what_cannot_be_imported_is_missing_and_no_more(
    module: str, fact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(module, monkeypatch)
    assert facts(capsys)[fact]["state"] == "missing"


@first_by_default("told", ["NUMBA_DISABLE_JIT=1", "NUMBA_NUM_THREADS=0", "NUMBA_THREADING_LAYER=none"])
def test_numba_with_settings_that_kernels_cannot_use_is_missing_and_no_more(told: str, runtime: Path) -> None:
    command = ["env", told, sys.executable, "-m", "cbtop", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = {fact["name"]: fact for fact in json.loads(done.stdout)["facts"]}
    assert said["numba"]["state"] == "missing"
    assert "terminal" in said


@first_by_default(
    ("told", "label", "vectors"),
    [
        ("NUMBA_ENABLE_AVX=0", "numba-generic-", "sse4.2"),
        ("NUMBA_CPU_FEATURES=-avx2", "numba-generic-", "avx"),
        ("NUMBA_CPU_FEATURES=-avx512f", "numba-avx2-", "avx2"),
    ],
)
@pytest.mark.skipif(not {"avx2", "sse4_2"} <= FLAGS, reason="this processor has no AVX2")
def test_numba_names_what_its_settings_leave_of_the_processor(
    told: str, label: str, vectors: str, runtime: Path
) -> None:
    command = ["env", told, sys.executable, "-m", "cbtop", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = {fact["name"]: fact for fact in json.loads(done.stdout)["facts"]}
    assert said["numba"]["state"] == "ok"
    assert f" {label}" in said["numba"]["value"]
    assert f"vectors {vectors} on " in said["numba"]["value"]


@pytest.mark.slow
def test_the_gpus_are_one_line_with_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeNvml(Gpu("GPU-0"), Gpu("GPU-1"), Gpu("GPU-2", fails={"*": FakeNVMLError(15)}))
    monkeypatch.setattr(doctor, "Nvml", lambda: Nvml(api))
    said = facts(capsys)["GPU"]
    lost = "GPU it does not answer: GPU is lost"
    assert (said["value"], said["state"]) == (
        f"2 × NVIDIA H100 80GB HBM3, {lost}, driver 580.159.04: sampled by NVML", "ok"
    )  # fmt: skip
    assert not api.is_open
    api.gpus[0].mig = {}
    api.gpus[0].mig[0] = Gpu("MIG-0", "MIG 1g.10gb")
    assert "1 × MIG 1g.10gb, " in facts(capsys)["GPU"]["value"]
    assert "(no utilisation of MIG devices)" in facts(capsys)["GPU"]["value"]
    api.fails = {"nvmlInit": FakeNVMLError(12)}
    assert facts(capsys)["GPU"]["value"] == "no NVIDIA driver is loaded here (NVML Shared Library Not Found)"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert facts(capsys)["GPU"]["value"].startswith("nvidia-ml-py is not installed")


def test_a_driver_that_hangs_does_not_hold_up_the_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeNvml(Gpu("GPU-0"))
    api.hangs = threading.Event()
    monkeypatch.setattr(doctor, "Nvml", lambda: Nvml(api))
    monkeypatch.setattr(doctor, "DRIVER_S", 0.01)
    try:
        assert facts(capsys)["GPU"]["value"] == "its driver has not answered for 0.01 s"
    finally:
        api.hangs.set()


def test_the_resolution_of_the_clock_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = facts(capsys)["clock"]["value"].split()
    smallest = int(words[words.index("step") + 1])
    assert 0 < smallest < 1_000_000


def test_the_command_line_loads_nothing_heavy_for_the_sake_of_the_doctor() -> None:
    script = (
        "import sys, cbtop.cli\n"
        "heavy = {'numba', 'textual', 'rich', 'cupy', 'psutil', 'pynvml', 'llvmlite'}\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
