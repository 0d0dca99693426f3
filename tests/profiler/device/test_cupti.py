"""Tests of reading records of CUPTI: the fields, the records that are rejected, and the names of kernels."""

from __future__ import annotations

import ctypes
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from cbtop.profiler.device import cupti
from cbtop.profiler.device.cupti import (
    KERNEL,
    CuptiError,
    ExternalCorrelation,
    KernelRecord,
    Records,
    TorchsCupti,
    decoded,
    demangled,
    is_known,
    library_path,
    read_in_python,
)
from cbtop.protocol.requests import State
from tests.profiler.device.fake_cupti import external_record, kernel_record

# A record that CUPTI of CUDA 13.0 wrote on an H100: softmax_warp_forward with 16 blocks of (32, 4, 1).
H100 = bytes.fromhex(
    "0a000000000030000100000001000000fd6c62f75d64ea189e7c62f75d64ea189e7c62f75d64ea1800000000010000000700000010000000"
    "010000000100000020000000040000000100000000000000000000000000000000004809160000000800000000000000c080ee3400000000"
    "0000000000000000000000000000000000000000000000000000000000008000000000000000000000000000000000000000000000000000"
    "000000000000010000000000000000000000000000000100000000004809000000000000000000000000"
)


def test_a_record_of_a_real_kernel_is_read() -> None:
    found = decoded(H100[:160])
    assert isinstance(found, KernelRecord)
    assert (found.grid, found.block, found.registers) == ((16, 1, 1), (32, 4, 1), 48)
    assert (found.static_bytes, found.dynamic_bytes, found.call, found.graph) == (0, 0, 22, 0)
    assert (found.end_ns - found.start_ns, found.local_bytes) == (4001, 0)


def test_a_record_of_a_kernel_in_a_graph_is_read() -> None:
    found = decoded(
        kernel_record(graph=4, graph_node=17, static_bytes=8, dynamic_bytes=164308, registers=168, local_bytes=72)
    )
    assert isinstance(found, KernelRecord)
    assert (found.graph, found.graph_node) == (4, 17)
    assert (found.static_bytes, found.dynamic_bytes, found.registers, found.local_bytes) == (8, 164308, 168, 72)


def test_an_external_id_is_a_link_where_it_is_ours() -> None:
    assert decoded(external_record(5, 9)) == ExternalCorrelation(5, 9)
    assert decoded(external_record(5, 9, whose=1)) is None


def test_other_kinds_are_passed_over() -> None:
    assert decoded(struct.pack("<I", 5) + bytes(36)) is None


@pytest.mark.parametrize("size", [0, 3, 4, 23, 100, 159])
def test_a_record_that_is_cut_short_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        decoded(kernel_record()[:size])


@pytest.mark.parametrize(
    "record",
    [
        kernel_record(grid=(0, 1, 1)),
        kernel_record(block=(-1, 1, 1)),
        kernel_record(static_bytes=-1),
        kernel_record(duration_ns=-5),
        kernel_record(start_ns=0),
        kernel_record(start_ns=(1 << 64) - 2000),
    ],
)
def test_a_kernel_that_cannot_be_is_refused(record: bytes) -> None:
    with pytest.raises(ValueError, match="a kernel of"):
        decoded(record)


def test_no_bytes_do_more_than_be_refused() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        raw = chance.randbytes(chance.randrange(217))
        if chance.random() < 0.7 and len(raw) > 4:
            raw = struct.pack("<I", chance.choice([KERNEL, 39])) + raw[4:]
        try:
            found = decoded(raw)
        except ValueError:
            continue
        assert found is None or isinstance(found, ExternalCorrelation) or found.end_ns >= found.start_ns


Next = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p))
MOST = 25


