"""Checks of CUDA tensors. Their outcome arrives later, so that nothing waits for the device.

A check with `device_figures` and `outcome_of` (checks.py) is begun here. Its figures are computed in the caller's
stream and copied to the host, between two events. The events give the time that the check took on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cbtop.profiler.checks import Check, CheckOutcome, arrays_of, library_of


class LateOutcome:
    """The outcome of a check that a device has not computed yet. `read` it after `has_arrived`."""

    __slots__ = ("_begun", "_copy", "_ended", "_outcome_of")

    def __init__(
        self, begun: Any, figures: Sequence[Any], outcome_of: Callable[[Sequence[float]], CheckOutcome]
    ) -> None:
        """`figures` are tensors with one number each, on one device. `begun` is an event before them in a stream."""
        torch = sys.modules["torch"]
        numbers = torch.stack([figure.double() for figure in figures])
        # The host may have set another default device. Only memory of the CPU can be pinned.
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy = copy.copy_(numbers, non_blocking=True)
        self._begun, self._outcome_of = begun, outcome_of
        self._ended = torch.cuda.Event(enable_timing=True)
        self._ended.record(torch.cuda.current_stream(numbers.device))

    def has_arrived(self) -> bool:
        """Return whether the device has sent the figures."""
        return bool(self._ended.query())

    def read(self) -> tuple[CheckOutcome, int]:
        """Return the outcome, and the time (ns) between both events on the device."""
        return self._outcome_of(self._copy.tolist()), round(1e6 * self._begun.elapsed_time(self._ended))


def begin(check: Check, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome | LateOutcome:
    """Evaluate a check of CUDA tensors without waiting for the device. Any other check is evaluated at once."""
    figures_of = getattr(check, "device_figures", None)
    device = _cuda_device(output)
    if figures_of is None or device is None:
        return check.evaluate(output, args, kwargs)
    torch = sys.modules["torch"]
    begun = torch.cuda.Event(enable_timing=True)
    begun.record(torch.cuda.current_stream(device))
    figures = figures_of(output, args, kwargs)
    outcome_of: Callable[[Sequence[float]], CheckOutcome] = check.outcome_of  # type: ignore[attr-defined]
    if isinstance(figures, CheckOutcome):
        return figures
    if {figure.device for figure in figures} != {device}:
        return outcome_of([float(figure) for figure in figures])
    return LateOutcome(begun, figures, outcome_of)


def is_captured(output: Any) -> bool:
    """Return whether the caller's stream is being captured into a CUDA graph, by torch or the library of `output`."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    cupy = sys.modules.get("cupy")
    # Another thread may be importing torch, and a device with a fault raises RuntimeError.
    with suppress(RuntimeError):
        if hasattr(cuda, "is_initialized") and cuda.is_initialized() and cuda.is_current_stream_capturing():
            return True
    if cupy is None or library_of(_first(output)) is not cupy:
        return False
    return bool(cupy.cuda.get_current_stream().is_capturing())


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _cuda_device(output: Any) -> Any:
    """Return the device of an output that is a CUDA tensor of torch, or tuples and lists of them, else None."""
    torch = sys.modules.get("torch")
    if torch is None or library_of(_first(output)) is not torch:
        return None
    kinds = torch.Tensor, torch.nn.Parameter  # figures of other subclasses may have types of their own
    arrays = list(arrays_of(output))
    return arrays[0].device if all(type(one) in kinds and one.is_cuda for one in arrays) else None
