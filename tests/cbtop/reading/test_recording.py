"""Tests of `cbtop.read`: its tables have the rows of exporters and reports.

Files that cannot be read are rejected.
"""

from __future__ import annotations

import csv
import io
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import cbtop
from cbtop.errors import CbtopError, NoDataError, UntrustedError
from cbtop.protocol.errors import ProtocolError, RecordingError
from cbtop.protocol.recording import RecordingOrigin, RecordingWriter
from tests.cbtop.made_recordings import made_recording
from tests.cbtop.made_serving import record_served
from tests.cbtop.reports.test_html import parsed
from tests.integration.hosts import cbtop as command
from tests.representatives import first_by_default

RECORDINGS = sorted(Path(__file__).parents[1].glob("*.cbtop"))
TABLES = ("steps", "layers", "bricks", "kernels", "calls", "requests", "verdicts")
by_size = sorted(RECORDINGS, key=lambda path: path.stat().st_size)
every_recording = first_by_default("path", by_size, ids=lambda path: path.stem)


def read_all(path: Path, *, allow_damage: bool = False) -> int:
    """Return the number of rows of all tables together."""
    with cbtop.read(path, allow_damage=allow_damage) as run:
        return sum(len(getattr(run, table)()) for table in TABLES)


@pytest.fixture
def made(runtime: Path, tmp_path: Path) -> Path:
    """Record a prefill and 20 decode steps of 100 µs, each with one brick."""
    made_recording(runtime, tmp_path / "run.cbtop", 10)
    return tmp_path / "run.cbtop"


def test_importing_cbtop_loads_no_numpy_for_read_and_live() -> None:
    program = "import cbtop, sys; assert not {'numpy', 'zmq', 'msgpack'} & {*sys.modules}; cbtop.read; cbtop.live"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_notebook_shows_the_report_of_a_recording(made: Path) -> None:
    with cbtop.read(made) as run:
        shown = run._repr_html_()
    parsed(shown)
    assert "decode: 20 steps" in shown
    assert 'class="step"' in shown  # one step as a flame chart
    assert "<body" not in shown


@every_recording
def test_each_table_has_the_rows_of_csv_of_its_kind(path: Path) -> None:
    source = ("--source", "2631") if path.stem == "h100_own_kernels" else ()
    rows = list(csv.DictReader(io.StringIO(command("export", str(path), "--format", "csv", *source).stdout)))
    kinds = Counter(row["kind"] for row in rows)
    with cbtop.read(path) as run:
        assert [len(table) for table in (run.steps(), run.layers(), run.bricks(), run.kernels(), run.calls())] == [
            kinds["step"], kinds["layer"], kinds["brick"], kinds["kernel"] + kinds["transfer"], len(rows),
        ]  # fmt: skip
        for table, kind in ((run.steps(), "step"), (run.bricks(), "brick")):
            of_kind = [row for row in rows if row["kind"] == kind]
            us = [(int(row["end_ns"]) - int(row["start_ns"])) / 1e3 for row in of_kind]
            np.testing.assert_allclose(table.column("duration_us"), us)
            assert table.column("phase").tolist() == [row["phase"] or None for row in of_kind]


@every_recording
def test_the_verdicts_are_those_of_the_json_report(path: Path) -> None:
    report = json.loads(command("replay", str(path), "--headless", "--format", "json").stdout)
    expected = [
        (verdict["id"], verdict["sentence"], verdict["gain_tokens_per_sec"], source["pid"])
        for source in report["sources"]
        for verdict in source["verdicts"]
    ]
    with cbtop.read(path) as run:
        table = run.verdicts()
    columns = (table.column(name).tolist() for name in ("id", "sentence", "gain_tokens_per_sec", "pid"))
    found = [(*row[:2], None if np.isnan(row[2]) else row[2], row[3]) for row in zip(*columns, strict=True)]
    assert found == expected != []


def test_the_tokens_and_times_of_steps_are_known(made: Path) -> None:
    with cbtop.read(str(made)) as run:
        steps, bricks = run.steps(), run.bricks()
        assert (run.lost, run.is_complete) == (0, True)
        assert repr(run).endswith(": 41 calls>")
    assert steps.column("step").tolist() == list(range(1, 22))
    assert steps.column("phase").tolist() == ["prefill"] + ["decode"] * 20
    assert steps.column("tokens").tolist() == [4] + [1] * 20
    assert steps.column("duration_us").tolist() == [10.0] + [100.0] * 20
    assert steps.column("begin_s")[0] <= 0
    assert np.isnan(steps.column("sequences")).all()
    assert bricks.column("step").tolist() == list(range(2, 22))  # The tables can be read after the file is closed.
    assert set(bricks.column("elements").tolist()) == {8}


