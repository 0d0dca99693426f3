"""Computes flags for the guard, which looks for faulty values. A flag is the smallest and the largest value of a
tensor.

Rules
- A flag shows a NaN (both values are NaN), an infinity, and a value over a bound. One kernel on the tensor's device
  computes it, and it cannot overflow. Nothing waits for the device.
- A tensor that has not changed since it was last looked at is not looked at again. torch counts changes, except those
  through `tensor.data` or by unknown kernels. So a tensor that a call got and returns is looked at again.
- Other tensors are not looked at: subclasses, sparse, nested and complex tensors, integers.
- Positions that the model's padding mask hides have a flag of their own, because some models leave NaN there
  (guard_padding.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from cbtop.profiler.instrument.guard_padding import DEVICES, Hiding, kept_in, positions_in
from cbtop.profiler.instrument.late_figures import LateFigures
from cbtop.profiler.instrument.torch_internals import version_of

MAX_RUNS = 20_000  # maximum number of calls per step to look at
MAX_TENSORS = 16  # maximum number of arguments per call to look at
ROWS = 256  # memory is made for this many flags at once
TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN, INF, OVER = "NaN", "Inf", "over the bound"
Range = tuple[float, float]  # the smallest and the largest value of a tensor


class Flag(NamedTuple):
    """The place of the smallest and the largest value of one tensor: row `row` of `flags`."""

    flags: FlagArray
    row: int
    with_padding: Flag | None = None  # the flag of all positions, with padding; `row` is without padding
    without_infinity: Flag | None = None  # the flag without -Inf; only used with a bound


class FlagArray:
    """Memory for the flags of one step, for all tensors of one type on one device."""

    __slots__ = ("_arrays", "_device", "_dtype", "_rows", "used")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._arrays: list[Tensor] = []
        # The tensors for smallest and largest values, with one number each.
        self._rows: list[tuple[Tensor, Tensor]] = []
        self.used = 0

    def flag(self) -> tuple[Flag, tuple[Tensor, Tensor]]:
        """Take memory for a flag. Returns the flag and its two tensors."""
        row = self.used
        if row == len(self._rows):
            array = torch.empty((ROWS, 2), dtype=self._dtype, device=self._device)
            self._arrays.append(array)
            self._rows += [both.unbind() for both in array.unbind()]
        self.used = row + 1
        return Flag(self, row), self._rows[row]

    @property
    def is_cuda(self) -> bool:
        return str(self._device.type) == "cuda"

    def values_of(self, row: int) -> Range:
        """Return the smallest and the largest value of a tensor. This waits for its device."""
        lowest, highest = self._rows[row]
        return float(lowest), float(highest)

    def late(self) -> LateFigures:
        """Return the values of all flags in use. They may arrive later."""
        array = self._arrays[0] if len(self._arrays) == 1 else torch.cat(self._arrays)
        return LateFigures(array[: self.used].flatten())


class GuardedRun:
    """A call of a brick or layer in a step that the guard checks. `around` is the call that contains it."""

    __slots__ = (
        "around", "call", "given", "has_ended", "hiding", "inputs", "is_unsure", "others", "output", "values",
    )  # fmt: skip

    def __init__(self, call: Any, around: GuardedRun | None, hiding: Hiding) -> None:
        self.call, self.around, self.hiding = call, around, hiding
        self.given: list[int] = []  # the `id` of each tensor among the arguments
        self.inputs: Flag | None = None  # flag of the first tensor among the arguments
        self.others: list[Flag] = []  # flags of the other tensors among the arguments
        self.is_unsure = True  # whether a tensor among the arguments was not looked at, or there was none
        self.output: Flag | None = None
        # the arguments, if the guard may have to save them; else None
        self.values: tuple[Any, Any] | None = None
        self.has_ended = False


class StepFlags:
    """The calls of one step, and the flags of their tensors. `restart` makes the object ready for another step."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[torch.dtype, torch.device], FlagArray] = {}
        self.restart(None)

    def restart(self, padding: Tensor | None, *, has_bound: bool = False) -> None:
        """Begin a step.

        `padding` (batch, token) is True at tokens and False at padding. If it is None, all positions are looked at.
        """
        for array in self._arrays.values():
            array.used = 0
        self._padding, self._has_bound = padding, has_bound
        self._known: dict[int, tuple[ref[Tensor], int, Flag]] = {}
        self._running: list[GuardedRun] = []
        self._count = 0
        self.ended: list[GuardedRun] = []  # the calls in the order of their ends

    def begin(
        self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, hiding: Hiding = Hiding.BY_SHAPE
    ) -> GuardedRun | None:
        """Begin the call of a module with these arguments. Returns None after MAX_RUNS calls."""
        if self._count >= MAX_RUNS:
            return None
        self._count += 1
        run = GuardedRun(call, self._running[-1] if self._running else None, hiding)
        self._running.append(run)
        tensors = list(_tensors_in(args if kwargs is None else (*args, *kwargs.values())))
        run.given = [*map(id, tensors)]
        flags = [self._flag(tensor, hiding) for tensor in tensors[:MAX_TENSORS]]
        run.inputs = flags[0] if flags else None
        run.others = [flag for flag in flags[1:] if flag is not None]
        run.is_unsure = not 0 < len(tensors) <= MAX_TENSORS or any(
            [flag is None and _has_fractions(tensor) for flag, tensor in zip(flags, tensors, strict=True)]
        )
        return run

    def end(self, run: GuardedRun, result: Any) -> None:
        """End a call, which returned `result`. Only the first tensor of the result is looked at."""
        run.has_ended = True
        if run in self._running:
            del self._running[self._running.index(run) :]
        # without padding in the arguments, a module's result has no padding
        is_whole = run.inputs is not None and run.inputs.with_padding is None
        for tensor in _tensors_in((result,)):
            if id(tensor) in run.given:
                self._known.pop(id(tensor), None)
            run.output = self._flag(tensor, Hiding.NEVER if is_whole else run.hiding)
            break
        self.ended.append(run)

    def figures(self) -> StepFigures:
        """Return the values of this step's flags. They may arrive later."""
        return StepFigures({array: array.late() for array in self._arrays.values() if array.used})

    def _flag(self, tensor: Tensor, hiding: Hiding) -> Flag | None:
        """Compute the flag of `tensor`. Returns None if the tensor is not looked at."""
        if not is_looked_at(tensor):
            return None
        dtype, device = tensor.dtype, tensor.device
        can_change = tensor.is_inference()  # without a version
        version = 0 if can_change else version_of(tensor)
        known = self._known.get(id(tensor))
        if known is not None and not can_change and known[0]() is tensor and known[1] == version:
            return known[2]
        array = self._arrays.get((dtype, device))
        if array is None:
            array = self._arrays[dtype, device] = FlagArray(dtype, device)
        flag = self._computed(tensor.detach() if tensor.requires_grad else tensor, array, hiding)
        if not can_change:
            self._known[id(tensor)] = ref(tensor), version, flag
        return flag

    def _computed(self, values: Tensor, array: FlagArray, hiding: Hiding) -> Flag:
        """Compute the flags of tensors that have no flag yet."""
        kept = None if self._padding is None else kept_in(values, self._padding, hiding)
        finite = values.masked_fill(values == -math.inf, 0) if self._has_bound else None
        with_padding = None
        if kept is not None:
            each = positions_in(values, len(kept))
            with_padding, out = array.flag()
            torch.aminmax(each, out=out)
            values = each.masked_fill_(~kept, 0)
            finite = None if finite is None else positions_in(finite, len(kept)).masked_fill_(~kept, 0)
        without_infinity = None
        if finite is not None:
            without_infinity, out = array.flag()
            torch.aminmax(finite, out=out)
        flag, out = array.flag()
        torch.aminmax(values, out=out)
        return flag._replace(with_padding=with_padding, without_infinity=without_infinity)


