"""Tests of output that fails or cannot be complete.

The command then writes one line that tells the truth, and has the right exit code. It leaves no partial file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbtop.exporters import EXPORTERS
from cbtop.protocol.recording import RecordingReader
from tests.cbtop.made_recordings import made_recording
from tests.cbtop.recorded import Clock, profiler_in
from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop, host
from tests.representatives import first_by_default

PRINTING = {
    "help": ("--help",),
    "help of a command": ("export", "--help"),
    "version": ("--version",),
    "report": ("--headless", "--once", "--window=all"),
    "JSON": ("--headless", "--once", "--window=all", "--format", "json"),
    "ls": ("ls",),
    "replay": ("replay", "run.cbtop", "--headless"),
    "export": ("export", "run.cbtop", "--format", "csv"),
    "binary": ("export", "run.cbtop", "--format", "perfetto"),
    "doctor": ("doctor",),
    "post-mortem": ("post-mortem", str(os.getpid())),
    "keys": ("keys", "list"),
}


def called(*by_default: str) -> list[Any]:
    """Return parameters for all commands that print.

    Only the commands in `by_default` run by default. All other commands are slow tests, because the same code prints
    their output.
    """
    return [
        pytest.param(arguments, id=name, marks=() if name in by_default else pytest.mark.slow)
        for name, arguments in PRINTING.items()
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recording that is larger than an output buffer.

    Tests share it, because writing it takes 0.3 s.
    """
    directory = tmp_path_factory.mktemp("made")
    made_recording(directory, directory / "run.cbtop", 100)
    return directory / "run.cbtop"