def test_a_closed_recording_says_so(made: Path) -> None:
    with cbtop.read(made) as run:
        steps = run.steps()
    assert len(steps) == 21  # it stays valid
    with pytest.raises(RecordingError, match=r"run\.cbtop is closed; open it again with cbtop\.read"):
        run.bricks()


def test_records_from_before_the_recording_are_named() -> None:
    (path,) = [one for one in RECORDINGS if one.stem == "imperfect"]
    with cbtop.read(path) as run:
        assert run.lost > 0
        assert repr(run).endswith(f" calls; {run.lost:,} records are missing, see `lost`>")


def test_tables_stay_equal_when_they_are_read_again(made: Path) -> None:
    with cbtop.read(made) as run:
        first, second = run.calls(), run.calls()
    for name in first.columns:
        assert first.column(name).tolist() == second.column(name).tolist() or np.isnan(first.column(name)).all()


@pytest.mark.parametrize("data", [b"", b"CBTOPREC", b"not a recording" * 20], ids=["empty", "short", "other"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.cbtop"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"run\.cbtop is not a recording of cbtop; pass a file of"):
        cbtop.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"run\.cbtop: No such file or directory"):
        cbtop.read(tmp_path / "run.cbtop")


def test_a_recording_without_a_process_is_refused(tmp_path: Path) -> None:
    RecordingWriter(tmp_path / "run.cbtop", RecordingOrigin("here", 0, 0), 1 << 20).close()
    with pytest.raises(NoDataError, match=r"run\.cbtop holds no process"):
        cbtop.read(tmp_path / "run.cbtop")


def test_a_damaged_frame_is_an_error_unless_it_is_allowed(made: Path) -> None:
    whole = made.read_bytes()
    middle = len(whole) // 2
    made.write_bytes(whole[:middle] + bytes(byte ^ 255 for byte in whole[middle : middle + 8]) + whole[middle + 8 :])
    with pytest.raises(UntrustedError, match=r"damaged frames, 1: .* pass allow_damage=True to read the rest"):
        cbtop.read(made)
    with cbtop.read(made, allow_damage=True) as run:
        assert 0 < len(run.calls()) <= 41


def test_damage_after_the_file_was_opened_is_an_error(made: Path) -> None:
    with cbtop.read(made) as run:
        size = made.stat().st_size
        with made.open("r+b") as file:
            file.seek(200)
            file.write(bytes(size - 400))
        with pytest.raises(UntrustedError, match="damaged frames"):
            run.calls()


def test_a_recording_cut_short_has_what_lies_before_the_cut(made: Path) -> None:
    whole = made.read_bytes()
    made.write_bytes(whole[: len(whole) * 2 // 3])
    with cbtop.read(made) as run:
        assert not run.is_complete
        assert repr(run).endswith("; its end is missing>")
        assert 10 < len(run.calls()) < 41


def test_any_changed_bytes_give_tables_or_an_error_of_cbtop(made: Path) -> None:
    whole, chance = made.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        made.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        try:
            read_all(made)
        except (CbtopError, ProtocolError):
            refused += 1
    assert 0 < refused < 60


def test_each_request_of_an_engine_is_a_row_with_its_moments(runtime: Path, tmp_path: Path) -> None:
    record_served(runtime, tmp_path / "served.cbtop")
    with cbtop.read(tmp_path / "served.cbtop") as run:
        table = run.requests()
    assert table.column("request").tolist() == ["a", "b", "c"]
    assert table.column("reason").tolist() == ["length", "abort", None]
    np.testing.assert_allclose(table.column("queued_us"), [2_000, 10_000, 1_000])
    np.testing.assert_allclose(table.column("first_token_us"), [12_000, np.nan, 10_000])
    np.testing.assert_allclose(table.column("duration_us"), [52_000, 20_000, np.nan])
    assert table.column("output_tokens").tolist() == [5, 0, 2]