def is_looked_at(tensor: Tensor) -> bool:
    """Return whether smallest and largest values of a tensor can be computed, and show whether it is faulty."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.dtype not in TYPES or tensor.device.type not in DEVICES or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested and tensor.numel() > 0


def _has_fractions(tensor: Tensor) -> bool:
    """Whether elements of this tensor's type can be NaN or Inf."""
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() > 0


class StepFigures:
    """The values of all flags of one step. They may still be on their way from a device."""

    __slots__ = ("_late",)

    def __init__(self, late: dict[FlagArray, LateFigures]) -> None:
        self._late = late

    def read(self) -> dict[FlagArray, list[float]] | None:
        """Return the values of the flags, or None if some have not arrived."""
        found = {array: figures.read() for array, figures in self._late.items()}
        arrived = {array: figures for array, figures in found.items() if figures is not None}
        return arrived if len(arrived) == len(found) else None


def range_in(figures: dict[FlagArray, list[float]], flag: Flag) -> Range:
    """Return the smallest and the largest value of a tensor from its flag."""
    numbers = figures[flag.flags]
    return numbers[2 * flag.row], numbers[2 * flag.row + 1]


def fault_at(figures: dict[FlagArray, list[float]], flag: Flag, bound: float) -> str:
    """Return the fault of a tensor. Also finds a value below the bound in a tensor that contains -Inf, which
    `fault_of` misses.
    """
    finite = flag.without_infinity
    return fault_of(range_in(figures, flag), bound) or (
        fault_of(range_in(figures, finite), bound) if finite is not None else ""
    )


def fault_of(values: Range, bound: float) -> str:
    """Return the fault of these values: NAN, INF, OVER or "". -Inf alone is not a fault, because masks contain it."""
    lowest, highest = values
    if math.isnan(highest):
        return NAN
    if highest == math.inf:
        return INF
    return OVER if highest > bound or -math.inf < lowest < -bound else ""


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`, also inside lists, tuples and dictionaries.

    Runs no code of the host's classes.
    """
    for value in values:
        kind = type(value)
        if issubclass(kind, Tensor):  # compares types, because `isinstance` may run the host's `__class__`
            yield value
        elif issubclass(kind, tuple):
            yield from [one for one in tuple.__iter__(value) if issubclass(type(one), Tensor)]
        elif issubclass(kind, list):
            yield from [one for one in list.__iter__(value) if issubclass(type(one), Tensor)]
        elif issubclass(kind, dict):  # a subclass of dict, for example `ModelOutput` of transformers
            yield from [one for one in dict.values(value) if issubclass(type(one), Tensor)]
