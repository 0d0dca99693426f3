"""Tests of users' bricks that verify themselves: the results are announced.

The results do not affect the program or the measured times.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop import Bounded, BrickCategory, BrickDefinition, BrickId, BrickProfiler, Equivalent, Finite
from cbtop.profiler import brick_checks, checks
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import CheckResult
from tests.profiler.memory import Memory


def _numpy() -> Callable[..., Any]:
    return lambda *values: np.array(values, np.float32)


def _torch() -> Callable[..., Any]:
    torch = pytest.importorskip("torch")
    return lambda *values: torch.tensor(values, requires_grad=True)


@pytest.fixture(params=[_numpy, _torch])
def array(request: pytest.FixtureRequest) -> Callable[..., Any]:
    made: Callable[..., Any] = request.param()
    return made


def double(x: Any) -> Any:
    return 2 * x


@pytest.mark.parametrize(("library", "name"), [("numpy", "array"), ("torch", "tensor")])
@pytest.mark.parametrize("pair", [(2**60, 2**60 + 1), (-(2**60), -(2**60) - 1), (2**63 - 2, 2**63 - 1)])
def test_large_integers_that_float64_rounds_alike_differ(library: str, name: str, pair: tuple[int, int]) -> None:
    make = getattr(pytest.importorskip(library), name)
    check = Equivalent(make, tolerance=0)
    large, other = pair
    assert not check.evaluate(make([other, 1]), ([large, 1],), {}).passed
    assert check.evaluate(make([large, 1]), ([large, 1],), {}).passed


@pytest.mark.parametrize("check", [Finite(), Bounded(0, 10), Equivalent(np.array)])
def test_a_masked_array_is_not_checked(check: checks.Check) -> None:
    with pytest.raises(TypeError, match="a MaskedArray hides values; return its data"):
        check.evaluate(np.ma.array([1.0, np.nan], mask=[False, True]), ([1.0, 5.0],), {})


def _results(memory: Memory) -> list[CheckResult]:
    return [message for message in memory.said if isinstance(message, CheckResult)]


def _run(output: Any, check: checks.Check, *args: Any) -> CheckResult:
    memory = Memory()
    definition = BrickDefinition("Own", BrickCategory.OTHER, checks=(check,))
    BrickProfiler(recorder=memory).check(definition, output, *args)
    return _results(memory)[0]


def test_a_right_output_passes_every_check(array: Callable[..., Any]) -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition.of(BrickId.RMS_NORM, checks=(Finite(), Bounded(0, 8), Equivalent(double)))
    timed = profiler.timed(own)(lambda x: 2 * x)
    timed(array(1.0, 4.0))
    assert [(one.brick, one.assertion, one.passed, one.skipped) for one in _results(memory)] == [
        ("RmsNorm", "finite", True, ""),
        ("RmsNorm", "from 0 to 8", True, ""),
        ("RmsNorm", "equals double", True, ""),
    ]
    assert _results(memory)[2].max_error == 0.0


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_a_value_that_is_not_finite_fails(array: Callable[..., Any], value: float, name: str) -> None:
    found = _run((array(1.0), [array(2.0, value)]), Finite())
    assert (found.passed, found.not_finite) == (False, name)
    found = _run(array(value), Equivalent(double), array(value))
    assert (found.passed, found.not_finite, found.max_error) == (False, name, None)


def test_values_outside_the_bounds_fail_and_are_named(array: Callable[..., Any]) -> None:
    found = _run(array(-3.0, 7.0), Bounded(-1, 8))
    assert (found.passed, found.note) == (False, "values from -3 to 7; at least 1 call checked")
    assert not _run(array(float("nan")), Bounded(-1, 8)).passed


def test_an_error_over_the_tolerance_fails(array: Callable[..., Any]) -> None:
    assert _run(array(2.0, 8.001), Equivalent(double, 1e-3), array(1.0, 4.0)).passed
    found = _run(array(2.0, 8.1), Equivalent(double, 1e-3), array(1.0, 4.0))
    assert not found.passed
    assert found.max_error == pytest.approx(0.1 / 8, rel=1e-3)
    found = _run(array(2.0), Equivalent(double), array(1.0, 4.0))
    assert (found.passed, found.note) == (False, "shape (1,) instead of (2,); at least 1 call checked")


def test_a_check_that_cannot_run_is_skipped_and_says_why() -> None:
    assert _run("text", Finite()).skipped == "TypeError: a str is no array of numpy, torch, cupy"

    def broken(x: object) -> object:
        raise OSError("the reference is gone")

    found = _run(np.ones(2), Equivalent(broken), np.ones(2))
    assert found.skipped == "OSError: the reference is gone"


def test_a_failure_is_announced_at_once_and_stays() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
    for number in range(1, 9):
        profiler.check(own, np.array([float("nan") if number == 3 else 1.0]))
    told = [(one.passed, one.note) for one in _results(memory)]
    assert told[:3] == [
        (True, "at least 1 call checked"),
        (True, "at least 2 calls checked"),
        (False, "at least 3 calls checked"),
    ]
    assert not any(passed for passed, _ in told[2:])


def test_checks_take_their_share_of_the_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow(x: Any) -> Any:
        calls.append(x)
        time.sleep(0.002)
        return x

    monkeypatch.setattr(brick_checks, "SHARE", 0.1)
    profiler = BrickProfiler(recorder=Memory())
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(slow),))
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.3:
        profiler.check(own, np.ones(1), np.ones(1))
    assert brick_checks.FIRST <= len(calls) <= brick_checks.FIRST + 0.3 * 0.1 / 0.002 + 1


def test_the_time_of_checks_is_in_no_brick() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)

    def slow(x: Any) -> Any:
        time.sleep(0.05)
        return x

    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(slow),))
    profiler.timed(own)(lambda x: x)(np.ones(1))
    assert all(end - start < 40_000_000 for _, start, end, _ in memory.records)


def test_nothing_is_checked_while_nothing_is_recorded() -> None:
    profiler = BrickProfiler(recorder=Memory(), enabled=False)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(pytest.fail),))
    profiler.check(own, np.ones(1))


def test_a_name_instead_of_a_brick_id_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"'Own' is not a BrickId; .*BrickDefinition\('Own', BrickCategory.OTHER\)"):
        BrickDefinition.of("Own", checks=(Finite(),))  # type: ignore[arg-type]


def test_what_is_no_check_is_refused_when_the_definition_is_made() -> None:
    with pytest.raises(TypeError, match="is no check"):
        BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite,))  # type: ignore[arg-type]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_complex_values_are_compared_with_both_their_parts(library: str) -> None:
    array = pytest.importorskip(library).asarray
    found = _run(array([1 + 0j]), Equivalent(lambda: array([1 + 3j])))
    assert not found.passed
    assert found.max_error == pytest.approx(3 / abs(1 + 3j))


@pytest.mark.parametrize("check", [Finite(), Bounded(0, 1), Equivalent(lambda: np.zeros(0))])
def test_a_check_of_no_values_is_skipped_and_does_not_pass(check: checks.Check) -> None:
    assert _run(np.zeros(0), check).skipped == f"ValueError: {checks.NO_VALUES}"


def test_a_difference_that_no_float_can_hold_fails() -> None:
    found = _run(np.array([1.7e308]), Equivalent(lambda: np.array([-1.7e308])))
    assert (found.passed, found.max_error) == (False, None)
    beyond = np.array([np.longdouble("1e400")])
    assert not _run(beyond, Equivalent(lambda: 10 * beyond)).passed


def test_the_largest_error_of_all_calls_is_announced() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    for number, error in enumerate((0.0, 2e-6, 4e-6, 1e-6, 0.0, 0.0, 0.0, 0.0), 1):
        own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(double, 1e-5),))
        profiler.check(own, np.array([2.0 + 2 * error]), np.ones(1))
        assert (_results(memory)[-1].note == f"at least {number} calls checked") == (number in (2, 4, 8))
    assert [round(1e6 * (one.max_error or 0)) for one in _results(memory)] == [0, 2, 4, 4]


def test_the_number_of_checked_calls_is_exact_when_recording_has_ended(runtime: Path) -> None:
    recorder = RingRecorder(runtime)
    profiler = BrickProfiler(recorder=recorder)
    recorder.open()
    for _ in range(7):  # later calls of one definition may not be due
        own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Bounded(0, 1),))
        profiler.check(own, np.ones(1))

    def note() -> str:
        (catalog,) = runtime.glob("*.catalog")
        return [message for message in CatalogReader(catalog).read() if isinstance(message, CheckResult)][-1].note

    assert note() == "at least 4 calls checked"
    profiler.close()
    assert note() == "7 calls checked"


def test_after_a_reset_checks_begin_anew() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
    profiler.check(own, np.array([np.nan]))

    class Resets:
        name = "resets"

        def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> checks.CheckOutcome:
            profiler.reset()  # as another thread may do during a check
            return checks.CheckOutcome(True)

    profiler.check(BrickDefinition("Resets", BrickCategory.OTHER, checks=(Resets(),)), np.ones(1))
    profiler.check(own, np.ones(1))
    assert [(one.brick, one.passed) for one in _results(memory)] == [("Own", False), ("Resets", True), ("Own", True)]
    assert _results(memory)[-1].note == "at least 1 call checked"


def test_each_definition_of_one_name_gets_its_first_checks() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    query, key = (BrickDefinition("Own", BrickCategory.OTHER, label=label, checks=(Finite(),)) for label in "qk")
    for _ in range(brick_checks.FIRST):
        profiler.check(query, np.ones(1))
    for _ in range(brick_checks.FIRST):
        profiler.check(key, np.array([np.nan]))
    assert not _results(memory)[-1].passed


def test_a_skipped_call_counts_apart_and_keeps_the_result() -> None:
    outputs = [np.ones(1), "text", np.ones(1), np.array([np.nan])]
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    for output in outputs:
        own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
        profiler.check(own, output)
    assert [(one.passed, one.skipped, one.note) for one in _results(memory)] == [
        (True, "", "at least 1 call checked"),
        (True, "", "at least 1 call checked; at least 1 skipped"),
        (False, "", "at least 3 calls checked; at least 1 skipped"),
    ]


def test_an_error_that_no_message_can_carry_still_fails() -> None:
    class Own:
        name = "own"

        def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> checks.CheckOutcome:
            return checks.CheckOutcome(False, max_error=output, tolerance=float("inf"))

    found = _run(np.float32("inf"), Own())
    assert (found.passed, found.skipped, found.max_error, found.tolerance) == (False, "", None, None)
    assert type(_run(np.float32(2), Own()).max_error) is float


def test_a_forked_child_checks_its_own_first_calls() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
    for _ in range(2 * brick_checks.FIRST):
        profiler.check(own, np.ones(1))
    child = os.fork()
    if child == 0:
        profiler.check(own, np.array([np.nan]))
        os._exit(0 if not _results(memory)[-1].passed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_check_whose_name_is_no_text_is_refused() -> None:
    class Own:
        name = 5

        def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> checks.CheckOutcome:
            return checks.CheckOutcome(True)

    with pytest.raises(TypeError, match="the name of the check"):
        BrickDefinition("Own", BrickCategory.OTHER, checks=(Own(),))  # type: ignore[arg-type]


class Given:
    """A check that returns the outcomes that it was given, one for each call."""

    name = "given"

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = iter(outcomes)

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> checks.CheckOutcome:
        return next(self._outcomes)


def test_an_outcome_returned_again_is_counted_and_announced_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brick_checks, "SHARE", 1e9)
    passed, failed = checks.PASSED, checks.CheckOutcome(False, note="bad")
    outcomes = [passed] * 9 + [failed] + [passed] * 7
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Given(*outcomes),))
    for _ in outcomes:
        profiler.check(own, np.ones(1))
    said = [(one.passed, one.note) for one in _results(memory)]
    assert said == [
        (True, "at least 1 call checked"),
        *[(True, f"at least {number} calls checked") for number in (2, 4, 8)],
        *[(False, f"bad; at least {number} calls checked") for number in (10, 16)],
    ]


def test_an_outcome_that_its_author_changes_is_read_again() -> None:
    class Mutable:
        passed, max_error, tolerance, not_finite, note = True, None, None, "", ""

    outcome = Mutable()
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    check = Given(*[outcome] * 3)
    for number in range(3):
        outcome.passed = number < 2
        profiler.check(BrickDefinition("Own", BrickCategory.OTHER, checks=(check,)), np.ones(1))
    assert [one.passed for one in _results(memory)] == [True, True, False]


def test_definitions_beyond_the_limit_share_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brick_checks, "MAX_RESULTS", 1)
    monkeypatch.setattr(brick_checks, "SHARE", 1e-12)
    calls = []

    def reference(x: Any) -> Any:
        calls.append(x)
        return x

    profiler = BrickProfiler(recorder=Memory())
    for name in "abc":
        own = BrickDefinition(name, BrickCategory.OTHER, checks=(Equivalent(reference),))
        timed = profiler.timed(own)(lambda x: x)
        for _ in range(5):
            timed(np.ones(1))
    assert len(calls) == brick_checks.FIRST


def test_a_call_that_ends_while_another_thread_checks_is_not_checked() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Finite(),))
    is_checking, may_end = threading.Event(), threading.Event()

    class Waits:
        name = "waits"

        def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> checks.CheckOutcome:
            is_checking.set()
            assert may_end.wait(30)
            return checks.PASSED

    waiting = BrickDefinition("Waits", BrickCategory.OTHER, checks=(Waits(),))
    other = threading.Thread(target=profiler.check, args=(waiting, np.ones(1)))
    other.start()
    assert is_checking.wait(30)
    profiler.check(own, np.ones(1))
    assert not _results(memory)
    may_end.set()
    other.join()
    profiler.check(own, np.ones(1))
    assert [one.brick for one in _results(memory)] == ["Waits", "Own"]


def test_a_call_that_ends_recording_is_not_checked() -> None:
    profiler = BrickProfiler(recorder=Memory())
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(pytest.fail),))
    profiler.timed(own)(lambda x: profiler.disable())(np.ones(1))


def test_two_checks_with_one_name_are_counted_apart() -> None:
    memory = Memory()
    own = BrickDefinition("Own", BrickCategory.OTHER, checks=(Equivalent(double), Equivalent(double, 1e-9)))
    BrickProfiler(recorder=memory).check(own, np.array([2.00001]), np.ones(1))
    assert [(one.assertion, one.passed, one.note) for one in _results(memory)] == [
        ("equals double", True, "at least 1 call checked"),
        ("equals double (2)", False, "at least 1 call checked"),
    ]
