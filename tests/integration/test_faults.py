"""Tests of faults in a viewer, the daemon or their files: the profiled program is not affected.

Later viewers account for every record.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from cbtop.feeds.feed import Feed
from cbtop.profiler.analysis.graph.node_table import MAX_NODES
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.messages import HostHello, Node
from cbtop.protocol.process import process_start
from cbtop.protocol.ring import CURSOR_WORD, DEFAULT_RING_BYTES, RECORD_BYTES, RingWriter
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.source import SourceView
from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop, cbtop_apart, eventually

# A program that runs steps without sleeping until SIGUSR1. Then it prints the number of its steps and of its waits.
# Steps are long enough that its ring covers minutes, so a late daemon loses no record.
BUSY_HOST = """
import json, resource, signal, sys, time
from cbtop import BrickId, BrickProfiler

profiler, going = BrickProfiler(), True
def stop(*_):
    global going
    going = False
signal.signal(signal.SIGUSR1, stop)

def step():
    with profiler.step("decode", tokens=1):
        for layer in range(2):
            with profiler.layer(layer), profiler.brick(BrickId.DOWN_PROJECTION, 64):
                until = time.perf_counter_ns() + 2_000_000
                while time.perf_counter_ns() < until: pass

step()
print("up", flush=True)
sys.stdin.readline()  # while the others start it takes no processor from them
waits, steps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, 1
while going:
    step()
    steps += 1
waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits
print(json.dumps({"steps": steps, "waits": waits}), flush=True)
"""
VIEWER = """
import sys, time
from cbtop.feeds.feed import Feed
feed = Feed()
while True:
    feed.poll(50)
    time.sleep(float(sys.argv[1]))
"""
# Number of steps that run during a fault. On a quiet machine, the daemon reads many times, publishes once and sends
# some heartbeats during these steps.
STEPS_MEANWHILE = 75
RECORDS_A_STEP = 5
# The program waits at most once in this number of steps. If a fault blocked it, it would wait in every step.
STEPS_A_WAIT = 10
DEAD_PID = 4_194_304  # one more than the highest possible pid


@dataclass
class Scene:
    """The processes that run while a fault occurs: a profiled program, a daemon and a viewer."""

    directory: Path
    host: subprocess.Popen[str]
    daemon: subprocess.Popen[bytes]
    viewer: subprocess.Popen[bytes]
    running: ExitStack

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a process. This process is killed at the end of the scene."""
        process = self.running.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE))
        self.running.callback(process.kill)
        return process

    def start_daemon(self) -> None:
        self.daemon = self.start(*CBTOP, "daemon")
        assert self.daemon.stderr
        assert b"serving" in self.daemon.stderr.readline()

    def let_steps_pass(self) -> None:
        """Wait until the profiled program has run enough steps for the fault to have an effect on it."""
        (ring,) = (path for path in self.directory.glob(f"{self.host.pid}-*-0.ring") if "-1-0" not in path.name)
        reader = RingReader(ring)
        wanted = reader.produced + STEPS_MEANWHILE * RECORDS_A_STEP
        eventually(lambda: reader.produced >= wanted)
        reader.close()


def nothing(scene: Scene) -> None:
    """A fault that does nothing, for comparison."""


def viewer_stops(scene: Scene) -> None:
    scene.viewer.send_signal(signal.SIGSTOP)


def viewer_is_killed(scene: Scene) -> None:
    scene.viewer.kill()


def viewer_is_slow(scene: Scene) -> None:
    scene.start(sys.executable, "-c", VIEWER, "3600")


def daemon_stops_for_a_while(scene: Scene) -> None:
    scene.daemon.send_signal(signal.SIGSTOP)
    scene.running.callback(scene.daemon.send_signal, signal.SIGCONT)
    scene.let_steps_pass()
    scene.daemon.send_signal(signal.SIGCONT)


def daemon_is_killed_and_started_again(scene: Scene) -> None:
    scene.viewer.kill()  # Kill the viewer first. Otherwise it would start a new daemon after the daemon is killed.
    scene.viewer.wait()
    scene.daemon.kill()
    scene.daemon.wait()
    scene.let_steps_pass()
    scene.start_daemon()


def a_second_daemon_on_the_same_address(scene: Scene) -> None:
    assert cbtop_apart("daemon").returncode == 1


def a_second_daemon_on_another_address(scene: Scene) -> None:
    other = scene.start(*CBTOP, "daemon", "--bind", f"ipc://{scene.directory / 'other.sock'}")
    assert other.stderr
    assert b"serving" in other.stderr.readline()


