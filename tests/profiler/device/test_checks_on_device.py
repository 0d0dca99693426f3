"""Tests of checks on arrays of each library: NumPy, torch on a CPU, torch on a GPU, CuPy.

Those on a GPU have the mark `gpu`. There, no check of tensors of torch waits for the device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop import Bounded, BrickCategory, BrickDefinition, BrickProfiler, CheckOutcome, Equivalent, Finite
from cbtop.compute.own_contracts import resolved
from cbtop.profiler import brick_checks
from cbtop.profiler.brick_checks import CAPTURED
from cbtop.profiler.checks import Check
from cbtop.protocol.messages import CheckResult
from tests.profiler.memory import Memory

Make = Callable[[Any], Any]
LIBRARIES = [
    "numpy",
    "torch",
    pytest.param("torch:cuda", marks=pytest.mark.gpu),
    pytest.param("cupy", marks=pytest.mark.gpu),
]
CONTRACT = """\
equations: out[t, i] = x[t, i] * weight[i]
arguments: [x, weight, out]
outputs: [out]
reference: tests.profiler.device.test_checks_on_device:scaled
tolerance: 1.0e-5
preconditions:
  finite(x): {x: x / 0}
postconditions:
  finite(out): {out: out / 0}
  columns(out) == columns(x): {out: "out[:, 1:]"}
falsification:
  outputs: [scaled by 1.5]
  arguments:
    the weight left out: {weight: 1 + 0 * weight}
cases:
  - {x: [2, 8], weight: [8]}
