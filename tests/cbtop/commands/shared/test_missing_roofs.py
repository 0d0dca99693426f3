"""`cbtop run` measures missing roofs (peak rates) once, in the first quiet second, without disturbing its command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.commands.shared import missing_roofs, short_measurement
from cbtop.commands.shared.missing_roofs import MAX_ATTEMPTS, MissingRoofs, missing_threads
from cbtop.commands.shared.short_measurement import UnmeasuredError
from cbtop.protocol.cache import cache_dir
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, keep_roofs, known_roofs, way_out_on_cpu
from cbtop.protocol.vocabulary import Provenance
from tests.cbtop.commands.shared.quiet_machine import QuietMachine
from tests.cbtop.commands.test_run_summary import RUN, TORCH_WITH_BRICKS
from tests.cbtop.recorded import Clock, profiler_in
from tests.integration.hosts import DEADLINE_S, eventually
from tests.profiler.instrument.under_run import fake_torch
from tests.representatives import first_by_default

MANIFEST = Manifest("toy", "qwen2", "torch", "f32", 1, 2, 64, 512, 1000, 4000, roofs=way_out_on_cpu(1))
READ = Ceiling("dram_read", "bandwidth", 20.0, "GB/s", Provenance.MEASURED, 19.0, 12.5, "2026-11-22", is_short=True)
ROOFS = DeviceRoofs(cpu_name(), (READ,), 1)
# A program with a model on a machine without measured roofs. Each measurement of roofs adds a line to a file.
PROGRAM = f"""
import os, time, torch
from cbtop.protocol.messages import Manifest
torch.decode(1)
torch.profiler.announce({MANIFEST!r})
torch.decode()
"""
NOTED = """
import os
init = short_measurement.ShortMeasurement.__init__
def note(self, threads):
    init(self, threads)
    os.close(os.open(os.path.join({folder!r}, f"measured-{{os.getpid()}}"), os.O_CREAT))
short_measurement.ShortMeasurement.__init__ = note
"""


@pytest.fixture
def machine(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> QuietMachine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CI", "")
    return QuietMachine(tmp_path / "machine")


@pytest.fixture
def start(tmp_path: Path, machine: QuietMachine) -> Callable[..., subprocess.Popen[str]]:
    """Start a program with a model under `cbtop run`, on the simulated machine."""

    def start(then: str = "", *options: str, more: str = "", **variables: str) -> subprocess.Popen[str]:
        environment = machine.environment(NOTED.format(folder=str(tmp_path)) + more) | variables
        environment["PYTHONPATH"] += os.pathsep + str(fake_torch(tmp_path, TORCH_WITH_BRICKS))
        return subprocess.Popen(
            [*RUN, "--overhead", "100%", *options, "--", sys.executable, "-c", PROGRAM + then],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


def measurements(folder: Path) -> int:
    return len(list(folder.glob("measured-*")))


@pytest.mark.slow
def test_roofs_are_measured_after_a_command_whose_reader_does_not_wait_for_them(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    slow = (
        "\nimport time\nmissing_main = short_roofs.main\nshort_roofs.main = lambda: (time.sleep(2), missing_main())"
    )
    _, said = start(more=slow).communicate(timeout=DEADLINE_S)
    assert known_roofs() == ()
    assert "cbtop: roofs of 1 thread are not known: measured next if the machine is quiet; " in said
    (roofs,) = eventually(known_roofs)
    assert (roofs.device, roofs.threads) == (cpu_name(), 1)
    assert all(one.is_short for one in roofs.ceilings)
    assert [path.name for path in cache_dir().iterdir()] == ["roofs.json"]
    # The roofs were stored after this run had begun, so it still reports them as missing.
    _, said = start().communicate(timeout=DEADLINE_S)
    assert measurements(tmp_path) == 1


@pytest.mark.slow  # test_short_measurement.py measures
def test_a_command_that_goes_on_has_them_measured_in_a_quiet_second(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    end = tmp_path / "end"
    process = start(f"\nwhile not os.path.exists({str(end)!r}): time.sleep(0.05)")
    eventually(known_roofs)
    time.sleep(1.5)  # time in which `cbtop run` notices that the measurement has finished
    end.touch()
    _, said = process.communicate(timeout=DEADLINE_S)
    assert "cbtop: roofs were measured in a quiet second: memory " in said
    assert len(said.splitlines()) <= 10
    assert measurements(tmp_path) == 1


@pytest.mark.slow
def test_a_measurement_goes_on_when_the_command_ends(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    slow = f"""
import time
now = short_roofs.main
def main():
    open({str(begun)!r}, "w").close()
    while not os.path.exists({str(end)!r}):
        time.sleep(0.05)
    now()