def stale_rings_of_the_dead(scene: Scene) -> None:
    with forging(scene.directory, f"{DEAD_PID}-1-0") as hidden:
        for path in (hidden, hidden.with_suffix(".catalog")):
            os.utime(path, (1, 1))
    (ring,) = scene.directory.glob(f"{scene.host.pid}-*.ring")
    # The ring of the running process gets the same old time, but this process must still be shown.
    os.utime(ring, (1, 1))
    fresh = forge(scene.directory, f"{DEAD_PID}-1-1")
    with Feed() as feed:
        eventually(lambda: state_of(feed, fresh.stem) == "gone")
        assert not state_of(feed, hidden.stem)
        assert state_of(feed, pid=scene.host.pid) == "live"
    stale = scene.directory / hidden.name
    assert stale.exists()  # The files were not shown because of their age, but they were not deleted.
    assert stale.with_suffix(".catalog").exists()


def a_ring_whose_pid_is_the_hosts_and_whose_start_is_not(scene: Scene) -> None:
    forged = forge(scene.directory, f"{scene.host.pid}-1-0", pid=scene.host.pid, start=1)
    with Feed() as feed:
        eventually(lambda: state_of(feed, forged.stem) == "gone")
        assert state_of(feed, pid=scene.host.pid) == "live"


def a_ring_whose_header_lies(scene: Scene) -> None:
    with forging(scene.directory, f"{os.getpid()}-1-0") as ring, ring.open("r+b") as file:
        file.seek(24)
        file.write(struct.pack("<q", 1 << 40))


def a_ring_whose_cursor_jumps(scene: Scene) -> None:
    start = int(next(scene.directory.glob(f"{scene.host.pid}-*.ring")).stem.split("-")[1])
    ring = forge(scene.directory, f"{scene.host.pid}-{start}-7", pid=scene.host.pid, start=start)
    with Feed() as feed:
        eventually(lambda: state_of(feed, ring.stem) == "live")
        for cursor in (1 << 61, -1, 3):
            with ring.open("r+b") as file:
                file.seek(8 * CURSOR_WORD)
                file.write(struct.pack("<q", cursor))
            before = steps_of(feed, scene.host.pid)
            # By now, the daemon has read the ring with the wrong cursor.
            eventually(lambda before=before: steps_of(feed, scene.host.pid) > before)
        eventually(lambda: state_of(feed, ring.stem) == "faulty")


def a_node_table_with_cycles(scene: Scene) -> None:
    nodes = [Node(1, 2, NodeKind.LAYER, "a"), Node(2, 1, NodeKind.LAYER, "b")]
    ring = forge(scene.directory, f"{os.getpid()}-1-1", nodes)
    with Feed() as feed:
        eventually(lambda: state_of(feed, ring.stem) == "faulty")


def a_node_table_that_is_too_long(scene: Scene) -> None:
    pack, head = msgpack.Packer().pack, struct.Struct("<II").pack
    with (
        forging(scene.directory, f"{os.getpid()}-1-2") as ring,
        ring.with_suffix(".catalog").open("ab") as catalog,
    ):
        for number in range(1, MAX_NODES + 2):
            said = pack({"k": "Node", "id": number, "parent": None, "kind": "layer", "name": ""})
            catalog.write(head(len(said), zlib.crc32(said)) + said)
    with Feed() as feed:
        eventually(lambda: state_of(feed, ring.stem) == "faulty")