"""


def scaled(x: Any, weight: Any) -> Any:
    """The reference of CONTRACT."""
    return x * weight


def doubled(x: Any) -> Any:
    return x * 2


@pytest.fixture(params=LIBRARIES)
def make(request: pytest.FixtureRequest) -> Make:
    """Return a function that makes an array of a library from an array of NumPy."""
    library, _, device = request.param.partition(":")
    module: Any = pytest.importorskip(library)
    if library == "numpy":
        return lambda values: values
    if library == "cupy":
        return lambda values: module.asarray(values)
    if device and not module.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return lambda values: module.from_numpy(values.copy()).to(device or "cpu")


@pytest.fixture
def torch() -> Iterator[Any]:
    """Return torch with a CUDA device. Operations that wait for the device raise an error."""
    module: Any = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("there is no CUDA device")
    module.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # torch warns that this mode may change
        module.cuda.set_sync_debug_mode("error")
    yield module
    module.cuda.set_sync_debug_mode("default")


def said(memory: Memory) -> list[CheckResult]:
    return [message for message in memory.said if isinstance(message, CheckResult)]


def results(check: Check | None, output: Any, *args: Any, contract: Path | str = "") -> list[CheckResult]:
    """Return the results that are announced for one call of a brick, when recording has ended."""
    memory = Memory()
    checks = brick_checks.BrickChecks(memory.announce)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(check,) if check else (), contract=contract)
    checks.evaluate(own, output, args, {})
    checks.announce_last()
    last = {one.assertion: one for one in said(memory)}
    return list(last.values())


def changed(values: Any, *, at: int, to: float) -> Any:
    copy = values.copy()
    copy.flat[at] = to
    return copy


GOOD = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
LARGE = np.array([[2**60, 1]], np.int64)
BAD = [
    (Finite(), changed(GOOD, at=5, to=np.nan), "NaN", ""),
    (Finite(), changed(GOOD, at=5, to=-np.inf), "infinity", ""),
    (Bounded(-2, 2), changed(GOOD, at=5, to=np.nan), "NaN", ""),
    (Bounded(-2, 2), changed(GOOD, at=5, to=7), "", "values from -1 to 7; 1 call checked"),
    (Equivalent(doubled), changed(2 * GOOD, at=5, to=np.nan), "NaN", ""),
    (Equivalent(doubled), 2 * GOOD[:, 1:], "", "shape (3, 7) instead of (3, 8); 1 call checked"),
    (Equivalent(doubled), 2.001 * GOOD, "", "1 call checked"),
]


@pytest.mark.parametrize("check", [Finite(), Bounded(-2, 2), Equivalent(doubled)])
def test_a_right_output_passes(make: Make, check: Check) -> None:
    output = make(2 * GOOD)
    for given, args in ((output, (make(GOOD),)), ((output, [output]), (make(GOOD),))):
        reference = Equivalent(lambda x: (2 * x, [2 * x])) if isinstance(given, tuple) else check
        (found,) = results(reference if isinstance(check, Equivalent) else check, given, *args)
        assert (found.passed, found.skipped, found.note) == (True, "", "1 call checked")
        assert found.max_error == (0.0 if isinstance(check, Equivalent) else None)


@pytest.mark.parametrize(("check", "output", "not_finite", "note"), BAD)
def test_a_wrong_output_fails(make: Make, check: Check, output: Any, not_finite: str, note: str) -> None:
    (found,) = results(check, make(output), make(GOOD))
    assert (found.passed, found.skipped, found.not_finite) == (False, "", not_finite)
    assert not note or found.note == note


def test_integers_that_float64_rounds_alike_differ(make: Make) -> None:
    (same,) = results(Equivalent(lambda x: x, 0), make(LARGE), make(LARGE))
    (other,) = results(Equivalent(lambda x: x, 0), make(LARGE + 1), make(LARGE))
    assert (same.passed, same.max_error) == (True, 0.0)
    assert (other.passed, other.skipped) == (False, "")


@pytest.mark.parametrize("kind", [np.float16, np.float64, np.complex64, np.int32, np.uint8, np.bool_])
def test_values_of_each_type_are_compared(make: Make, kind: type) -> None:
    values = make(np.array([[1, 0, 1]]).astype(kind))
    other = make(np.array([[1, 1, 1]]).astype(kind))
    (same,), (different,) = (results(Equivalent(lambda x: x), one, values) for one in (values, other))
    assert (same.passed, same.skipped) == (True, "")
    assert (different.passed, different.skipped) == (False, "")


def test_an_output_without_values_is_skipped(make: Make) -> None:
    empty = make(np.zeros((0, 8), np.float32))
    for check in (Finite(), Bounded(0, 1), Equivalent(doubled)):
        (found,) = results(check, empty, empty)
        assert found.skipped == "ValueError: the output has no values"


@pytest.mark.parametrize("fault", ["", "values", "shape", "infinity"])
def test_a_contract_is_checked_on_arrays_of_each_library(make: Make, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "scaled.yaml"
    path.write_text(CONTRACT, encoding="utf-8")
    resolved.cache_clear()
    weight = np.arange(1, 9, dtype=np.float32)
    output = GOOD * weight
    if fault == "values":
        output = output * np.float32(1.01)
    elif fault == "shape":
        output = output[:, 1:]
    elif fault == "infinity":
        output = changed(output, at=3, to=np.inf)
    found = {one.assertion: one for one in results(None, make(output), make(GOOD), make(weight), contract=path)}
    assert not [one.skipped for one in found.values() if one.skipped]
    assert found["equals scaled"].passed == (not fault)
    assert found["contract scaled"].passed == (fault not in ("shape", "infinity"))


@pytest.mark.parametrize(("check", "output", "not_finite", "note"), BAD)
def test_figures_of_a_device_have_the_same_outcome(check: Any, output: Any, not_finite: str, note: str) -> None:
    torch: Any = pytest.importorskip("torch")
    wrong, right, given = (torch.from_numpy(one.copy()) for one in (output, 2 * GOOD, GOOD))
    for values in (wrong, right, (right, wrong), (right, right)):
        own = check
        if isinstance(check, Equivalent) and isinstance(values, tuple):
            own = Equivalent(lambda x: (2 * x, 2 * x), check.tolerance)
        figures = own.device_figures(values, (given,), {})
        outcome = figures if isinstance(figures, CheckOutcome) else own.outcome_of([float(one) for one in figures])
        assert outcome == own.evaluate(values, (given,), {})
    assert check.outcome_of([float(one) for one in check.device_figures(right, (given,), {})]).passed


@pytest.mark.gpu
def test_no_check_of_a_cuda_tensor_waits_for_the_device(torch: Any) -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(), Bounded(-1e9, 1e9), Equivalent(doubled)))
    x = torch.ones(1024, device="cuda")
    # The first calls load kernels and allocate pinned memory, which may wait for the device.
    warm = brick_checks.BrickChecks(Memory().announce)
    for _ in range(brick_checks.FIRST):
        warm.evaluate(own, doubled(x), (x,), {})
    warm.announce_last()
    timed = profiler.timed(own)(doubled)
    torch.cuda._sleep(2_000_000_000)  # about a second
    begun_s = time.perf_counter()
    for _ in range(brick_checks.FIRST):
        timed(x)
    assert time.perf_counter() - begun_s < 0.5
    assert not said(memory)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    profiler.check(own, 2 * x, x)
    found = said(memory)
    assert {one.assertion for one in found} == {"finite", "from -1e+09 to 1e+09", "equals doubled"}
    assert all(one.passed and not one.skipped for one in found)


@pytest.mark.gpu
def test_a_check_does_not_break_the_capture_of_a_cuda_graph(torch: Any) -> None:
    torch.cuda.set_sync_debug_mode("default")
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
    timed = profiler.timed(own)(doubled)
    x = torch.ones(1024, device="cuda")
    timed(x)  # its outcome is awaited while the graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = timed(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, 2 * x)
    assert any(one.skipped == CAPTURED for one in said(memory))
    timed(x)
    torch.cuda.synchronize()
    timed(x)
    last = said(memory)[-1]
    assert (last.passed, last.skipped) == (True, "")


@pytest.mark.gpu
def test_the_time_of_checks_on_a_gpu_is_part_of_their_share(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brick_checks, "SHARE", 0.1)
    calls = []

    def slow(x: Any) -> Any:
        calls.append(x)
        torch.cuda._sleep(20_000_000)  # about 10 ms
        return x

    profiler = BrickProfiler(recorder=Memory())
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(slow),))
    timed = profiler.timed(own)(lambda x: x + 0)
    x = torch.ones(8, device="cuda")
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < 1:
        timed(x)
    assert brick_checks.FIRST < len(calls) <= brick_checks.FIRST + 1 * 0.1 / 0.005


@pytest.mark.gpu
def test_a_check_of_a_cupy_stream_does_not_break_its_capture() -> None:
    cupy: Any = pytest.importorskip("cupy")
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
    x, output = cupy.ones(1024, cupy.float32), cupy.empty(1024, cupy.float32)
    timed = profiler.timed(own)(lambda x: cupy.add(x, x, out=output))
    cupy.add(x, x, out=output)  # compiles the kernel
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        timed(x)
        graph = stream.end_capture()
        output.fill(0)
        graph.launch(stream)
        stream.synchronize()
        assert bool((output == 2).all())
        timed(x)
    found = said(memory)
    assert found[0].skipped == CAPTURED
    assert (found[-1].passed, found[-1].skipped) == (True, "")
