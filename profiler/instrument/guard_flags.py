"""The flags of one guarded step: the smallest and the largest value of tensors, computed on their own device.

Rules
- The smallest and the largest value together show a NaN (both are NaN), an infinity, and a value over a bound. One
  kernel computes both, and none of it overflows. Nothing waits for the device.
- A tensor that was looked at before, and was not changed since, is not looked at again.
- Tensors of other types and devices are not looked at: subclasses, sparse, nested and complex tensors, integers.
- Positions that the model's padding mask hides are not looked at, because some models leave NaN there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from cbtop.profiler.instrument.late_figures import LateFigures
from cbtop.profiler.instrument.torch_internals import version_of

MAX_RUNS = 20_000  # calls in one step; later calls are not looked at
MAX_TENSORS = 16  # arguments of one call that are looked at
ROWS = 256  # flags that are allocated at once
TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICES = "cpu", "cuda"
NAN, INF, OVER = "NaN", "Inf", "over the bound"
Range = tuple[float, float]  # the smallest and the largest value


class Flag(NamedTuple):
    """The place of the smallest and the largest value of a tensor."""

    flags: FlagArray
    row: int


class Mask(NamedTuple):
    """A padding mask: 1 or True for a token, or for padding if it is inverse."""

    values: Tensor
    is_inverse: bool


class FlagArray:
    """The flags of all tensors of one type on one device, in a step."""

    __slots__ = ("_arrays", "_device", "_dtype", "_rows", "used")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._arrays: list[Tensor] = []
        self._rows: list[tuple[Tensor, Tensor]] = []  # each holds one number
        self.used = 0

    def flag(self) -> tuple[Flag, tuple[Tensor, Tensor]]:
        """Take the next flag. Returns it with its two tensors."""
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
        """Return the smallest and the largest value of a tensor now. Waits for its device."""
        lowest, highest = self._rows[row]
        return float(lowest), float(highest)

    def late(self) -> LateFigures:
        """Return the figures of the flags that were taken."""
        array = self._arrays[0] if len(self._arrays) == 1 else torch.cat(self._arrays)
        return LateFigures(array[: self.used].flatten())


class GuardedRun:
    """One call of a brick or layer in a guarded step, made by `call` inside the call `around`."""

    __slots__ = ("around", "call", "has_ended", "inputs", "is_unsure", "others", "output", "values")

    def __init__(self, call: Any, around: GuardedRun | None) -> None:
        self.call, self.around = call, around
        self.inputs: Flag | None = None  # of the first tensor among the arguments
        self.others: list[Flag] = []  # of the other tensors
        self.is_unsure = True  # whether it got no tensor, or one with values that were not looked at
        self.output: Flag | None = None
        self.values: tuple[Any, Any] | None = None  # the arguments, if they may be saved
        self.has_ended = False


class StepFlags:
    """The flags of one step. They can be used for another step after `restart`."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[torch.dtype, torch.device], FlagArray] = {}
        self.restart(None)

    def restart(self, padding: Tensor | None) -> None:
        """Begin a step. `padding` is True at the positions (batch, token) that are looked at; None: at all."""
        for array in self._arrays.values():
            array.used = 0
        self._padding = padding
        self._known: dict[int, tuple[ref[Tensor], int, Flag]] = {}
        self._running: list[GuardedRun] = []
        self._count = 0
        self.ended: list[GuardedRun] = []  # in the order of their ends

    def begin(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> GuardedRun | None:
        """Begin a call of `call` with these arguments. Returns None after MAX_RUNS calls."""
        if self._count >= MAX_RUNS:
            return None
        self._count += 1
        run = GuardedRun(call, self._running[-1] if self._running else None)
        self._running.append(run)
        tensors = list(_tensors_in(args if kwargs is None else (*args, *kwargs.values())))
        flags = [self._flag(tensor) for tensor in tensors[:MAX_TENSORS]]
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
        for tensor in _tensors_in((result,)):
            run.output = self._flag(tensor)
            break
        self.ended.append(run)

    def figures(self) -> StepFigures:
        """Return the figures of the flags of this step, which may arrive later."""
        return StepFigures({array: array.late() for array in self._arrays.values() if array.used})

    def _flag(self, tensor: Tensor) -> Flag | None:
        """Compute the flag of `tensor`. Returns None if it is not looked at."""
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
        flag, out = array.flag()
        values = tensor.detach() if tensor.requires_grad else tensor
        if self._padding is not None:
            values = _without_padding(values, self._padding)
        torch.aminmax(values, out=out)
        if not can_change:
            self._known[id(tensor)] = ref(tensor), version, flag
        return flag


def is_looked_at(tensor: Tensor) -> bool:
    """Return whether the smallest and the largest value of a tensor can be computed, and mean something."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.dtype not in TYPES or tensor.device.type not in DEVICES or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested and tensor.numel() > 0


def _has_fractions(tensor: Tensor) -> bool:
    """Whether values of a tensor may be NaN or Inf."""
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() > 0


class StepFigures:
    """The figures of the flags of one step, which may arrive later."""

    __slots__ = ("_late",)

    def __init__(self, late: dict[FlagArray, LateFigures]) -> None:
        self._late = late

    def read(self) -> dict[FlagArray, list[float]] | None:
        """Return the figures, or None if some have not arrived."""
        found = {array: figures.read() for array, figures in self._late.items()}
        arrived = {array: figures for array, figures in found.items() if figures is not None}
        return arrived if len(arrived) == len(found) else None


def range_in(figures: dict[FlagArray, list[float]], flag: Flag) -> Range:
    """Return the smallest and the largest value of a tensor."""
    numbers = figures[flag.flags]
    return numbers[2 * flag.row], numbers[2 * flag.row + 1]


def fault_of(values: Range, bound: float) -> str:
    """Return NAN, INF or OVER, or "" without a fault. -Inf alone is not one: masks contain it."""
    lowest, highest = values
    if math.isnan(highest):
        return NAN
    if highest == math.inf:
        return INF
    return OVER if highest > bound or -math.inf < lowest < -bound else ""


def mask_in(names: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mask | None:
    """Return the padding mask among the arguments of a model, or None.

    In transformers, a mask is `attention_mask` with 1 for a token. In torch, it is a `..._padding_mask` with True for
    padding.
    """
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        is_inverse = name.endswith("padding_mask")
        if (is_inverse or name == "attention_mask") and type(value) is Tensor:
            return Mask(value, is_inverse)
    return None


def tokens_of(mask: Mask | None) -> Tensor | None:
    """Return a tensor (batch, token) that is True at the tokens. Returns None if all positions are tokens."""
    if mask is None or mask.values.dim() != 2 or mask.values.device.type not in DEVICES:
        return None
    if mask.values.is_floating_point():
        return None  # numbers that are added to scores
    kept = mask.values == 0 if mask.is_inverse else mask.values != 0
    return None if kept.device.type == "cpu" and bool(kept.all()) else kept


def _without_padding(values: Tensor, kept: Tensor) -> Tensor:
    """Return the smallest and largest value of each position, and 0 for hidden positions.

    Returns `values` if their axes are not those of the mask: (batch, token, …), (token, batch, …) or (both, …).
    A call with a cache has only the last tokens.
    """
    batch, tokens = kept.shape
    shape, axes = values.shape, values.dim()
    if kept.device != values.device:
        return values
    if axes >= 3 and shape[0] == batch and (shape[1] == tokens or (axes == 3 and shape[1] < tokens)):
        kept = kept[:, -shape[1] :]
    elif axes >= 3 and shape[:2] == (tokens, batch):
        kept = kept.T
    elif axes != 2 or shape[0] != batch * tokens:
        return values
    positions = kept.numel()
    each = torch.aminmax(values.reshape(positions, -1), dim=1)
    return torch.stack(each).masked_fill_(~kept.reshape(-1), 0)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`, and in lists, tuples and dictionaries there."""
    for value in values:
        if issubclass(type(value), Tensor):  # `isinstance` may run the host's `__class__`
            yield value
        elif type(value) is tuple or type(value) is list:
            yield from [one for one in value if issubclass(type(one), Tensor)]
        elif type(value) is dict:
            yield from [one for one in value.values() if issubclass(type(one), Tensor)]