# Faults that do not affect each other run one after another in one scene, because a scene starts four Python
# processes.
FAULTS: list[Any] = [
    (
        nothing, viewer_is_slow, viewer_stops, daemon_stops_for_a_while, viewer_is_killed,
        a_second_daemon_on_the_same_address, a_second_daemon_on_another_address, stale_rings_of_the_dead,
        a_ring_whose_header_lies, a_node_table_with_cycles,
        a_ring_whose_pid_is_the_hosts_and_whose_start_is_not,
    ),
    pytest.param((daemon_is_killed_and_started_again, a_ring_whose_cursor_jumps), marks=pytest.mark.slow),
    # The default run skips this case, because it takes seconds to write and read this table.
    pytest.param((a_node_table_that_is_too_long,), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "-then-".join(fault.__name__ for fault in faults))
def test_the_host_notices_nothing_and_its_books_hold(
    runtime: Path, faults: tuple[Callable[[Scene], None], ...]
) -> None:
    with ExitStack() as running:
        command = [sys.executable, "-c", BUSY_HOST]
        host = running.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        running.callback(host.kill)
        scene = Scene(runtime, host, None, None, running)  # type: ignore[arg-type]  # they follow
        scene.start_daemon()
        scene.viewer = scene.start(sys.executable, "-c", VIEWER, "0")
        assert host.stdin
        assert host.stdout
        assert host.stdout.readline() == "up\n"
        host.stdin.write("\n")
        host.stdin.flush()
        for fault in faults:
            fault(scene)
            scene.let_steps_pass()

        host.send_signal(signal.SIGUSR1)
        said = json.loads(host.stdout.readline())
        # The process ends before the deadline. `python -m benchmarks faults` measures how long this takes.
        assert host.wait(DEADLINE_S) == 0
        assert scene.daemon.poll() is None
        assert said["waits"] <= said["steps"] / STEPS_A_WAIT

        with Feed() as feed:
            eventually(lambda: state_of(feed, pid=host.pid) == "ended")
            view = view_of(feed, pid=host.pid)
            assert not feed.is_daemon_inside
        assert view is not None
        assert view.steps is not None
        assert view.steps.count == said["steps"]
        assert view.loss.dropped == 0
        assert view.loss.produced == view.loss.received == RECORDS_A_STEP * said["steps"]
        assert host.pid not in {process.info["ppid"] for process in psutil.process_iter(["ppid"])}


# --- faults of the host itself ------------------------------------------------------------------------------

COUNTING = """
import os, sys, time
from cbtop import BrickProfiler
profiler = BrickProfiler()
def steps(count, name="a"):
    for _ in range(count):
        with profiler.step("decode", tokens=1), profiler.brick(name): pass
"""


def run(script: str, *arguments: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    """Run the Python code `script` in a new process until it ends."""
    command = [sys.executable, "-c", COUNTING + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **popen)


def seen() -> list[tuple[str, int]]:
    """Return the state and the number of steps of each process, in the order of their start."""
    with Feed() as feed:
        eventually(lambda: (feed.poll(50), not feed.links.unanswered)[1])

        def views_of_all() -> tuple[list[SourceView]] | None:
            """Return the views of all processes, or None until all are read.

            An ended process is read only when a viewer shows it.
            """
            feed.poll(50)
            found = [view for source in feed.sources() if (view := feed.view(source.key))]
            return None if any(view.loss.unread for view in found) else (found,)

        (views,) = eventually(views_of_all)
        for view in views:
            assert view.loss.produced == view.loss.received + view.loss.dropped
    return [(view.state, view.steps.count if view.steps else 0) for view in sorted(views, key=lambda view: view.key)]


def test_a_host_killed_in_the_middle_of_a_step_has_lost_no_complete_record(runtime: Path, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    script = """
import mmap
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    counter = memoryview(mmap.mmap(file.fileno(), 4096)).cast("q")
with profiler.step("decode", tokens=1):
    while True:
        with profiler.brick("a"): pass
        counter[0] += 1
        if counter[0] == 1000: print("up", flush=True)
        time.sleep(1e-5)
"""
    command = [sys.executable, "-c", COUNTING + script, str(counted)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()
    (completed,) = struct.unpack("<q", counted.read_bytes()[:8])
    with Feed() as feed:
        eventually(lambda: state_of(feed, pid=process.pid) == "gone")
        # The daemon has started after the end of the process, so it reads the ring only when a viewer shows it.
        view = eventually(lambda: (seen := view_of(feed, pid=process.pid)) and not seen.loss.unread and seen)
    # The process may have been killed after it wrote a record and before it counted it.
    assert view.loss.received in (completed, completed + 1)
    assert view.loss.dropped == 0


def test_a_fork_records_for_itself_and_neither_touches_the_others_files() -> None:
    done = run("""
steps(10)
child = os.fork()
steps(5 if child == 0 else 7)
if child: os.waitpid(child, 0)
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(seen()) == [("ended", 5), ("ended", 17)]


def test_what_ran_before_an_exec_and_what_runs_after_are_both_there() -> None:
    after = COUNTING + "steps(4)"
    done = run("steps(6); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])", after)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(seen()) == [("ended", 4), ("gone", 6)]


def test_os__exit_loses_the_goodbye_and_no_record() -> None:
    assert run("steps(9); os._exit(3)").returncode == 3
    assert seen() == [("gone", 9)]


EXHAUST = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
def exhaust():
    try:
        while True: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
"""


def test_a_host_without_descriptors_goes_on_and_warns_once() -> None:
    done = run(EXHAUST + "exhaust(); steps(50); os.write(1, b'through')")
    assert (done.returncode, done.stdout) == (0, "through")
    assert done.stderr.count("cbtop records nothing") == 1
    assert "Too many open files" in done.stderr
    assert seen() == []


def test_a_host_that_runs_out_of_descriptors_later_loses_nothing() -> None:
    done = run(EXHAUST + "steps(3); exhaust(); steps(50, 'b')")
    assert (done.returncode, done.stderr) == (0, "")
    assert seen() == [("ended", 53)]


@pytest.fixture
def small_disk(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a runtime directory on a disk with room for little more than one ring."""
    disk = runtime / "disk"
    disk.mkdir()
    size = DEFAULT_RING_BYTES + 64 * 4096
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root only")
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_host_on_a_full_disk_goes_on_unprofiled_and_leaves_no_partial_file(small_disk: Path) -> None:
    fill(small_disk)
    done = run("steps(50); print('through')")
    assert (done.returncode, done.stdout) == (0, "through\n")
    assert done.stderr.count("cbtop records nothing") == 1
    assert "No space left on device" in done.stderr
    assert [path.name for path in small_disk.iterdir()] == ["filling"]


@pytest.mark.slow
def test_a_disk_that_fills_during_a_run_costs_no_record_once_there_is_room(small_disk: Path) -> None:
    script = """
steps(5)
print("up", flush=True)
sys.stdin.readline()
for number in range(300):
    steps(1, f"brick {number}")  # each a node that finds no room
print("still up", flush=True)
sys.stdin.readline()
steps(5)
"""
    command = [sys.executable, "-c", COUNTING + script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        fill(small_disk)
        process.stdin.write("\n")
        assert process.stdout.readline() == "still up\n"
        (small_disk / "filling").unlink()
        process.stdin.write("\n")
        assert process.wait(DEADLINE_S) == 0
    assert seen() == [("ended", 310)]


@pytest.fixture
def image_disk(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a runtime directory on a 256 MiB disk with the requested file system."""
    make: list[str] = request.param
    if os.getuid() != 0 or shutil.which(make[0]) is None:
        pytest.skip(f"needs root and {make[0]}")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run([*make, str(image)], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        (disk / "runtime").mkdir(mode=0o700)
        monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(disk / "runtime"))
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


FILLED = """
import time
steps(5)
print("up", flush=True)
sys.stdin.readline()
for _ in range(2):  # each time round the ring: every page of it is written, to the disk and again
    steps(140_000)
    os.sync()
print("still up", flush=True)
"""


def survive(disk: Path) -> str:
    """Run a process that fills its ring repeatedly on a full disk. Return its stderr."""
    with subprocess.Popen(
        [sys.executable, "-c", COUNTING + FILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        fill(disk)
        os.sync()
        out, err = process.communicate("\n", timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "still up\n"), err
    return err


@pytest.mark.slow
@pytest.mark.parametrize(
    "image_disk",
    [["mkfs.ext4", "-q"], pytest.param(["mkfs.xfs", "-q"], marks=pytest.mark.slow)],
    indirect=True,
    ids=["mkfs.ext4", "mkfs.xfs"],
)
def test_a_disk_that_fills_up_takes_nothing_from_a_ring_on_it(image_disk: Path) -> None:
    assert survive(image_disk) == ""
    assert [state for state, _steps in seen()] == ["ended"]


APART, MIXED = ["mkfs.btrfs", "-q"], ["mkfs.btrfs", "-q", "--mixed"]


@pytest.mark.parametrize(
    ("image_disk", "attribute"),
    [
        pytest.param(APART, "", id="data apart-plain"),
        pytest.param(MIXED, "+C", id="mixed-no copy-on-write"),
        pytest.param(APART, "+c", id="data apart-compressed", marks=pytest.mark.slow),
        pytest.param(APART, "+C", id="data apart-no copy-on-write", marks=pytest.mark.slow),
        pytest.param(MIXED, "", id="mixed-plain", marks=pytest.mark.slow),
        pytest.param(MIXED, "+c", id="mixed-compressed", marks=pytest.mark.slow),
    ],
    indirect=["image_disk"],
)
def test_where_a_full_disk_would_kill_the_host_it_goes_on_unprofiled(image_disk: Path, attribute: str) -> None:
    if attribute:
        subprocess.run(["chattr", attribute, str(image_disk / "runtime")], check=True)
    said = survive(image_disk)
    assert len(said.splitlines()) == 1
    assert "cbtop records nothing" in said
    assert str(image_disk / "runtime") in said
    assert "copies on write" in said
    assert "set CBTOP_RUNTIME_DIR to a directory of a tmpfs, such as /dev/shm" in said
    assert list((image_disk / "runtime").iterdir()) == []
    doctor = cbtop("doctor")
    assert doctor.returncode == 1
    assert f"{image_disk / 'runtime'} is on btrfs" in doctor.stdout


@pytest.fixture
def read_only(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a runtime directory that exists but cannot be written."""
    disk = runtime / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m,mode=0700", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a read-only disk can be mounted by root only")
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_in_a_directory_that_cannot_be_written_everybody_says_so_in_one_line(read_only: Path, tmp_path: Path) -> None:
    done = run("steps(50); print('through')")
    assert (done.returncode, done.stdout) == (0, "through\n")
    said = [done.stderr]
    for command in (
        ["--headless", "--once", "--timeout", "1"],
        ["ls", "--timeout", "1"],
        ["daemon"],
        ["record", "-o", str(tmp_path / "out.cbtop"), "--duration", "1"],
    ):
        done = cbtop(*command)
        assert done.returncode in (1, 3)
        said.append(done.stderr.strip().splitlines()[-1])
    for line in said:
        assert len(line.strip().splitlines()) == 1
        assert str(read_only) in line
        assert "Read-only file system; set CBTOP_RUNTIME_DIR to a directory of yours that can be written" in line
    assert "cannot be written" in cbtop("doctor").stdout


# The default run skips this test, because a test below has the same limit, and test_output.py tests other commands.
@pytest.mark.slow
def test_a_host_is_profiled_with_16_descriptors_and_viewers_ask_for_more(runtime: Path) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
    done = run(few + "steps(50); print('through')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\n", "")
    for command in (["--headless", "--once"], ["ls"], ["daemon"], ["demo", "--headless", "--steps", "3"]):
        script = f"{few}import sys; from cbtop.cli import main; sys.exit(main({command!r}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert "too many open files" in last
        assert "ulimit -n 1024" in last


@pytest.mark.slow
def test_a_daemon_without_descriptors_serves_on_what_it_has(runtime: Path) -> None:
    with ExitStack() as running:
        script = "steps(1); print('up', flush=True); sys.stdin.readline(); steps(20)"
        host = running.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", COUNTING + script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        running.callback(host.kill)
        assert host.stdout
        host.stdout.readline()
        limited = f"ulimit -n 48; exec {sys.executable} -m cbtop daemon"
        serving = running.enter_context(subprocess.Popen(["sh", "-c", limited], stderr=subprocess.PIPE))
        running.callback(serving.kill)
        assert serving.stderr
        assert b"serving" in serving.stderr.readline()
        with Feed() as feed:
            eventually(lambda: state_of(feed, pid=host.pid) == "live")
            for number in range(40):
                forge(runtime, f"{os.getpid()}-{process_start(os.getpid())}-{number}")
            host.communicate("\n", timeout=DEADLINE_S)
            eventually(lambda: state_of(feed, pid=host.pid) == "ended")
            view = view_of(feed, pid=host.pid)
        assert serving.poll() is None
    assert view is not None
    assert view.steps is not None
    assert view.steps.count == 21


@pytest.mark.parametrize("pure", ["", pytest.param("1", marks=pytest.mark.slow)], ids=["compiled", "python"])
def test_what_runs_at_every_brick_makes_no_system_call(tmp_path: Path, pure: str) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    log = tmp_path / "calls"
    # The program writes more records than its ring can hold.
    script = "steps(1); os.stat('/'); steps(140_000); os.stat('/')"
    command = [strace, "-f", "-o", str(log), sys.executable, "-c", COUNTING + script]
    subprocess.run(command, check=True, env=os.environ | {"CBTOP_PURE_PYTHON": pure}, timeout=DEADLINE_S)
    lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    first, last = [at for at, line in enumerate(lines) if re.match(r'(newfstatat\(AT_FDCWD, |stat\()"/", ', line)][
        -2:
    ]
    between = {line.partition("(")[0] for line in lines[first + 1 : last]}
    # Python calls these functions of Linux to manage its memory.
    assert between <= {"brk", "mmap", "munmap", "mremap", "madvise"}


@pytest.mark.slow
def test_a_clock_that_is_set_takes_nothing_from_what_runs(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "steps(5); print('up', flush=True); sys.stdin.readline(); steps(5)"
    command = [sys.executable, "-c", COUNTING + script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout
        host.stdout.readline()
        real_ns, offset_ns = time.time_ns, 0
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + offset_ns)
        monkeypatch.setattr(time, "time", lambda: (real_ns() + offset_ns) / 1e9)
        for offset_ns in (86_400_000_000_000, -86_400_000_000_000):  # noqa: B007 - the lambdas look
            with Feed() as feed:
                # The daemon must run inside this process, because the clock is changed only here.
                assert feed.is_daemon_inside
                eventually(lambda feed=feed: steps_of(feed, host.pid) == 5)
                assert state_of(feed, pid=host.pid) == "live"
        with Feed() as feed:
            eventually(lambda: steps_of(feed, host.pid) == 5)
            offset_ns = 86_400_000_000_000
            host.communicate("\n", timeout=DEADLINE_S)
            eventually(lambda: state_of(feed, pid=host.pid) == "ended")
            assert steps_of(feed, host.pid) == 10


def steps_of(feed: Feed, pid: int) -> int:
    view = view_of(feed, pid=pid)
    return view.steps.count if view and view.steps else 0


def forge(directory: Path, stem: str, nodes: list[Node] | None = None, pid: int = DEAD_PID, start: int = 1) -> Path:
    """Write a ring and a catalog with the given nodes and process. Returns the path of the ring."""
    with forging(directory, stem, nodes, pid, start) as hidden:
        pass
    return directory / hidden.name


@contextmanager
def forging(
    directory: Path, stem: str, nodes: list[Node] | None = None, pid: int = DEAD_PID, start: int = 1
) -> Iterator[Path]:
    """Yield the writer of a hidden ring, which moves to its final name at the end.

    If a daemon found a half-written ring, it would take its process for dead and never look again.
    """
    hidden = directory / "forging"
    hidden.mkdir()
    ring = hidden / f"{stem}.ring"
    catalog = CatalogWriter(ring.with_suffix(".catalog"))
    catalog.write(HostHello(2, 0, pid, start, "here", "", "forged", "3", "python", 1, 1))
    for node in nodes or []:
        catalog.write(node)
    catalog.close()
    writer = RingWriter(ring, 64 * RECORD_BYTES)
    with ring.open("r+b") as file:
        file.seek(32)
        file.write(struct.pack("<qq", pid, start))
    # Negative times: the files look old even on a machine that has just started.
    for number in range(3):
        writer.record(1, number - 3, number - 2, 1)
    yield ring
    for path in (ring.with_suffix(".catalog"), ring):
        path.rename(directory / path.name)
    hidden.rmdir()


def view_of(feed: Feed, stem: str = "", pid: int = 0) -> SourceView | None:
    """Return the view of the source with this file name or process id."""
    feed.poll(20)
    keys = [source.key for source in feed.sources()]
    wanted = stem.replace("-", ":") if stem else f":{pid}:"
    found = [view for key in keys if wanted in key and (view := feed.view(key))]
    return found[0] if found else None


def state_of(feed: Feed, stem: str = "", pid: int = 0) -> str:
    view = view_of(feed, stem, pid)
    return view.state if view else ""


@pytest.mark.parametrize(
    "files", [24, *(pytest.param(files, marks=pytest.mark.slow) for files in (64, 8, 16, 32, 48))]
)
@pytest.mark.parametrize(
    "command",
    [
        "daemon --metrics 0",  # one command that serves data and one that only reads data
        "--headless --once --timeout 1",
        *(pytest.param(command, marks=pytest.mark.slow) for command in ("daemon", "ls")),
    ],
)
def test_where_few_files_may_be_open_there_is_one_true_line_or_all_works(command: str, files: int) -> None:
    limited = f"ulimit -c 0 -n {files}; exec {shlex.join(CBTOP)} {command}"
    with subprocess.Popen(
        ["bash", "-c", limited], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        line = process.stderr.readline()
        if "serving" in line:
            process.terminate()
        assert re.fullmatch(r"(cbtop daemon: metrics at .*\n)?", process.stderr.read())
        said, code = line.removeprefix("cbtop: "), process.wait(DEADLINE_S)
        if code == 1:
            wanted = r"too many open files: \d+ more can be, 24 are wanted: raise the limit \(ulimit -n 1024\)\n"
            assert re.fullmatch(wanted, said)
        else:
            assert said.startswith(("nothing is running", "cbtop daemon: serving")), said
            assert code in (3, -signal.SIGTERM, 143)
    assert files >= 32 or code == 1
    assert files < 64 or code != 1
