"""Tests of reading a cubin (machine code of NVIDIA). The kernels in it are as ptxas reported them.

A damaged file is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.machine_code.cubin import CubinError, KernelCode, is_cubin, kernels_of

DATA = Path(__file__).parent / "data"
CUBIN = (DATA / "kernels.cubin").read_bytes()
END_OF_SECTIONS = int.from_bytes(CUBIN[40:48], "little") + 64 * int.from_bytes(CUBIN[60:62], "little")
REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<frame>\d+) bytes stack frame.*?"
    r"Used (?P<registers>\d+) registers, used (?P<barriers>\d+) barriers(?:, (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


def kernel(name: str, file: str = "kernels.cubin") -> KernelCode:
    return next(one for one in kernels_of((DATA / file).read_bytes()) if one.name == name)


def test_registers_frame_barriers_and_shared_memory_are_those_ptxas_reports() -> None:
    reported = {
        match["name"]: tuple(int(match[part] or 0) for part in ("registers", "frame", "barriers", "shared"))
        for match in REPORT.finditer((DATA / "kernels.log").read_text())
    }
    read = {
        one.name: (one.registers, one.frame_bytes, one.barriers or 0, one.shared_bytes) for one in kernels_of(CUBIN)
    }
    assert read == reported
    assert len(read) == 5


def test_shared_memory_of_the_driver_does_not_count_as_the_kernels() -> None:
    assert kernel("shared_rows", "kernels_sm_90.cubin").shared_bytes == 20_000
    assert kernel("wide", "kernels_sm_90.cubin").shared_bytes == 0


def test_declared_threads_of_a_block_are_read() -> None:
    assert [(one.name, one.max_threads) for one in kernels_of(CUBIN) if one.max_threads] == [
        ("shared_rows", 64),
        ("indexed", 128),
        ("spilled", 256),
    ]


def test_bytes_that_are_no_cubin_are_an_error() -> None:
    assert is_cubin(CUBIN)
    for content in (b"", b"\x7fELF", b".version 8.0", CUBIN[:18] + b"\x3e\0" + CUBIN[20:]):
        assert not is_cubin(content)
        with pytest.raises(CubinError):
            kernels_of(content)


@given(st.integers(0, END_OF_SECTIONS - 1))
def test_a_cubin_that_was_cut_off_is_an_error(length: int) -> None:
    with pytest.raises(CubinError):
        kernels_of(CUBIN[:length])


def test_a_cubin_with_changed_bytes_gives_kernels_or_an_error() -> None:
    random = Random(45)
    errors = 0
    for _ in range(500):
        damaged = bytearray(CUBIN)
        for _ in range(random.randint(1, 20)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            kernels_of(bytes(damaged))
        except CubinError:
            errors += 1
    assert errors > 50


def test_a_name_without_an_end_is_an_error() -> None:
    (offset,) = {match.start() for match in re.finditer(b"\0shared_rows\0", CUBIN)}
    damaged = CUBIN[: offset + 1] + b"x" * (len(CUBIN) - offset - 1)
    with pytest.raises(CubinError):
        kernels_of(damaged)
