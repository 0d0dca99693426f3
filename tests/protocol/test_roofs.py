"""Tests of the file of measured roofs (peak rates): the file is written completely, and rejected if it is damaged.

A roof is used only for the device on which it was measured.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.protocol import kept_file, roofs
from cbtop.protocol.errors import RoofsError
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, keep_roofs, known_roofs, roofs_of_cpu, roofs_of_gpu
from cbtop.protocol.vocabulary import Provenance
from tests.protocol.any_json import ANY_JSON

READ = Ceiling("memory_read", "bandwidth", 3000.0, "GB/s", Provenance.MEASURED, 2990.0, 2950.5, "2026-11-22")
PRODUCT = Ceiling("matmul_bfloat16", "compute", 7e5, "GFLOP/s", Provenance.MEASURED, 6.9e5, 6.5e5, "2026-11-22")
GPU = DeviceRoofs("NVIDIA H100", (READ, PRODUCT), None, "18a9-c4", 132, "580.159.04", 700)
CPU = DeviceRoofs("Some Processor", (READ,), threads=4)

# The content of NVIDIA's version file in Linux. Its last line is about the compiler.
GCC = "\nGCC version:  gcc version 13.2.0 (GCC)\n"
MODULES = {
    "580.159.04": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs){GCC}",
    "535.54.03": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023{GCC}",
    "": "nothing that says one\n",
}

_in_one_home = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cbtop").mkdir()
    return tmp_path / "cbtop" / "roofs.json"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that this machine has the processor of CPU and the driver of GPU."""
    processor, driver = tmp_path / "cpuinfo", tmp_path / "driver"
    processor.write_text("processor\t: 0\nmodel name\t: Some Processor\n" * 100)
    driver.write_text(MODULES["580.159.04"])
    monkeypatch.setattr(roofs, "_CPUINFO", processor)
    monkeypatch.setattr(roofs, "_DRIVER", driver)
    return driver


def test_what_is_kept_is_read_again_and_is_its_owners_alone(file: Path) -> None:
    assert known_roofs() == ()
    keep_roofs([CPU, GPU])
    assert known_roofs() == (CPU, GPU)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


SHORT = replace(READ, value=2000.0, median=1990.0, lowest=1980.0, is_short=True)
DOUBLE = replace(SHORT, name="matmul_float64", kind="compute", unit="GFLOP/s", dtype="float64")
SINGLE = replace(DOUBLE, name="matmul_float32", dtype="float32")
FMA = replace(SINGLE, name="fma_float32", is_short=False)
BUSY = replace(READ, value=2800.0, median=2790.0, lowest=2000.0, load_percent=40.0)
SPREAD = replace(READ, value=2900.0, median=2500.0, lowest=2000.0)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ((READ,), (replace(READ, value=2991.0),), (replace(READ, value=2991.0),)),
        ((READ,), (BUSY,), (READ,)),
        ((READ,), (SPREAD,), (READ,)),
        ((BUSY,), (READ,), (READ,)),
        ((BUSY,), (SPREAD,), (SPREAD,)),
        ((SPREAD,), (BUSY,), (SPREAD,)),
        ((READ,), (SHORT,), (READ,)),
        ((BUSY,), (SHORT,), (BUSY,)),
        ((SHORT,), (READ,), (READ,)),
        ((SHORT,), (BUSY,), (SHORT,)),
        ((READ, PRODUCT), (BUSY,), (READ,)),
        ((READ, PRODUCT), (SHORT,), (READ, PRODUCT)),
        ((SHORT,), (PRODUCT,), (PRODUCT,)),
        ((SHORT, SINGLE, DOUBLE), (READ, FMA), (READ, FMA, DOUBLE)),
    ],
    ids=str,
)
def test_no_roof_is_replaced_by_one_under_load_or_a_short_one_that_is_worse(
    old: tuple[Ceiling, ...], new: tuple[Ceiling, ...], kept: tuple[Ceiling, ...]
) -> None:
    keep_roofs([replace(CPU, ceilings=old)])
    assert keep_roofs([replace(CPU, ceilings=new)]) == known_roofs() == (replace(CPU, ceilings=kept),)


def test_measured_again_a_device_is_replaced_and_the_others_stay() -> None:
    keep_roofs([CPU, GPU])
    slower = replace(CPU, ceilings=(PRODUCT,))
    limited = replace(GPU, power_limit_w=350)
    keep_roofs([slower, limited])
    assert known_roofs() == (GPU, slower, limited)


def test_of_many_devices_the_newest_are_kept() -> None:
    keep_roofs(replace(CPU, threads=number) for number in range(1, 100))
    assert [one.threads for one in known_roofs()] == list(range(100 - roofs.MAX_DEVICES, 100))


