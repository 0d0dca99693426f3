"""Tests of `cbtop export`: the command writes the contents of a recording or a ring. It rejects everything else."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.client.stream_recorder import StreamRecorder
from cbtop.exporters import EXPORTERS
from cbtop.exporters.recorded import processes_of_recording
from cbtop.protocol.recording import RecordingReader
from tests.cbtop.made_recordings import made_recording
from tests.integration.hosts import CBTOP, HOST, cbtop, eventually
from tests.representatives import first_by_default


@pytest.fixture
def recording(runtime: Path, tmp_path: Path) -> Path:
    """Record a process with twenty steps of one brick each. The process ran a prefill before the recording began."""
    made_recording(runtime, tmp_path / "run.cbtop", 10)
    return tmp_path / "run.cbtop"


def test_every_record_of_a_recording_is_exported_and_lost_ones_are_counted(recording: Path) -> None:
    reader = RecordingReader(recording)
    (recorded,) = processes_of_recording(reader).values()
    records = list(recorded.records)
    assert (len(records), recorded.overwritten, recorded.rejected, recorded.missed) == (41, 0, 0, 0)
    assert [recorded.nodes[r.node].name for r in records[:3]] == ["prefill", "a", "decode"]
    assert {r.end_ns - r.start_ns for r in records[1:]} == {100_000}
    reader.close()


# By default, test one text format and one binary format. tests/cbtop/exporters tests the contents of all formats.
@first_by_default(
    "name",
    [one if one in ("csv", "perfetto") else pytest.param(one, marks=pytest.mark.slow) for one in EXPORTERS],
)
def test_every_format_goes_to_a_file_or_to_stdout_alike(recording: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    done = cbtop("export", str(recording), "--format", name, "-o", str(out))
    assert (done.returncode, done.stdout) == (0, "")
    assert "41 records" in done.stderr
    for to_stdout in ([], ["-o", "-"]):
        command = [*CBTOP, "export", str(recording), "--format", name, *to_stdout]
        printed = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
        assert printed.stdout == out.read_bytes() != b""
        assert printed.stderr == b""
        assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("name", ["folded", "html"])
def test_the_missing_end_of_a_recording_is_said(recording: Path, name: str) -> None:
    cut = recording.with_name("cut.cbtop")
    cut.write_bytes(recording.read_bytes()[:-100])
    done = cbtop("export", str(cut), "--format", name)
    assert (done.returncode, done.stdout != "") == (0, True)
    assert (
        done.stderr
        == f"cbtop: {cut} was not closed: its recorder was killed or still writes, so the end is missing\n"
    )


def test_it_overwrites_nothing_unasked(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine")
    done = cbtop("export", str(recording), "--format", "csv", "-o", str(out))
    assert (done.returncode, out.read_text()) == (2, "mine")
    assert "pass --force" in done.stderr
    assert cbtop("export", str(recording), "--format", "csv", "-o", str(out), "--force").returncode == 0
    assert len(out.read_text().splitlines()) == 42


def test_a_process_that_is_gone_is_exported_from_its_ring() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST, "5"]) as process:
        process.wait()
    done = cbtop("export", "--pid", str(process.pid), "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(rows) == 5 * 7
    assert {row["name"] for row in rows} == {"decode", "Layer 0", "Layer 1", "RmsNorm", "DownProjection"}


def test_what_does_not_fit_together_is_said(recording: Path, tmp_path: Path) -> None:
    for words, code, arguments in (
        ("a recording or --pid", 2, ["--format", "csv"]),
        ("choose one with --source", 2, [str(recording), "--format", "csv", "--source", "nobody"]),
        ("has recorded anything", 3, ["--pid", "1", "--format", "csv"]),
        ("is not a recording of cbtop; pass a file of", 2, [__file__, "--format", "csv"]),
    ):
        done = cbtop("export", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert words in done.stderr


@pytest.mark.slow
def test_two_processes_go_together_where_the_format_can_hold_them(tmp_path: Path) -> None:
    path = tmp_path / "run.cbtop"
    recorder = StreamRecorder(path, None, 1 << 30)
    eventually(lambda: recorder.poll(20) or recorder.has_begun)
    hosts = [subprocess.Popen([sys.executable, "-c", HOST, "200"]) for _ in range(2)]
    eventually(lambda: recorder.poll(20) or [t.taken for t in recorder.tallies.values()] == [200 * 7] * 2)
    for process in hosts:
        process.wait()
    recorder.close()
    done = cbtop("export", str(path), "--format", "chrome-trace")
    events = json.loads(done.stdout)["traceEvents"]
    assert {event["pid"] for event in events} == {process.pid for process in hosts}
    done = cbtop("export", str(path), "--format", "jsonl")
    assert done.returncode == 2
    assert "2 processes in one jsonl file" in done.stderr
    done = cbtop("export", str(path), "--format", "jsonl", "--source", str(hosts[0].pid))
    assert len(done.stdout.splitlines()) == 200 * 7


@pytest.mark.slow
def test_a_process_that_left_no_record_in_a_recording_is_not_asked_about(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOST, "5"], check=True)
    path = tmp_path / "run.cbtop"
    recorder = StreamRecorder(path, None, 1 << 30)
    eventually(lambda: recorder.poll(20) or recorder.store.sources)
    with subprocess.Popen([sys.executable, "-c", HOST, "20"]):
        eventually(lambda: recorder.poll(20) or any(t.taken == 20 * 7 for t in recorder.tallies.values()))
        eventually(lambda: recorder.poll(20) or len(recorder.store.sources) == 2)
    recorder.close()
    reader = RecordingReader(path)
    assert len(processes_of_recording(reader)) == 2
    reader.close()
    done = cbtop("export", str(path), "--format", "jsonl")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 20 * 7)
