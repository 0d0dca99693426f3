"""A short measurement of the machine is stored only if nothing disturbed it and it was not interrupted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

from cbtop.commands.shared.short_measurement import in_words
from cbtop.protocol.cache import cache_dir
from cbtop.protocol.roofs import cpu_name, known_roofs
from tests.cbtop.commands.shared.quiet_machine import QuietMachine
from tests.integration.hosts import CBTOP, DEADLINE_S, eventually
from tests.representatives import first_by_default

pytestmark = pytest.mark.usefixtures("runtime")
CALIBRATE = [*CBTOP, "calibrate", "--short", "--threads", "1"]
# A replacement for the measurement. It creates a file when it starts, and never ends.
FOR_EVER = """
import sys, time
def main():
    open({mark!r}, "w").close()
    time.sleep(1000)
short_roofs.main = main
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuietMachine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return QuietMachine(tmp_path / "machine")


def calibrate(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CALIBRATE, *options], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_on_a_quiet_machine_roofs_are_measured_without_the_engine(machine: QuietMachine) -> None:
    done = calibrate(machine.environment("import sys; sys.modules['numba'] = None"))
    assert (done.returncode, done.stderr) == (0, "")
    (roofs,) = known_roofs()
    assert (roofs.device, roofs.threads) == (cpu_name(), 1)
    assert [(one.name, one.kind, one.dtype, one.rounds) for one in roofs.ceilings] == [
        ("dram_read", "bandwidth", "", 5),
        ("matmul_float32", "compute", "float32", 5),
        ("matmul_float64", "compute", "float64", 5),
    ]
    assert all(one.is_short and one.measured_s for one in roofs.ceilings)
    assert done.stdout.count(", short\n") == 3
    assert in_words(roofs.ceilings).startswith("memory ")


@pytest.mark.slow
def test_a_busy_machine_gives_no_roofs(machine: QuietMachine) -> None:
    with machine.busy():
        done = calibrate(machine.environment())
    assert (done.returncode, done.stdout) == (5, "")
    assert "the roofs were not measured: other processes began to use the processors" in done.stderr
    assert known_roofs() == ()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("short_roofs.MAX_SPREAD_PERCENT = -1", "its rounds differ by"),
        pytest.param("short_roofs.MAX_WAIT_PERCENT = -1", "its threads waited", marks=pytest.mark.slow),
        pytest.param(
            "short_roofs.MAX_FILL_S = 0", "it took too long to get memory: others use it", marks=pytest.mark.slow
        ),
        pytest.param("short_roofs.KIND_S = 0", "only 0 rounds fitted", marks=pytest.mark.slow),
        pytest.param("short_roofs.LARGEST_BUFFER_BYTES = 0", "a buffer of", marks=pytest.mark.slow),
        pytest.param("machine_load.PROC_STAT = '/nothing'", "this system does not report", marks=pytest.mark.slow),
        ("short_roofs.main = lambda: sys.exit(3)", "it ended with 3"),
        ("short_measurement.MAX_S = 0", "it took longer than 0 s"),
    ],
)
def test_a_disturbed_measurement_says_by_what_and_stores_nothing(more: str, why: str, machine: QuietMachine) -> None:
    done = calibrate(machine.environment(f"import sys\n{more}"))
    assert done.returncode == 5
    assert why in done.stderr
    assert known_roofs() == ()


@first_by_default("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_leaves_nothing(
    number: signal.Signals, machine: QuietMachine, tmp_path: Path
) -> None:
    mark = tmp_path / "measures"
    environment = machine.environment(FOR_EVER.format(mark=str(mark)))
    with subprocess.Popen(CALIBRATE, env=environment, stderr=subprocess.PIPE, start_new_session=True) as process:
        eventually(mark.exists)
        os.killpg(process.pid, number)  # Signal the whole process group, as a terminal does on Ctrl-C.
        process.communicate(timeout=DEADLINE_S)
    eventually(lambda: not _is_group(process.pid))
    assert list(cache_dir().iterdir()) == []


def test_two_do_not_measure_at_once(machine: QuietMachine) -> None:
    cache_dir().mkdir(parents=True)
    lock = os.open(cache_dir(), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        done = calibrate(machine.environment())
    finally:
        os.close(lock)
    assert (done.returncode, done.stderr) == (5, "cbtop: another process measures the roofs\n")
    assert known_roofs() == ()


@first_by_default(
    ("options", "why"), [(["--threads", "100000"], "may use"), (["--weights", "1000"], "leave out --weights")]
)
def test_options_that_it_cannot_follow_are_refused(options: list[str], why: str, machine: QuietMachine) -> None:
    done = calibrate(machine.environment(), *options)
    assert done.returncode == 2
    assert why in done.stderr


def _is_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
