"""Tests of the guard's flags, which show whether a tensor is finite.

They test which faults the flags show, and what the flags leave out.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument.guard_flags import (  # noqa: E402
    INF,
    NAN,
    OVER,
    ROWS,
    StepFlags,
    fault_at,
)

VALUES = st.sampled_from([0.0, 1.0, -3.0, 300.0, math.nan, math.inf, -math.inf])
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def fault_in(tensor: Any, bound: float = math.inf, padding: Any = None) -> str | None:
    """Return the fault that the guard's flag for `tensor` shows, or None if the tensor is not checked."""
    flags = StepFlags()
    flags.restart(padding, has_bound=bound < math.inf)
    run = flags.begin("call", (tensor,), None)
    assert run is not None
    figures = flags.figures().read()
    assert figures is not None
    return None if run.inputs is None else fault_at(figures, run.inputs, bound)


@given(
    values=st.lists(VALUES, min_size=1, max_size=40),
    pad=st.integers(0, 70),
    dtype=st.sampled_from(TYPES),
    is_strided=st.booleans(),
)
def test_a_flag_shows_what_torch_finds_in_the_tensor(
    values: list[float], pad: int, dtype: Any, is_strided: bool
) -> None:
    tensor = torch.tensor([*values, *[0.5] * pad], dtype=dtype)
    tensor = torch.stack([tensor, torch.zeros_like(tensor)], 1)[:, 0] if is_strided else tensor
    finite = tensor[torch.isfinite(tensor)]
    over = OVER if finite.numel() and float(finite.abs().max()) > 100 else ""
    expected = NAN if bool(tensor.isnan().any()) else INF if bool((tensor == math.inf).any()) else over
    assert fault_in(tensor, 100.0) == expected


def test_a_nan_is_found_wherever_it_is_in_a_large_tensor() -> None:
    for place in (0, 1, 31, 4_095, 65_536, 99_999):
        tensor = torch.zeros(100_000)
        tensor[place] = math.nan
        assert fault_in(tensor) == NAN


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.int64),
        lambda: torch.full((3,), math.nan, dtype=torch.complex64),
        lambda: torch.empty(0),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.full((2,), math.nan, device="meta"),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
    ],
    ids=["integers", "complex", "empty", "sparse", "meta", "nested"],
)
def test_tensors_without_an_order_or_contents_are_not_looked_at(make: Callable[[], Any]) -> None:
    assert fault_in(make()) is None


def test_a_tensor_is_looked_at_again_only_after_a_change() -> None:
    flags, tensor = StepFlags(), torch.ones(3)
    runs: list[Any] = [flags.begin("call", (tensor,), None) for _ in range(2)]
    tensor[1] = math.nan
    runs.append(flags.begin("call", (tensor,), {"other": torch.ones(1)}))
    figures: Any = flags.figures().read()
    first, again, changed = [run.inputs for run in runs]
    assert first == again != changed
    assert [fault_at(figures, flag, 9.0) for flag in (first, changed)] == ["", NAN]
    assert len(runs[-1].others) == 1


def test_a_call_that_changes_its_argument_uncounted_is_looked_at() -> None:
    """torch does not count a change through `.data`, nor one by a kernel of Triton."""
    flags, tensor = StepFlags(), torch.ones(3)
    run: Any = flags.begin("call", (tensor,), None)
    before = tensor._version
    tensor.data.mul_(math.nan)
    assert tensor._version == before
    flags.end(run, tensor)
    figures: Any = flags.figures().read()
    assert [fault_at(figures, flag, math.inf) for flag in (run.inputs, run.output)] == ["", NAN]


def test_a_tensor_of_inference_mode_is_looked_at_each_time() -> None:
    flags = StepFlags()
    with torch.inference_mode():
        tensor = torch.ones(3)
        runs: list[Any] = [flags.begin("call", (tensor,), None) for _ in range(2)]
    assert runs[0].inputs != runs[1].inputs


def test_more_flags_than_one_array_has_are_read_in_order() -> None:
    flags = StepFlags()
    for number in range(2 * ROWS + 5):
        flags.begin(number, (torch.tensor([float(number)]),), None)
    (found,) = (flags.figures().read() or {}).values()
    assert found == [float(number) for number in range(2 * ROWS + 5) for _ in range(2)]


KEPT = torch.tensor([[False, True, True], [True, True, True]])


@pytest.mark.parametrize(
    ("shape", "place", "is_hidden"),
    [
        ((2, 3, 4), (0, 0, 1), True),
        ((2, 3, 4), (0, 1, 1), False),
        # The mask has three tokens, but this tensor has two, as tokens of a decoder may.
        ((2, 2, 4), (0, 0, 1), False),
        ((2, 3, 3), (0, 0, 1), False),  # Two axes have the same length, so either axis may be the tokens.
        ((3, 2, 4), (0, 0, 1), True),  # tokens first
        ((3, 2, 4), (0, 1, 1), False),
        ((6, 4), (0, 1), True),
        ((6, 4), (1, 1), False),
        ((2, 3, 2, 4), (0, 0, 1, 1), True),
        ((2, 5, 3, 4), (0, 0, 0, 0), False),  # No axis has the length of the mask, so no position is padding.
        ((7, 4), (0, 1), False),
        ((6,), (0,), False),
    ],
)
def test_positions_that_the_padding_mask_hides_are_not_looked_at(
    shape: tuple[int, ...], place: tuple[int, ...], is_hidden: bool
) -> None:
    tensor = torch.zeros(shape)
    tensor[place] = math.nan
    assert fault_in(tensor, padding=KEPT) == ("" if is_hidden else NAN)


@pytest.mark.parametrize("place", [(0, 0, 1), (0, 1, 1)], ids=["padding", "a token"])
def test_a_value_below_the_bound_is_seen_next_to_negative_infinity(place: tuple[int, ...]) -> None:
    tensor = torch.zeros(2, 3, 4)
    tensor[1, 2] = -math.inf
    tensor[place] = -300.0
    assert fault_in(tensor, 100.0) == OVER
    assert fault_in(tensor, 100.0, KEPT) == ("" if place == (0, 0, 1) else OVER)
    assert fault_in(tensor, 1000.0) == ""


def test_tensors_in_containers_are_looked_at_without_code_of_the_host() -> None:
    class Pair(NamedTuple):
        first: Any

    class Output(OrderedDict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("code of the host")

    for result in (Output(loss=None, last=torch.full((2,), math.nan)), Pair(torch.full((2,), math.nan))):
        flags = StepFlags()
        run: Any = flags.begin("call", (torch.ones(2),), None)
        flags.end(run, result)
        assert fault_at(flags.figures().read() or {}, run.output, math.inf) == NAN
