"""Tests of kernels that a process itself compiles with NVRTC.

cbtop finds these kernels by name, with their options and their line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device.kernel_burst import LaunchedKernel  # noqa: E402
from cbtop.profiler.instrument import kernel_makers, nvrtc_kernels  # noqa: E402
from cbtop.profiler.instrument.kernel_makers import Maker, makers_of  # noqa: E402

SOURCE = b"""#define N 4
__device__ float twice(float x) { return 2 * x; }
extern "C" __global__ void scale_rows(float* x) { x[0] = twice(x[0]); }
template <typename T>
__global__ void __launch_bounds__(128, 2)
shift(T* x) {}
"""
OPTIONS = [b"--gpu-architecture=sm_90", b"-I/usr/include", b"--use_fast_math"]


class Bindings:
    """Fake bindings of NVRTC. They compile nothing, and answer as `cuda.bindings.nvrtc` does."""

    def __init__(self) -> None:
        self.status: Any = 0
        self._programs = iter(range(100, 10_000))
        self.nvrtcVersion = lambda: (0, 13, 5)
        self.nvrtcCreateProgram: Any = self._create
        self.nvrtcCompileProgram: Any = self._compile

    def _create(self, src: bytes, name: bytes, count: int, headers: Any, names: Any) -> tuple[int, int]:
        return self.status, next(self._programs)

    def _compile(self, prog: int, count: int, options: Any) -> tuple[int]:
        return (self.status,)


def compiled(nvrtc: Any, source: bytes = SOURCE, name: bytes = b"rows.cu", options: Any = OPTIONS) -> None:
    _, program = nvrtc.nvrtcCreateProgram(source, name, 0, [], [])
    nvrtc.nvrtcCompileProgram(program, len(options), options)


def kernel(name: str) -> LaunchedKernel:
    return LaunchedKernel(name, (8, 1, 1), (128, 1, 1), 32, 0, 0)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    found = Bindings()
    monkeypatch.setitem(sys.modules, nvrtc_kernels.BINDINGS, found)
    kernel_makers.follow()
    yield found
    kernel_makers.follow_no_more()
    assert found.nvrtcCompileProgram == found._compile


MAKER = "NVRTC 13.5, --gpu-architecture=sm_90 --use_fast_math"


def test_a_kernel_of_nvrtc_has_its_options_and_the_line_of_its_source(nvrtc: Bindings) -> None:
    compiled(nvrtc)
    plain, template, device, other = map(kernel, ("scale_rows", "shift<float>", "twice", "gemm"))
    assert makers_of([plain, template, device, other]) == {
        plain: Maker(MAKER, "rows.cu:3"),
        template: Maker(MAKER, "rows.cu:6"),
    }


def test_a_source_without_a_name_has_the_place_of_the_call(nvrtc: Bindings) -> None:
    line = sys._getframe().f_lineno + 1
    _, program = nvrtc.nvrtcCreateProgram(src=SOURCE, name=b"", count=0, headers=[], names=[])
    nvrtc.nvrtcCompileProgram(prog=program, count=0, options=[])
    one = kernel("scale_rows")
    source = f"line 3 of a source compiled at test_nvrtc_kernels.py:{line}"
    assert makers_of([one])[one] == Maker("NVRTC 13.5", source)


def test_two_programs_with_one_name_are_both_named(nvrtc: Bindings) -> None:
    compiled(nvrtc, options=[b"-G"])
    compiled(nvrtc, name=b"other.cu")
    one = kernel("scale_rows")
    assert makers_of([one])[one] == Maker("NVRTC 13.5", "one of rows.cu:3; other.cu:3")


def test_a_program_that_does_not_compile_makes_no_kernel(nvrtc: Bindings) -> None:
    nvrtc.status = 6
    compiled(nvrtc)
    assert makers_of([kernel("scale_rows")]) == {}


def test_arguments_that_are_not_understood_do_not_disturb_the_host(nvrtc: Bindings) -> None:
    nvrtc.status = None
    assert nvrtc.nvrtcCreateProgram(1, 2, 3, 4, 5) == (None, 100)
    assert nvrtc.nvrtcCompileProgram(None, 0, 7) == (None,)
    assert makers_of([kernel("scale_rows")]) == {}


def test_what_is_remembered_is_bounded(nvrtc: Bindings) -> None:
    for number in range(nvrtc_kernels.MAX_NAMES + 10):
        compiled(nvrtc, b"__global__ void k%d(int* x) {}" % number)
    nvrtc.nvrtcCreateProgram(SOURCE, b"", 0, [], [])
    assert len(nvrtc_kernels._kernels) == nvrtc_kernels.MAX_NAMES
    for number in range(nvrtc_kernels.MAX_VARIANTS + 10):
        compiled(nvrtc, name=b"%d.cu" % number, options=[b"--" + b"x" * 500])
    variants = nvrtc_kernels.of_nvrtc(["scale_rows"])["scale_rows"]
    assert len(variants) == nvrtc_kernels.MAX_VARIANTS
    assert {len(one.options) for one in variants} == {nvrtc_kernels.MAX_OPTIONS_CHARS}
    for _ in range(nvrtc_kernels.MAX_PROGRAMS + 10):
        nvrtc.nvrtcCreateProgram(SOURCE, b"", 0, [], [])
    assert len(nvrtc_kernels._created) == nvrtc_kernels.MAX_PROGRAMS


def test_a_kernel_that_torch_compiles_is_of_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, nvrtc_kernels.BINDINGS, raising=False)
    calls = []

    def _nvrtc_compile(kernel_source: str, kernel_name: str, *more: Any, **named: Any) -> tuple[bytes, str]:
        calls.append((kernel_name, more, named))
        return b"", kernel_name

    module = SimpleNamespace(_nvrtc_compile=_nvrtc_compile)
    monkeypatch.setitem(sys.modules, nvrtc_kernels.TORCH, module)
    nvrtc_kernels.follow()
    try:
        assert module._nvrtc_compile(SOURCE.decode(), "scale_rows", "90", nvcc_options=["-G"]) == (b"", "scale_rows")
        assert calls == [("scale_rows", ("90",), {"nvcc_options": ["-G"]})]
        (found,) = nvrtc_kernels.of_nvrtc(["scale_rows"])["scale_rows"]
        assert found.options == "-G"
        assert found.source.startswith("line 3 of a source compiled at ")
    finally:
        nvrtc_kernels.follow_no_more()
    assert module._nvrtc_compile is _nvrtc_compile


def test_the_real_compiler_is_followed() -> None:
    nvrtc = pytest.importorskip(
        "cuda.bindings.nvrtc", reason="cuda-bindings is not installed: pip install 'cbtop[cuda]'"
    )
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"there is no NVRTC: {error}")
    was = nvrtc.nvrtcCompileProgram
    kernel_makers.follow()
    try:
        compiled(nvrtc, options=[b"--gpu-architecture=sm_90"])
        one = kernel("scale_rows")
        assert makers_of([one])[one] == Maker(f"NVRTC {major}.{minor}, --gpu-architecture=sm_90", "rows.cu:3")
    finally:
        kernel_makers.follow_no_more()
    assert nvrtc.nvrtcCompileProgram is was


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_kernel_that_torch_compiles_runs_and_has_its_maker() -> None:
    kernel_makers.follow()
    try:
        scale_rows = torch.cuda._compile_kernel(SOURCE.decode(), "scale_rows", nvcc_options=["--use_fast_math"])
        x = torch.ones(4, device="cuda")
        scale_rows((1, 1, 1), (1, 1, 1), (x,))
        assert x.tolist() == [2, 1, 1, 1]
        one = kernel("scale_rows")
        assert makers_of([one])[one].maker.startswith("NVRTC ")
    finally:
        kernel_makers.follow_no_more()