short_roofs.main = main
"""
    process = start(f"\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.05)", more=slow)
    process.communicate(timeout=DEADLINE_S)
    assert known_roofs() == ()
    end.touch()
    eventually(known_roofs)
    assert measurements(tmp_path) == 1


@pytest.mark.slow
def test_on_a_busy_machine_nothing_is_started(
    start: Callable[..., subprocess.Popen[str]], machine: QuietMachine, tmp_path: Path
) -> None:
    with machine.busy():
        process = start(more="\nfrom cbtop.commands.shared import missing_roofs\nmissing_roofs.AFTER_S = 2.5")
        process.communicate(timeout=DEADLINE_S)
        eventually(lambda: not helpers_of(tmp_path))
    assert measurements(tmp_path) == 0
    assert known_roofs() == ()


@first_by_default(("options", "variables"), [((), {"CI": "true"}), (("--quiet",), {})], ids=["in CI", "with --quiet"])
def test_nothing_is_measured(
    options: tuple[str, ...],
    variables: dict[str, str],
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    _, said = start("", *options, **variables).communicate(timeout=DEADLINE_S)
    assert "roofs" not in said
    eventually(lambda: not helpers_of(tmp_path))
    assert measurements(tmp_path) == 0


@pytest.mark.slow
def test_two_runs_at_once_measure_once(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    processes = [start(), start()]
    for process in processes:
        process.communicate(timeout=DEADLINE_S)
    eventually(known_roofs)
    eventually(lambda: not helpers_of(tmp_path))
    assert measurements(tmp_path) == 1


def helpers_of(folder: Path) -> list[str]:
    """Return the ids of the processes with `folder` in their environment, except this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(path.parent.name)
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    ("said", "threads"),
    [
        ([MANIFEST], 1),
        ([], None),
        ([replace(MANIFEST, roofs="")], None),
        ([replace(MANIFEST, roofs="those of ROCm are not measured")], None),
        ([MANIFEST, replace(MANIFEST, threads=3, roofs=way_out_on_cpu(3))], 3),
        ([READ, MANIFEST], None),
        ([READ, MANIFEST, replace(READ, withdrawn=True)], 1),
    ],
)
def test_roofs_are_missing_if_the_newest_manifest_says_so_and_none_is_announced(
    said: list[Manifest | Ceiling], threads: int | None
) -> None:
    assert missing_threads(said) == threads


class MadeMeasurement:
    """A measurement of roofs that always reports a disturbance."""

    begun = 0

    def __init__(self, threads: int) -> None:
        MadeMeasurement.begun += 1

    def poll(self) -> None:
        raise UnmeasuredError("disturbed")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("known", "begun"), [((), MAX_ATTEMPTS), ((ROOFS,), 0)], ids=["disturbed", "known by now"])
def test_it_is_given_up_after_some_disturbed_attempts_or_if_another_run_was_first(
    known: tuple[DeviceRoofs, ...], begun: int, machine: QuietMachine, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler_in(runtime, Clock()).announce(MANIFEST)
    keep_roofs(known)
    monkeypatch.setattr(missing_roofs, "ShortMeasurement", MadeMeasurement)
    monkeypatch.setattr(missing_roofs, "QUIET_S", 0)
    monkeypatch.setattr(missing_roofs, "LOOK_S", 0)
    monkeypatch.setattr("cbtop.commands.shared.machine_load.PROC_STAT", str(machine.stat))
    monkeypatch.setattr(MadeMeasurement, "begun", 0)
    roofs = MissingRoofs(str(runtime))
    roofs.look([os.getpid()])
    assert "are not known" in roofs.line()
    roofs.measure_after()
    assert MadeMeasurement.begun == begun
    assert roofs.line() == ""
    assert short_measurement.in_words(ROOFS.ceilings) == "memory 20.0 GB/s"
