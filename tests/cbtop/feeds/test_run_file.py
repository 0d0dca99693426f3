"""Tests of reading a file of runs: the result is a run or an error that names the problem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbtop.comparison.contents import Break, Compiled, Contents, PhaseContents, Piece, PieceKind, Total
from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.run_diff import diff
from cbtop.comparison.runs import Pace, TooShort
from cbtop.errors import UsageError
from cbtop.feeds.run_file import MAX_FILE_BYTES, SCHEMA, read_runs, write_runs
from cbtop.reports.gate import gate_json, gate_text
from tests.cbtop.comparison.made_contents import contents, layers, phase
from tests.cbtop.comparison.made_runs import made_run
from tests.representatives import first_by_default


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON document of one run with few bricks."""
    path = tmp_path_factory.mktemp("runs") / "made.json"
    write_runs(
        path,
        [replace(made_run(1, steps=40), contents=replace(contents(phase(layers(1))), compiled=Compiled(1, 0, ())))],
    )
    found: dict[str, Any] = json.loads(path.read_text())
    part = found["runs"][0]["parts"][0]
    kept = {(None, None), ("between bricks", None)}
    part["places"] = [one for one in part["places"] if ((one["brick"] or [None])[0], one["layer"]) in kept][:2]
    return found


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    runs = [made_run(seed, steps=60, cached_from=10, us_a_position=0.1) for seed in (1, 2)]
    few = (TooShort("prefill", 3, 20, 1.5, (8, None)), TooShort("verify", 1, 20))
    runs[0] = replace(runs[0], paces=(Pace(1.5, 2.5), Pace(1.6, 2.6)), too_short=few)
    write_runs(tmp_path / "runs.json", runs)
    assert read_runs(tmp_path / "runs.json") == runs
    with pytest.raises(UsageError, match="exists; pass --force"):
        write_runs(tmp_path / "runs.json", runs)


def test_a_file_of_an_older_version_is_read(document: dict[str, Any], tmp_path: Path) -> None:
    (run,) = document["runs"]
    del run["parts"][0]["failed"], run["paces"]
    run["too_short"] = [["prefill", 3, 20], ["prefill", 3, 20, 1.5]]
    (tmp_path / "older.json").write_text(json.dumps({"schema": document["schema"], "runs": [run]}))
    (read,) = read_runs(tmp_path / "older.json")
    assert read.parts[0].failed == 0
    assert read.too_short == (TooShort("prefill", 3, 20), TooShort("prefill", 3, 20, 1.5))


@first_by_default("every", [9, 1])
def test_every_value_of_another_type_is_an_error_of_ours(
    document: dict[str, Any], tmp_path: Path, every: int
) -> None:
    path = tmp_path / "odd.json"
    tried = 0
    usual = made_run(2, steps=40)
    for odd in (None, "x", -1, 0, [], {}, True, 1e18, 1e300, [["x"]]):
        for place in list(_places(document))[::every]:
            changed = deepcopy(document)
            inner: Any = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = odd
            path.write_text(json.dumps(changed))
            with suppress(UsageError):
                (run,) = read_runs(path)
                if odd in (0, -1, 1e18):
                    for found in (diff(run, usual, anyway=True), diff(usual, run, anyway=True)):
                        judged = default_gate(found)
                        gate_json(judged, found)
                        gate_text(judged, found)
            tried += 1
    assert tried > 500 / every


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object is wanted"),
        ('{"schema": "cbtop.runs/9", "runs": []}', "cbtop.runs/2"),
        ('{"schema": "cbtop.runs/2", "runs": [NaN]}', "an object is wanted"),
        ('{"schema": "cbtop.runs/2", "runs": []}', "there is none in it"),
    ],
)
def test_what_is_no_file_of_runs_says_so(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(UsageError) as error:
        read_runs(tmp_path / "odd.json")
    assert said in str(error.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with open(path, "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(UsageError, match="more than 64 MiB"):
        read_runs(path)


def test_names_in_a_file_reach_no_terminal_as_they_are(document: dict[str, Any], tmp_path: Path) -> None:
    changed = deepcopy(document)
    changed["runs"][0]["name"] = "\x1b[2J\u202eevil"
    (tmp_path / "evil.json").write_text(json.dumps(changed))
    (run,) = read_runs(tmp_path / "evil.json")
    assert "\x1b" not in run.name
    assert "\u202e" not in run.name


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from _places(value[key], (*above, key))


def test_the_contents_of_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = made_run(1, steps=40)
    broken = Compiled(2, 1, (Break("Layer 1 › Activation", "call to print", 2),))
    of_kernels = contents(phase(layers(5)), conditions=(("Triton", "3.7"),))
    varying = PhaseContents(
        "prefill", 4, {Piece(PieceKind.OPERATION, name="clone", dtype="int8"): (0, 3)}, {Total.H2D: (0, 0)}, 9
    )
    runs = [
        replace(run, contents=replace(of_kernels, compiled=broken)),
        replace(run, contents=Contents((varying,))),
        run,
    ]
    write_runs(tmp_path / "runs.json", runs)
    assert read_runs(tmp_path / "runs.json") == runs
    written = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert len(written[0]["contents"]["phases"][0]["pieces"]) == 5  # Layers with equal contents share one row.
    del written[2]["contents"]
    (tmp_path / "older.json").write_text(json.dumps({"schema": SCHEMA, "runs": written[2:]}))
    assert read_runs(tmp_path / "older.json")[0].contents == Contents()
