"""Tests of devices with a daemon that samples its real machine.

The samples go over real sockets, into a recording and back, and into text.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from cbtop.client.stream_recorder import StreamRecorder
from cbtop.daemon import daemon as daemon_module
from cbtop.daemon.daemon import DaemonInside
from cbtop.daemon.devices import nvml, sampling
from cbtop.daemon.devices.cpu import Cpu
from cbtop.daemon.devices.nvml import Nvml
from cbtop.daemon.source import Source
from cbtop.feeds.feed import Feed
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.endpoint import default_endpoint
from cbtop.viewmodels import devices
from cbtop.viewmodels.devices import MachineView
from tests.cbtop.daemon.devices.fake_nvml import FakeNvml, Gpu
from tests.integration.hosts import CBTOP, PATIENTLY, cbtop, daemon, eventually, host


def machine(feed: Feed | ReplayFeed) -> MachineView | None:
    """Return the machine of the first process. Return None until all of its samplers have answered."""
    feed.poll(20)
    view = feed.view()
    found = view.machines[0] if view and view.machines else None
    return found if found and any(row.device.utilization_percent is not None for row in found.devices) else None


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Make daemons in this process find a fake H100 and take samples often."""
    made = FakeNvml(Gpu("GPU-0", mig=None))
    monkeypatch.setattr(daemon_module, "SAMPLERS", (partial(Nvml, made), Cpu))
    monkeypatch.setattr(nvml, "pid_namespace", lambda: nvml.INITIAL_PID_NAMESPACE)
    monkeypatch.setattr(daemon_module, "NewestSamples", partial(sampling.NewestSamples, interval_s=0.05))
    yield made
    if made.hangs:
        made.hangs.set()


@pytest.mark.slow
def test_a_real_daemon_tells_of_the_real_host_and_of_the_process_it_watches() -> None:
    with daemon(), host() as process:
        done = cbtop("--headless", "--once", *PATIENTLY, "--view", "devices", "--format", "json")
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["machines"]
        text = cbtop("--headless", "--once", *PATIENTLY, "--view", "devices").stdout
    cpu = next(device for device in found["devices"] if device["kind"] == "cpu")
    assert 0 <= cpu["utilization_percent"] <= 100
    assert cpu["memory_total_bytes"] == psutil.virtual_memory().total
    mine = next(row for row in found["processes"] if row["pid"] == process.pid)
    assert mine["source"].split(":")[1] == str(process.pid)
    assert 0 < mine["cpu_percent"] <= 100 * cpu_count()
    assert mine["resident_bytes"] > 1 << 20
    assert len(found["troubles"]) == (0 if any(device["kind"] == "gpu" for device in found["devices"]) else 1)
    assert f"devices of {found['host']}" in text


def cpu_count() -> int:
    return psutil.cpu_count() or 1


@pytest.mark.slow
def test_what_was_sampled_is_shown_recorded_and_replayed_at_its_time(
    api: FakeNvml, runtime: Path, tmp_path: Path
) -> None:
    with host() as process, DaemonInside(default_endpoint(), runtime), Feed([default_endpoint()]) as feed:
        (gpu,) = api.gpus
        gpu.processes, gpu.use = [(process.pid, 5 << 20)], [(process.pid, None, 42)]
        eventually(lambda: machine(feed) and machine(feed).processes[0].source)  # type: ignore[union-attr]
        path = tmp_path / "run.cbtop"
        recorder = StreamRecorder(path, default_endpoint(), 1 << 30)
        busy = []
        for percent in (10, 90):
            gpu.busy = percent
            eventually(lambda: recorder.poll(20) or _says(feed, gpu.busy))
            busy.append(percent)
            eventually(lambda: recorder.poll(20) or _recorded(recorder, gpu.busy))
        recorder.close()
        live = machine(feed)
    assert live
    (row,) = live.processes
    assert (row.pid, row.device, row.gpu_memory_bytes, row.gpu_utilization_percent) == (process.pid, "0", 5 << 20, 42)
    with ReplayFeed(path) as replay:
        replay.is_playing = False
        seen = []
        for at in range(101):
            replay.seek(replay.duration_s * at / 100)
            found = machine(replay)
            seen += [found.devices[0].device.utilization_percent] if found else []
        assert [percent for percent in dict.fromkeys(seen) if percent in busy] == busy
        assert machine(replay).devices[0].device.uuid == "GPU-0"  # type: ignore[union-attr]


def _says(feed: Feed, busy: int) -> bool:
    found = machine(feed)
    return found is not None and found.devices[0].device.utilization_percent == busy


def _recorded(recorder: StreamRecorder, busy: int) -> bool:
    known = recorder.store.devices.get("nvml")
    return bool(known and known.newest.devices and known.newest.devices[0].utilization_percent == busy)


def test_a_driver_that_hangs_leaves_old_figures_marked_and_holds_up_nobody(
    api: FakeNvml, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "STALE_AFTER_S", 0.5)
    monkeypatch.setattr(sampling, "LEAVE_S", 0.01)
    with host(), DaemonInside(default_endpoint(), runtime) as inside, Feed([default_endpoint()]) as feed:
        eventually(lambda: _says(feed, 99))
        api.hangs = threading.Event()
        eventually(lambda: (found := machine(feed)) and found.devices[0].is_stale)
        found = machine(feed)
        assert found
        assert found.devices[0].device.utilization_percent == 99
        assert not found.devices[1].is_stale
        received = feed.view().loss.received  # type: ignore[union-attr]
        eventually(lambda: feed.poll(20) or feed.view().loss.received > received)  # type: ignore[union-attr]
        assert inside.error is None
    assert "cbtop-daemon" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_nothing_is_sampled_while_nobody_listens(
    api: FakeNvml, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    poll = Source.poll
    monkeypatch.setattr(Source, "poll", lambda source: read.append(source.key) or poll(source))
    with host(), DaemonInside(default_endpoint(), runtime):
        # No viewer has asked for devices yet. The daemon has already read the process.
        eventually(lambda: len(read) > 10)
        assert api.inits == 0
        with Feed([default_endpoint()]) as feed:
            eventually(lambda: _says(feed, 99))
        eventually(lambda: not api.is_open)
    assert (api.inits, api.shutdowns) == (1, 1)


def test_the_profiled_process_loads_nothing_that_samples() -> None:
    import subprocess

    script = (
        "import sys, os\n"
        "from cbtop import BrickProfiler\n"
        "profiler = BrickProfiler()\n"
        "with profiler.step('decode', tokens=1), profiler.brick('a'): pass\n"
        "profiler.serve(f'ipc://{sys.argv[1]}/own.sock')\n"
        "print(sorted({'psutil', 'pynvml'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [CBTOP[0], "-c", script, os.environ["CBTOP_RUNTIME_DIR"]], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_daemon_that_samples_ends_at_once_when_told_to() -> None:
    with daemon() as serving, host(), Feed() as feed:
        eventually(lambda: machine(feed))
        serving.send_signal(signal.SIGTERM)
        assert serving.wait() == 128 + signal.SIGTERM
        assert serving.stderr
        said: Any = serving.stderr.read()
    assert said in (b"", None)
