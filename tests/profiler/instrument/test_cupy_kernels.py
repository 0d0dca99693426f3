"""Tests of finding CuPy's kernels in its cache, in files as `DiskKernelCacheBackend` of CuPy 14.2 writes them."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device.kernel_burst import LaunchedKernel
from cbtop.profiler.instrument import cupy_kernels
from cbtop.profiler.instrument.kernel_makers import Maker, makers_of

ELEMENTWISE = """#include <cupy/carray.cuh>
typedef double in0_type;

extern "C" __global__ void cupy_add__float64_float64_float64(const CArray<double, 1, 1, 1> _raw_in0) {
  CUPY_FOR(i, _ind.size()) {}
}
"""
RAW = '\nextern "C" __global__\nvoid __launch_bounds__(256) scale_rows(float* x) {}\n'
TEMPLATE = "template<typename T> __global__ void\nshift(T* x) {}\n"


class CupyCache:
    """A stand-in for CuPy's cache. The stand-in stores kernels on disk and compiles nothing."""

    def __init__(self, folder: Path, *, saves_source: bool) -> None:
        self._folder, self._saves_source = folder, saves_source

    def save(self, source: str, *symbols: str) -> Path:
        names = b"".join(b".text.%s\0.nv.constant0.%s\0" % (one.encode(), one.encode()) for one in symbols)
        cubin = b"\x7fELF\2\1\1\0\0.shstrtab\0.strtab\0" + names
        path = self._folder / f"{hashlib.sha1(source.encode()).hexdigest()}.cubin"
        path.write_bytes(hashlib.sha1(cubin).hexdigest().encode() + cubin)
        if self._saves_source:
            Path(f"{path}.cu").write_text(source)
        return path


def kernel(name: str) -> LaunchedKernel:
    return LaunchedKernel(name, (8, 1, 1), (128, 1, 1), 32, 0, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14.2.0"))
    return tmp_path


def test_each_kind_of_kernel_is_found_with_the_line_of_its_source(folder: Path) -> None:
    cache = CupyCache(folder, saves_source=True)
    add, raw, shift = map(kernel, ("cupy_add__float64_float64_float64", "scale_rows", "shift<float>"))
    reduced, other = kernel("reduce_kernel"), kernel("gemm")
    files = [
        cache.save(ELEMENTWISE, add.name),
        cache.save(RAW, raw.name),
        cache.save(TEMPLATE, "_Z5shiftIfEvPT_"),
        cache.save('extern "C" __global__ void reduce_kernel() {}', reduced.name),
    ]
    assert makers_of([add, raw, shift, reduced, other]) == {
        one: Maker("CuPy 14.2.0", f"{file}.cu:{line}")
        for one, file, line in zip((add, raw, shift, reduced), files, (4, 3, 2, 1), strict=True)
    }


def test_without_kept_sources_the_maker_is_known(folder: Path) -> None:
    CupyCache(folder, saves_source=False).save(RAW, "scale_rows")
    assert makers_of([one := kernel("scale_rows")]) == {one: Maker("CuPy 14.2.0", "")}


def test_several_sources_with_one_name_are_all_named(folder: Path) -> None:
    cache = CupyCache(folder, saves_source=True)
    files = {cache.save(f"// {number}\n{RAW}", "scale_rows") for number in range(2)}
    found = makers_of([one := kernel("scale_rows")])[one].source
    assert found.startswith("one of ")
    assert set(found.removeprefix("one of ").split("; ")) == {f"{file}.cu:4" for file in files}


@pytest.mark.parametrize("name", ["reduce_kernel<512, 1>", "educe_kernel", "reduce_kernel_2", "reduce.kernel", ""])
def test_similar_names_of_others_are_not_those_of_cupy(name: str, folder: Path) -> None:
    CupyCache(folder, saves_source=True).save('extern "C" __global__ void reduce_kernel() {}', "reduce_kernel")
    assert makers_of([kernel(name)]) == {}


def test_without_cupy_or_its_cache_nothing_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CupyCache(folder, saves_source=True).save(RAW, "scale_rows")
    (folder / "damaged.cubin").mkdir()
    assert len(makers_of([kernel("scale_rows")])) == 1
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder / "missing"))
    assert makers_of([kernel("scale_rows")]) == {}
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
    monkeypatch.delitem(sys.modules, "cupy")
    assert makers_of([kernel("scale_rows")]) == {}


def test_the_files_that_are_read_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CupyCache(folder, saves_source=False).save(RAW, "scale_rows")
    monkeypatch.setattr(cupy_kernels, "MAX_FILES", 0)
    assert makers_of([kernel("scale_rows")]) == {}