def test_the_largest_file_that_is_written_can_be_read() -> None:
    long = "é" * 256
    ceilings = tuple(replace(READ, name=f"{number}{long}"[:256]) for number in range(roofs.MAX_CEILINGS))
    keep_roofs(replace(GPU, uuid=f"{number}", ceilings=ceilings) for number in range(roofs.MAX_DEVICES))
    assert len(known_roofs()) == roofs.MAX_DEVICES


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_what_was_there(
    failing: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_roofs([CPU])

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(RoofsError, match="No space left"):
            keep_roofs([GPU])
    assert known_roofs() == (CPU,)
    assert os.listdir(file.parent) == [file.name]


def test_whoever_reads_while_it_is_written_finds_it_whole() -> None:
    keep_roofs([CPU])
    read: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set() or not read:
            read.append(len(known_roofs()))

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(50):
        keep_roofs([replace(GPU, uuid=str(number))])
    done.set()
    reader.join()
    # The values that were read only grow, so no read has found a damaged or missing file.
    assert read == sorted(read)
    assert min(read) >= 1


@pytest.mark.parametrize("damage", ["{", "a rate of 401 digits"])
def test_a_damaged_file_is_replaced(damage: str, file: Path) -> None:
    keep_roofs([CPU])
    file.write_text("{" if damage == "{" else file.read_text().replace("3000.0", "9" * 401))
    with pytest.raises(RoofsError, match=f"{file} holds no roofs"):
        known_roofs()
    keep_roofs([CPU])
    assert known_roofs() == (CPU,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "its schema"),
        (b'{"schema": "cbtop.roofs/2", "devices": []}', "its schema"),
        (b'{"schema": "cbtop.roofs/1"}', "a list of at most"),
        (b'{"schema": "cbtop.roofs/1", "devices": [1]}', "one of its devices is no map"),
        (b'{"schema": "cbtop.roofs/1", "devices": [' + b"{}," * 40 + b"{}]}", "a list of at most"),
        (b"[" * 100_000, "holds no roofs"),
        (b" " * (kept_file.MAX_FILE_BYTES + 1), "larger than"),
        (b'{"schema": ' + b"9" * 10_000 + b"}", "holds no roofs"),
        (b"\xff\xfe\x00", "holds no roofs"),
    ],
)
def test_what_is_no_file_of_roofs_is_refused_with_the_reason(text: bytes, reason: str, file: Path) -> None:
    file.write_bytes(text)
    with pytest.raises(RoofsError, match=reason):
        known_roofs()


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e400", "0", "-1", "1e30", "9" * 401, '"3"', "true", "null", "[]"]
)
def test_a_rate_that_cannot_be_meant_is_refused(value: str, file: Path) -> None:
    keep_roofs([CPU])
    file.write_text(file.read_text().replace("3000.0", value))
    with pytest.raises(RoofsError):
        known_roofs()


def test_a_pipe_in_its_place_is_not_waited_for(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(RoofsError, match="it is no file"):
        known_roofs()


def test_names_are_made_safe_to_show(file: Path) -> None:
    keep_roofs([CPU])
    file.write_text(file.read_text().replace("Some Processor", "Some\\u001b[31m\\u202e"))
    assert known_roofs()[0].device == "Some\ufffd001B[31m\ufffd202E"


@_in_one_home
@given(text=st.binary(max_size=200))
def test_any_bytes_are_roofs_or_refused(text: bytes, file: Path) -> None:
    file.write_bytes(text)
    with pytest.raises(RoofsError):
        known_roofs()


@_in_one_home
@given(data=st.data())
def test_with_anything_in_the_place_of_a_field_it_is_roofs_or_refused(data: st.DataObject, file: Path) -> None:
    file.unlink(missing_ok=True)
    keep_roofs([CPU, GPU])
    document: Any = json.loads(file.read_text())
    places: list[tuple[Any, Any]] = [(document, key) for key in document]
    for device in document["devices"]:
        places += [(device, key) for key in device]
        places += [(one, key) for one in device["ceilings"] for key in one]
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(ANY_JSON)
    file.write_text(json.dumps(document))
    try:
        known = known_roofs()
    except RoofsError:
        return
    assert all(0 < one.value < 1e24 for device in known for one in device.ceilings)


@pytest.mark.usefixtures("machine")
def test_roofs_are_used_only_for_the_device_they_were_measured_on() -> None:
    known = (CPU, GPU)
    assert roofs_of_cpu(known, 4) == CPU
    assert roofs_of_cpu(known, 2) is None
    assert roofs_of_cpu((replace(CPU, device="Another Processor"),), 4) is None
    assert roofs_of_gpu(known, "18a9-c4", 132) == GPU
    assert roofs_of_gpu(known, "18a9-c5", 132) is None
    # A MIG part of the same GPU has only 16 multiprocessors, so the roofs (peak rates) of the GPU do not apply.
    assert roofs_of_gpu(known, "18a9-c4", 16) is None
    assert roofs_of_gpu((replace(GPU, uuid=""),), "", 132) is None
    limited = replace(GPU, power_limit_w=350)
    assert roofs_of_gpu((GPU, limited), "18a9-c4", 132) == limited


def test_with_another_driver_the_roofs_of_a_gpu_are_not_used(machine: Path) -> None:
    machine.write_text(MODULES["535.54.03"])
    assert roofs_of_gpu([GPU], "18a9-c4", 132) is None
    machine.unlink()
    assert roofs_of_gpu([GPU], "18a9-c4", 132) is None


@pytest.mark.parametrize("version", MODULES)
def test_the_drivers_version_is_read_from_what_its_module_says(version: str, machine: Path) -> None:
    machine.write_text(MODULES[version])
    assert roofs.driver_version() == version


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("processor\t: 0\nmodel name\t: A: B 3.0GHz\n", "A: B 3.0GHz"),
        (
            "CPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n",
            "m1 implementer 0x41 part 0xd0c variant 0x3",
        ),
        ("", "m1"),
        (None, "m1"),
    ],
)
def test_a_processor_is_called_as_linux_calls_it(
    said: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofs, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "m1")
    if said is not None:
        (tmp_path / "cpuinfo").write_text(said)
    assert roofs.cpu_name() == name
