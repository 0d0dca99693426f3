"""Tests of the file of measured crossovers (sizes from which a faster method wins): its path, and its validation.

The file is used only for the machine and the version that it was written for.
"""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.protocol import crossovers, kept_file
from cbtop.protocol.crossovers import (
    MAX_CROSSOVERS,
    MAX_MACHINES,
    Crossover,
    MachineCrossovers,
    crossovers_of,
    keep_crossovers,
    known_crossovers,
)
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__
from tests.protocol.any_json import ANY_JSON

FOUND = Crossover("product_bytes", 65536, Provenance.MEASURED, "", 12.5, 9.25, 3.0)
STATIC = Crossover("bf16_tokens", 12, Provenance.STATIC, "no AMX")
HERE = MachineCrossovers("Some Processor", 4, __version__, "2026-11-24T08:00:00+01:00", (FOUND, STATIC))

_in_one_home = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cbtop").mkdir()
    return tmp_path / "cbtop" / "crossovers.json"


def test_what_is_kept_is_read_again_beside_the_roofs_and_is_its_owners_alone(file: Path) -> None:
    assert known_crossovers() == ()
    assert crossovers_of("Some Processor", 4) is None
    keep_crossovers(HERE)
    assert known_crossovers() == (HERE,)
    assert crossovers_of("Some Processor", 4) == HERE
    assert (HERE.title, HERE.day) == ("Some Processor, 4 threads", "2026-11-24")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_machine_measured_again_is_replaced_by_any_version_and_others_stay() -> None:
    other, older = replace(HERE, device="Another"), replace(HERE, version="0.0.1")
    for one in (older, other, HERE):
        keep_crossovers(one)
    assert known_crossovers() == (other, HERE)


@pytest.mark.slow
def test_the_newest_of_many_machines_are_kept_and_the_largest_file_is_read() -> None:
    long = replace(STATIC, note="é" * 200)
    for number in range(1, MAX_MACHINES + 3):
        keep_crossovers(replace(HERE, threads=number, crossovers=(long,) * MAX_CROSSOVERS))
    assert [one.threads for one in known_crossovers()] == list(range(3, MAX_MACHINES + 3))


@pytest.mark.parametrize(("device", "threads"), [("Another Processor", 4), ("Some Processor", 2)])
def test_what_is_of_another_machine_is_refused_in_one_line(device: str, threads: int, file: Path) -> None:
    keep_crossovers(HERE)
    reason = f"{file} is of Some Processor, 4 threads; this is {device}, {threads} threads"
    with pytest.raises(RoofsError, match=f"^{reason}$"):
        crossovers_of(device, threads)


def test_what_another_version_measured_is_refused_in_one_line(file: Path) -> None:
    keep_crossovers(replace(HERE, version="0.0.1"))
    with pytest.raises(RoofsError, match=f"^{file} is by cbtop 0.0.1; this is {__version__}$"):
        crossovers_of("Some Processor", 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "its schema"),
        (b'{"schema": "cbtop.crossovers/2", "machines": []}', "its schema"),
        (b'{"schema": "cbtop.roofs/1", "machines": []}', "its schema"),
        (b'{"schema": "cbtop.crossovers/1"}', "a list of at most"),
        (b'{"schema": "cbtop.crossovers/1", "machines": [1]}', "one of its machines is no map"),
        (b'{"schema": "cbtop.crossovers/1", "machines": [' + b"{}," * 40 + b"{}]}", "a list of at most"),
        (b"[" * 100_000, "holds no crossovers"),
        (b" " * (kept_file.MAX_FILE_BYTES + 1), "larger than"),
        (b"\xff\xfe\x00", "holds no crossovers"),
    ],
    ids=["empty", "list", "version", "roofs", "nothing", "number", "many", "deep", "large", "bytes"],
)
def test_a_file_without_crossovers_is_refused_with_the_reason_and_replaced(
    text: bytes, reason: str, file: Path
) -> None:
    file.write_bytes(text)
    with pytest.raises(RoofsError, match=reason):
        crossovers_of("Some Processor", 4)
    keep_crossovers(HERE)
    assert known_crossovers() == (HERE,)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("value", value) for value in (0, -1, 1.5, True, None, "12", 1 << 41, 10**400, [])),
        *(("before_us", value) for value in (-1.0, 1e300, "1", [], True)),
        *(("provenance", value) for value in ("derived", "n/a", "", 1, None)),
        *(("name", value) for value in (None, 3, [])),
    ],
)
def test_a_figure_that_cannot_be_meant_is_refused(place: str, value: object, file: Path) -> None:
    keep_crossovers(HERE)
    document = json.loads(file.read_text())
    document["machines"][0]["crossovers"][0][place] = value
    file.write_text(json.dumps(document))
    with pytest.raises(RoofsError, match="holds no crossovers"):
        known_crossovers()


@pytest.mark.parametrize(
    ("place", "value"),
    [("threads", 0), ("threads", True), ("device", None), ("crossovers", {}), ("crossovers", [1]),
     ("crossovers", [{}] * (MAX_CROSSOVERS + 1))],
)  # fmt: skip
def test_a_machine_that_cannot_be_meant_is_refused(place: str, value: object, file: Path) -> None:
    keep_crossovers(HERE)
    document = json.loads(file.read_text())
    document["machines"][0][place] = value
    file.write_text(json.dumps(document))
    with pytest.raises(RoofsError, match="holds no crossovers"):
        known_crossovers()


def test_names_are_made_safe_to_show(file: Path) -> None:
    keep_crossovers(HERE)
    file.write_text(file.read_text().replace("Some Processor", "Some\\u001b[31m").replace("no AMX", "no\\u202eAMX"))
    (found,) = known_crossovers()
    assert (found.device, found.crossovers[1].note) == ("Some\ufffd001B[31m", "no\ufffd202EAMX")


@_in_one_home
@given(data=st.data())
def test_with_anything_in_the_place_of_a_field_it_is_crossovers_or_refused(data: st.DataObject, file: Path) -> None:
    file.unlink(missing_ok=True)
    keep_crossovers(HERE)
    document: Any = json.loads(file.read_text())
    (machine,) = document["machines"]
    places: list[tuple[Any, Any]] = [(document, key) for key in document] + [(machine, key) for key in machine]
    places += [(one, key) for one in machine["crossovers"] for key in one]
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(ANY_JSON)
    file.write_text(json.dumps(document))
    try:
        known = known_crossovers()
    except RoofsError:
        return
    assert all(1 <= one.value <= crossovers.MAX_VALUE for machine in known for one in machine.crossovers)