def records_of(chance: random.Random) -> list[bytes]:
    """Return records in CUPTI's layout. Some of the records contain random bytes."""
    records = [external_record(chance.randrange(1 << 64), chance.randrange(1 << 32), chance.choice([3, 3, 1]))]
    for _ in range(chance.randrange(40)):
        record = bytearray(kernel_record(call=chance.randrange(1 << 32), graph=chance.randrange(9), graph_node=7))
        if chance.random() < 0.4:
            at = chance.randrange(len(record))
            record[at:] = chance.randbytes(len(record) - at)
        records.append(chance.choice([bytes(record), external_record(chance.randrange(99), 5), bytes(48)]))
    return records


def read_both_ways(records: list[bytes]) -> tuple[Records, Records]:
    """Read the records, which are in two buffers, in Python and in C. Return both results."""
    half = len(records) // 2
    rooms, raws = [], []
    ends: dict[int, int] = {}  # end time of each record by its begin time
    for part in (records[:half], records[half:]):
        room = ctypes.create_string_buffer(b"".join(part), sum(map(len, part)) or 1)
        at = end = ctypes.addressof(room)
        end += sum(map(len, part))
        for record in part:
            ends[at] = at + len(record)
            raws.append(ctypes.string_at(at, min(160, end - at)))
            at += len(record)
        rooms.append((room, end - ctypes.addressof(room)))

    def following(buffer: int, size_bytes: int, record: Any) -> int:
        at = ends[record[0]] if record[0] else buffer
        record[0] = at
        return 0 if at in ends and buffer <= at < buffer + size_bytes else 11

    function = Next(following)
    buffers = [(ctypes.addressof(room), size_bytes) for room, size_bytes in rooms]
    assert cupti.read_in_c is not None
    kernels, externals, lost = cupti.read_in_c(ctypes.cast(function, ctypes.c_void_p).value or 0, buffers, MOST)
    in_c = Records([KernelRecord._make(kernel) for kernel in kernels], externals, lost)
    return read_in_python(raws, MOST), in_c


@pytest.mark.skipif(cupti.read_in_c is None, reason="without a compiler the records are read in Python")
def test_c_reads_the_same_of_any_records_as_python() -> None:
    chance = random.Random(7)
    kernels = lost = 0
    for _ in range(500):
        in_python, in_c = read_both_ways(records_of(chance))
        assert in_c == in_python
        kernels, lost = kernels + len(in_c.kernels), lost + in_c.lost
    assert kernels > 1000
    assert lost > 1000


@pytest.mark.parametrize(("version", "known"), [(17, False), (18, True), (26, True), (100, False), (130001, True)])
def test_versions_whose_layout_was_looked_up_are_known(version: int, known: bool) -> None:
    assert is_known(version) == known
    assert not is_known(140000)


def test_cupti_that_is_not_loaded_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 00000000 00:00 0\n7f1-7f2 r-xp 0 00:00 0   /lib/libc.so.6\n")
    monkeypatch.setattr(cupti, "MAPS", str(maps))
    monkeypatch.setattr(cupti, "_found_path", [])
    assert not library_path()
    with pytest.raises(CuptiError) as refused:
        TorchsCupti()
    assert refused.value.state is State.NO_CUPTI
    maps.write_text("7f1-7f2 r-xp 00000000 00:00 12                  /opt/a b/libcupti.so.13\n")
    assert library_path() == "/opt/a b/libcupti.so.13"
    with pytest.raises(CuptiError) as refused:  # This file exists but is not a library.
        TorchsCupti()
    assert refused.value.state is State.NO_CUPTI


def test_an_injected_tool_is_left_its_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/nsight/libToolsInjection64.so")
    with pytest.raises(CuptiError) as refused:
        TorchsCupti()
    assert refused.value.state is State.TAKEN


def test_names_of_kernels_are_written_as_in_their_source() -> None:
    name = (
        b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_21CUDAFunctorOnSelf_addIfEESt5arrayIPcLm2EEEEviT0_T1_"
    )
    assert demangled(name).startswith("void at::native::vectorized_elementwise_kernel<4, ")
    assert demangled(b"nvjet_sm90_tst_64x8") == "nvjet_sm90_tst_64x8"
    assert demangled(b"_Zwhatever") == "_Zwhatever"
    assert demangled(b"\xff\xfe") == "\ufffd\ufffd"
