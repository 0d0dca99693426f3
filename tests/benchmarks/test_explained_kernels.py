"""Tests of the benchmark that compares what cbtop says about kernels with the driver. Its GPU is not needed here."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from benchmarks.gpu import explained_kernels
from benchmarks.gpu.explained_kernels import CallbackData, LaunchConfig, LaunchedFunctions, LaunchKernel
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.runs import Run
from cbtop.reports.run_diff import diff_fields, diff_text
from tests.cbtop.comparison.made_contents import GEMM, ONE, contents, kernel, phase
from tests.cbtop.comparison.made_runs import made_run


def build(registers: int, slower: float) -> Run:
    """Return a run with 40 steps whose only kernel is in a brick that is `slower` times as slow."""
    norm = kernel("Layer 1", "norm_rows", replace(GEMM, registers=registers))
    return replace(made_run(1, steps=40, slower=slower), contents=contents(phase({norm: ONE})))


@pytest.mark.parametrize(
    ("now", "reported", "passes"), [(32, 32, True), (96, 96, False), (32, 40, False)], ids=["named", "same", "other"]
)
def test_a_diff_passes_only_if_it_names_the_registers_of_both_builds(now: int, reported: int, passes: bool) -> None:
    found = diff_of([build(96, 1.0)], [build(now, 1.5)])
    text = diff_text(found)
    raw = json.dumps(diff_fields(found), default=str)
    assert explained_kernels.names_cause(raw, text, 96, reported) is passes


def test_a_failed_diff_does_not_pass() -> None:
    assert not explained_kernels.names_cause("", "", 96, 32)


@pytest.fixture
def watcher() -> LaunchedFunctions:
    made: Any = object.__new__(LaunchedFunctions)
    made.launches, made.others = {}, set()
    return made


def called(watcher: LaunchedFunctions, name: str, parameters: ctypes.Structure, correlation: int) -> None:
    data = CallbackData(function_name=name.encode(), correlation=correlation)
    data.parameters = ctypes.addressof(parameters)
    watcher._called(None, 1, 0, ctypes.addressof(data))


def test_a_launch_of_the_driver_is_read_in_both_forms(watcher: LaunchedFunctions) -> None:
    plain = LaunchKernel(0x77, (7, 1, 1, 32, 4, 1), 512)
    config = LaunchConfig((7, 1, 1, 64, 1, 1), 256)
    extended = explained_kernels.LaunchKernelEx(ctypes.pointer(config), 0x99)
    for number, name in enumerate(("cuLaunchKernel", "cuLaunchKernel_ptsz")):
        called(watcher, name, plain, number)
    called(watcher, "cuLaunchKernelEx", extended, 2)
    called(watcher, "cuLaunchCooperativeKernel", plain, 3)
    called(watcher, "cuMemcpyAsync", plain, 4)
    assert watcher.launches == {0: (0x77, 128, 512), 1: (0x77, 128, 512), 2: (0x99, 64, 256)}
    assert watcher.others == {"cuLaunchCooperativeKernel"}
