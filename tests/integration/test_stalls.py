"""Tests of a process that hangs: the process is reported as stalled, with its brick and layer.

When it continues, it is reported as running.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cbtop.profiler.hot_path import chosen
from tests.integration.hosts import PATIENTLY, cbtop, daemon, eventually

# A program that hangs in a brick of layer 3 while the given file exists, or between two steps while that file
# contains `idle`.
HANGING = """
import sys, time
from pathlib import Path
from cbtop import BrickProfiler
hangs, idles = Path(sys.argv[1]), Path(sys.argv[1] + ".idle")
profiler = BrickProfiler(sample_every=int(sys.argv[2]))
while True:
    with profiler.step("decode", tokens=1):
        for layer in range(4):
            with profiler.layer(layer):
                with profiler.brick("RmsNorm"): pass
                with profiler.brick("AllReduce"):
                    time.sleep(0.0005)
                    while layer == 3 and hangs.exists(): time.sleep(0.01)
    while idles.exists(): time.sleep(0.01)
"""
compiled = pytest.mark.skipif(chosen().implementation != "compiled", reason="Python's does not say what it is in")


@contextmanager
def hanging(hangs: Path, sample_every: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HANGING, str(hangs), str(sample_every)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def listed(pid: int) -> dict[str, Any]:
    """Return the entry of the process in the output of `cbtop ls`, or an empty dict if it is not listed."""
    sources = json.loads(cbtop("ls", *PATIENTLY, "--format", "json").stdout or '{"sources": []}')["sources"]
    return next((source for source in sources if source["pid"] == pid), {})


def becomes(process: subprocess.Popen[bytes], *states: str) -> dict[str, Any]:
    found: dict[str, Any] = eventually(lambda: (seen := listed(process.pid)).get("state") in states and seen)
    return found


@compiled
def test_a_process_that_hangs_in_a_brick_is_stalled_there_and_recovers(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    with daemon(), hanging(hangs) as process:
        becomes(process, "live")
        hangs.touch()
        stall = becomes(process, "stalled")["stall"]
        assert (stall["phase"], stall["layer"], stall["brick"]) == ("decode", "Layer 3", "AllReduce")
        assert stall["place"] == ["decode", "Layer 3", "AllReduce"]
        assert stall["age_s"] >= stall["limit_s"] >= 2
        text = cbtop("--headless", "--once", "--window=all", *PATIENTLY).stdout
        assert "STALLED" in text.splitlines()[0]
        assert "in decode → Layer 3 → AllReduce (p99 of every decode" in text
        assert "STALLED" in cbtop("ls", *PATIENTLY).stdout
        older = eventually(lambda: (seen := listed(process.pid)["stall"])["age_s"] > stall["age_s"] + 1 and seen)
        assert older["place"] == stall["place"]
        hangs.unlink()
        assert becomes(process, "live")["stall"] is None


@pytest.mark.slow  # tests/cbtop/viewmodels/test_stall.py tests it without processes
@compiled
def test_a_late_viewer_sees_a_long_stall_at_once_even_without_a_daemon(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    with hanging(hangs) as process:
        with daemon():
            becomes(process, "live")
            hangs.touch()
            known = becomes(process, "stalled")["stall"]
        (source,) = json.loads(cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--format", "json").stdout)[
            "sources"
        ]
        assert (source["state"], source["stall"]["brick"]) == ("stalled", "AllReduce")
        assert source["stall"]["age_s"] > known["age_s"]


@pytest.mark.slow
@compiled
def test_a_stalled_process_that_is_killed_is_gone_and_was_never_live_again(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    with daemon(), hanging(hangs) as process:
        becomes(process, "live")
        hangs.touch()
        becomes(process, "stalled")
        process.kill()
        assert becomes(process, "gone", "live")["state"] == "gone"
        assert listed(process.pid)["stall"] is None


# The default run skips this test, because test_stall.py tests both states on simulated processes, and a test above
# has a real stall.
@pytest.mark.slow
@compiled
def test_between_steps_it_is_idle_and_stopped_by_a_signal_it_is_suspended(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    with daemon(), hanging(hangs) as process:
        becomes(process, "live")
        idles = hangs.with_suffix(".idle")
        idles.touch()
        assert becomes(process, "idle")["stall"]["place"] == []
        process.send_signal(signal.SIGSTOP)
        becomes(process, "suspended")
        process.send_signal(signal.SIGCONT)
        becomes(process, "idle")
        idles.unlink()
        becomes(process, "live")
        hangs.touch()
        becomes(process, "stalled")
        process.send_signal(signal.SIGSTOP)
        assert becomes(process, "suspended")["stall"]["brick"] == "AllReduce"
        process.send_signal(signal.SIGCONT)
        hangs.unlink()
        becomes(process, "live")


@pytest.mark.slow  # The default run skips this test, because test_stall.py tests the same, with a simulated process.
def test_a_process_that_samples_its_steps_is_quiet_rather_than_idle(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    with daemon(), hanging(hangs, sample_every=1000) as process:
        becomes(process, "live")
        hangs.touch()
        stall = becomes(process, "quiet", "idle", "stalled")["stall"]
        assert (stall["word"], stall["place"], stall["why"]) == ("quiet", [], "whether a step runs is not known")
        hangs.unlink()
        becomes(process, "live")


@compiled
@pytest.mark.slow  # The default run skips this test, because tests/cbtop/viewmodels/test_stall.py tests the same.
def test_a_recording_shows_a_stall_by_its_own_time(tmp_path: Path) -> None:
    hangs, path = tmp_path / "hangs", tmp_path / "run.cbtop"
    with daemon(), hanging(hangs) as process:
        becomes(process, "live")
        hangs.touch()
        becomes(process, "stalled")
        assert cbtop("record", "-o", str(path), "--duration", "2").returncode == 0
    first, later = (
        json.loads(cbtop("replay", str(path), "--headless", "--format", "json", "--at", at).stdout)["sources"][0]
        for at in ("0", "2")
    )
    assert (first["state"], later["state"]) == ("stalled", "stalled")
    assert later["stall"]["age_s"] > first["stall"]["age_s"]


# The default run skips this test, because test_merge.py of the viewmodels tests the same, with simulated processes.
@pytest.mark.slow
@compiled
def test_a_sum_is_stalled_if_one_process_hangs_and_gone_if_that_is_killed(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"

    def merged() -> dict[str, Any]:
        done = cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--format", "json", "--merge", "sum")
        (source,) = json.loads(done.stdout)["sources"]
        assert isinstance(source, dict)
        return source

    with daemon(), hanging(tmp_path / "never") as goes_on, hanging(hangs) as process:
        for each in (goes_on, process):
            becomes(each, "live")
        assert (merged()["state"], len(merged()["merged"]["members"])) == ("live", 2)
        hangs.touch()
        found = eventually(lambda: (seen := merged())["state"] == "stalled" and seen)
        assert found["stall"]["member"] == f"pid {process.pid}"
        process.kill()
        found = eventually(lambda: (seen := merged())["state"] != "stalled" and seen)
        assert (found["state"], len(found["merged"]["members"])) == ("gone", 2)
        assert found["state_reason"].startswith(f"pid {process.pid}: no goodbye")
