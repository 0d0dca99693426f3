"""Tests of the Parquet export: the same rows and types as the columns of calls, in row groups of limited size."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from cbtop.exporters import EXPORTERS, parquet
from cbtop.exporters.call_columns import OF_CALLS, CallColumns, of_kinds
from cbtop.exporters.recorded import processes_of_recording
from cbtop.protocol.recording import RecordingReader
from cbtop.protocol.vocabulary import NodeKind
from tests.integration.hosts import cbtop

RECORDING = Path(__file__).parents[1] / "h100_own_kernels.cbtop"


def test_a_file_has_the_columns_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "GROUP_ROWS", 10_000)
    reader = RecordingReader(RECORDING)
    processes = list(processes_of_recording(reader).values())
    out = io.BytesIO()
    EXPORTERS["parquet"].write(processes, out)
    table = CallColumns(processes, OF_CALLS, of_kinds(*NodeKind)).table()
    reader.close()
    file = arrow.ParquetFile(out)
    groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
    assert min(groups[:-1]) >= 10_000
    assert len(groups) > 5
    found = file.read()
    assert tuple(found.column_names) == OF_CALLS
    assert found.num_rows == len(table) == 110_667
    for name in ("node", "duration_us", "phase", "brick", "kernel"):
        assert found.column(name).to_pylist() == table.column(name).tolist()
    layers = found.column("layer").to_pylist()
    np.testing.assert_array_equal([np.nan if one is None else one for one in layers], table.column("layer"))


def test_without_pyarrow_the_export_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = cbtop("export", str(RECORDING), "--format", "parquet", "-o", str(tmp_path / "run.parquet"))
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "cbtop: --format parquet needs pyarrow; pip install 'cbtop[arrow]'\n",
    )  # fmt: skip
    assert not (tmp_path / "run.parquet").exists()
