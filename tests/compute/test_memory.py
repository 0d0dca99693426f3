"""Tests of the available memory, which is read from files of Linux, and of memory on huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from llvmlite import binding

from cbtop.compute.decoder import machine
from cbtop.compute.jit.function_cache import LLVM
from cbtop.compute.memory import LINE_BYTES, available_bytes, give_back_code, on_huge_pages, zeros_on_huge_pages

MEMINFO = "MemTotal:       16384 kB\nMemFree:         100 kB\nMemAvailable:    8000 kB\n"
GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_of_one(path: str, limit: int, used: int, files: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {files}\ntotal_active_file 0\n",
    }


def group_of_two(path: str, limit: int | str, used: int, files: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {files}\nactive_file 20\nslab 7\n",
    }


SYSTEM = {"proc/meminfo": MEMINFO}
IN_ONE = {"proc/self/cgroup": "4:cpu,memory:/a/b\n3:cpuset:/\n0::/a\n"}
IN_TWO = {"proc/self/cgroup": "0::/a/b\n"}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        (SYSTEM, 8000 << 10),
        (SYSTEM | IN_TWO, 8000 << 10),
        (IN_TWO | group_of_two("/a/b", 1000, 600, 100), 520),
        (IN_TWO | group_of_two("/a/b", "max", 600), None),
        (SYSTEM | IN_TWO | group_of_two("/a/b", 64 * GIB, GIB), 8000 << 10),
        # The parent control group has less free memory than the group itself.
        (IN_TWO | group_of_two("/a/b", 9000, 600) | group_of_two("/a", 2000, 1700), 320),
        # In a container, the process sees its own control group as the root.
        (IN_TWO | group_of_two("", 3000, 1000), 2020),
        (IN_TWO | group_of_two("/a/b", 1000, 2000), 0),
        (IN_ONE | group_of_one("/a/b", 1000, 600, 30), 430),
        (IN_ONE | group_of_one("/a", 9000, 600), 8400),
        (SYSTEM | IN_ONE | group_of_one("", (1 << 63) - 4096, 600), 8000 << 10),  # no limit is set
    ],
)
def test_the_least_that_the_system_or_a_group_leaves_is_what_there_is(
    tmp_path: Path, files: dict[str, str], wanted: int | None
) -> None:
    assert available_bytes(write(tmp_path, files)) == wanted


class WithoutHugePages(mmap.mmap):
    def madvise(self, *arguments: int) -> None:
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("kind", [mmap.mmap, WithoutHugePages])
def test_memory_is_zero_and_private_also_if_there_are_no_huge_pages(kind: type[mmap.mmap]) -> None:
    with mock.patch.object(mmap, "mmap", kind):
        memory = np.frombuffer(on_huge_pages(5 << 20), np.uint8)
    assert (len(memory), int(memory.sum())) == (5 << 20, 0)
    begin = memory.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= begin < last:
            # The memory is private to the process. Shared memory rarely gets huge pages.
            assert line.split()[1] == "rw-p"
            return
    raise AssertionError("it lies nowhere")


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_arrays_on_huge_pages_share_one_block_each_on_its_own_cache_lines(dtype: type) -> None:
    shapes = [(3, 5), (2, 7, 9), (1,), (64, 32), ()]
    arrays = zeros_on_huge_pages(shapes, dtype)
    assert [(one.shape, one.dtype, int(one.sum())) for one in arrays] == [(shape, dtype, 0) for shape in shapes]
    begins = [one.ctypes.data for one in arrays]
    assert [begin % LINE_BYTES for begin in begins] == [0] * len(arrays)
    after = [-(-(one.ctypes.data + one.nbytes) // LINE_BYTES) * LINE_BYTES for one in arrays]
    assert begins[1:] == after[:-1]
    for number, one in enumerate(arrays, 1):
        one[...] = number
    assert [float(one.mean()) for one in arrays] == [1, 2, 3, 4, 5]


def test_memory_that_the_system_does_not_give_is_said_to_be_missing() -> None:
    with (
        mock.patch.object(mmap, "mmap", side_effect=OSError(12, "Cannot allocate memory")),
        pytest.raises(MemoryError, match="4,096 bytes"),
    ):
        zeros_on_huge_pages([(1024,)], np.float32)


def resident_code_kib(library: str) -> int:
    found = re.findall(rf"r-xp .*/{library}\n(?:\w+:.*\n)*?Rss: +(\d+)", Path("/proc/self/smaps").read_text())
    return sum(map(int, found))


def test_code_that_is_given_back_is_mapped_no_more_and_runs_again() -> None:
    text = "define i32 @f() {\n  ret i32 7\n}"
    assert "ret i32 7" in str(binding.parse_assembly(text))
    assert resident_code_kib(LLVM) > 0
    give_back_code(LLVM)
    assert resident_code_kib(LLVM) == 0
    assert "ret i32 7" in str(binding.parse_assembly(text))
    assert resident_code_kib(LLVM) > 0


def test_of_a_library_that_is_not_there_nothing_is_given_back() -> None:
    give_back_code("libnobody.so")


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_activations_are_zeros_that_begin_where_float_products_read_fastest(
    looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "LOOKS_AHEAD", looks_ahead)
    for given, shape in ((5, (5,)), ((1, 7), (1, 7)), ((3, 768), (3, 768)), ((128, 3840), (128, 3840))):
        found = machine.activations(given, np.float32)
        assert (found.shape, found.dtype, found.any(), found.flags.c_contiguous) == (shape, np.float32, False, True)
        assert not looks_ahead or found.ctypes.data % 64 == 16