@pytest.fixture
def recording(made: Path, runtime: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the recording in an empty folder. Its process still runs and has a ring."""
    profiler = profiler_in(runtime, Clock())
    with profiler.step("decode", tokens=1), profiler.brick("a", 8):
        pass
    yield Path(shutil.copy(made, tmp_path))
    profiler.close()


def ran(arguments: tuple[str, ...], recording: Path, shell: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command line in the folder of the recording.

    `"$@"` in it is replaced by `cbtop` with `arguments`, and the output is buffered.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", shell, "bash", *CBTOP, *arguments], cwd=recording.parent, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@first_by_default("arguments", called("JSON", "binary"))
def test_a_full_disk_behind_stdout_is_one_line_and_code_1(arguments: tuple[str, ...], recording: Path) -> None:
    done = ran(arguments, recording, 'exec "$@" > /dev/full')
    assert (done.returncode, done.stderr) == (1, b"cbtop: standard output: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", called("export"))
def test_a_stdout_that_nobody_reads_is_code_141_and_no_word(arguments: tuple[str, ...], recording: Path) -> None:
    done = ran(arguments, recording, 'exec 3> >(exec true); wait $!; exec "$@" >&3 3>&-')
    assert (done.returncode, done.stderr) == (141, b"")


@first_by_default("arguments", [("--help",), ("ls",), ("no-such-command",)])
def test_a_closed_stdout_is_one_line_and_code_1(arguments: tuple[str, ...], recording: Path) -> None:
    done = ran(arguments, recording, 'exec "$@" >&-')
    assert (done.returncode, done.stderr) == (
        1, b"cbtop: standard output is closed; there is nowhere to print to\n",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments", called("replay"))
def test_what_stdout_cannot_encode_is_printed_in_ascii(arguments: tuple[str, ...], recording: Path) -> None:
    done = ran(arguments, recording, 'LC_ALL=C PYTHONIOENCODING=ascii exec "$@"')
    assert (done.returncode, done.stdout != b"", done.stderr) == (0, True, b"")
    if arguments == PRINTING["replay"]:
        assert b"100.0 us" in done.stdout


# The default run skips this test, because a test above has no reader, and in test_watching.py the reader goes away.
@pytest.mark.slow
def test_head_reads_as_many_lines_as_it_likes(recording: Path) -> None:
    for arguments in (PRINTING["help"], PRINTING["replay"], PRINTING["export"]):
        done = ran(arguments, recording, '"$@" | head -1; exit ${PIPESTATUS[0]}')
        # The exit code is 141 (SIGPIPE) if the command was still writing when head ended.
        assert done.returncode in (0, 141)
        assert (len(done.stdout.splitlines()), done.stderr) == (1, b"")


@first_by_default(
    "arguments",
    [
        *called("export"),
        pytest.param(("record", "-o", "new.cbtop", "--duration", "0.1"), id="record"),
        # The default run skips this case, because test_faults.py tests the daemon's output.
        pytest.param(("daemon",), id="daemon", marks=pytest.mark.slow),
        pytest.param(("demo", "--headless"), id="demo", marks=pytest.mark.slow),
    ],
)
def test_with_sixteen_descriptors_a_command_works_or_says_how_many_it_wants(
    arguments: tuple[str, ...], recording: Path
) -> None:
    done = ran(arguments, recording, 'ulimit -n 16; exec "$@"')
    if done.stderr:
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
        assert b"24 are wanted: raise the limit (ulimit -n 1024)" in done.stderr
    else:
        assert (done.returncode, done.stdout != b"") == (0, True)
        assert arguments[0] not in ("ls", "--headless", "record", "daemon", "demo")
    assert sorted(path.name for path in recording.parent.iterdir()) == ["run.cbtop"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_an_export_to_a_full_disk_is_one_line_and_keeps_the_existing_file(recording: Path, full_disk: Path) -> None:
    (full_disk / "out").write_bytes(b"mine" * 15_000)
    for name in EXPORTERS:
        if name in ("dot", "folded"):
            continue  # these outputs are shorter than a page
        done = cbtop("export", str(recording), "--format", name, "-o", str(full_disk / "out"), "--force")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"cbtop: {full_disk}/out: No space left on device; nothing is exported\n"
        assert [path.name for path in full_disk.iterdir()] == ["out"]
        assert (full_disk / "out").read_bytes() == b"mine" * 15_000


def test_a_recording_on_a_full_disk_is_one_line_and_leaves_no_file(recording: Path, full_disk: Path) -> None:
    (full_disk / "filling").write_bytes(bytes(65_536))
    done = cbtop("record", "-o", str(full_disk / "new.cbtop"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cbtop: {full_disk}/new.cbtop: No space left on device; it ends after 0 bytes\n"
    assert [path.name for path in full_disk.iterdir()] == ["filling"]


@pytest.mark.slow
def test_a_disk_that_fills_ends_a_recording_in_one_line_and_the_file_opens(recording: Path, full_disk: Path) -> None:
    with host():
        done = ran(("record", "-o", "disk/new.cbtop"), recording, 'exec "$@"')
    assert (done.returncode, done.stdout) == (1, b"")
    *progress, last = done.stderr.splitlines()
    assert all(line.startswith(b"recording ") for line in progress)
    assert re.fullmatch(rb"cbtop: \S+: (no room for more|No space left on device); it ends after \d+ bytes", last)
    reader = RecordingReader(full_disk / "new.cbtop")
    assert sum(1 for frame in reader.frames() for _ in frame.messages()) > 0
    reader.close()


@pytest.mark.slow
def test_a_place_that_takes_no_file_is_one_line_and_is_left_as_it_is(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    export, record = ("export", "run.cbtop", "--format", "csv"), ("record", "--duration", "0.1")
    for command, place, force, words in (
        (export, "directory", True, "not a regular file"),
        (export, "pipe", True, "not a regular file"),
        (export, "/dev/full", True, "not a regular file"),
        (export, "directory", False, "not a regular file"),
        (export, "mine", False, "exists; pass --force to overwrite it"),
        (export, "link", False, "exists; pass --force to overwrite it"),
        (export, "none/out", True, "No such file or directory"),
        (export, "mine/out", True, "Not a directory"),
        (export, "/proc/out", True, "No such file or directory"),
        (record, "directory", True, "Is a directory"),
        (record, "/dev/full", True, "not a regular file"),
        (record, "mine", False, "exists; pass --force to overwrite it"),
        (record, "none/out", True, "No such file or directory"),
    ):
        done = cbtop(*command, "-o", place, *(["--force"] if force else []))
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert place in done.stderr
        assert words in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "link", "mine", "pipe", "run.cbtop"]
    assert (tmp_path / "mine").read_text() == "mine"
    assert Path("/dev/full").is_char_device()


def test_what_a_link_points_to_is_overwritten_and_the_link_stays(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    done = cbtop("export", str(recording), "--format", "csv", "-o", str(tmp_path / "link"), "--force")
    assert done.returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "mine").read_text().startswith("node,")


def test_an_unusable_address_overwrites_no_recording(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = cbtop("record", "-o", str(tmp_path / "mine"), "--force", "--connect", "tcp://198.51.100.1:5")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert (tmp_path / "mine").read_text() == "mine"
