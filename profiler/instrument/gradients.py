"""Measures gradients: their norms, and which of them are NaN or Inf.

Rules
- Gradients are only read. Autograd builds no graph of the reads. gradient_hooks.py hides them from the host's modes,
  hooks and profilers.
- Gradients on a CUDA device are not measured (see `can_read`), nor are sparse or complex ones.
- If a gradient is a DTensor, only the part in this process is measured.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cbtop.profiler.instrument.late_figures import LateFigures, can_read
from cbtop.profiler.instrument.torch_internals import (
    dispatch_modes,
    foreach_norm,
    is_profiled,
    is_tracing,
)
from cbtop.profiler.positions import finder
from cbtop.protocol import clock

SHARE = 0.002  # share of the time that measuring norms may take
SMALL_SHARE = 0.01  # share of the time that checking a few small gradients may take
COSTS = 5  # number of latest measurements whose costs are kept; the median cost decides when to measure again
MOST_JOINED = 1 << 16  # most elements of gradients that are copied into one tensor, to add them up in one call
NAN, INF = "NaN", "Inf"
_LARGEST = math.inf  # the order of the norm that is the largest magnitude; it never overflows


@dataclass(slots=True)
class Gradients:
    """What is known about the gradients of one step."""

    norm: float | None  # L2 norm of all gradients; None if it is unknown, or if a gradient is not finite
    parameters: int = 0  # number of parameters with a gradient; 0 if they were not counted
    #: Parameters with a gradient that is not finite, in the order of the backward pass.
    faulty: list[Any] = field(default_factory=list)
    kind: str = ""  # NAN or INF: the fault of the first parameter in `faulty`
    is_doubtful: bool = False  # True if only the norm may have overflowed, so the gradients may be finite
    # True if some gradients are still not finite, as in an earlier step. `faulty` is then empty.
    is_again: bool = False
    # whether the gradients were read "before" or "after" the program clipped them; "" if it did not clip
    clipping: str = ""
    is_shard: bool = False  # True if this process has only shards of some gradients
    is_skipped: bool = False  # True if the optimizer skips the step, because gradients overflowed


def is_observed() -> bool:
    """Return whether a mode or a profiler of the host would see cbtop's operations in this thread."""
    return bool(dispatch_modes()) or is_profiled() or is_tracing()


class Measurement:
    """The norms of the gradients of some parameters.

    If `is_exact`, a norm is the largest magnitude of an element. It is infinite only if an element is. If
    `is_scaled`, two numbers come before the norms: the scale of the gradients, and a number that is not 0 if the
    optimizer skips the step.
    """

    __slots__ = ("_figures", "_is_scaled", "_parameters", "clipping", "is_exact", "is_shard")

    def __init__(
        self, parameters: list[Any], figures: LateFigures, *, is_exact: bool, is_scaled: bool, is_shard: bool
    ) -> None:
        self._parameters, self._figures, self._is_scaled = parameters, figures, is_scaled
        self.is_exact, self.is_shard = is_exact, is_shard
        self.clipping = ""

    def read(self) -> Gradients | None:
        """Return the gradients, or None if their norms are still on their way from the device."""
        figures = self._figures.read()
        if figures is None:
            return None
        (scale, overflow), norms = (figures[:2], figures[2:]) if self._is_scaled else ((1.0, 0.0), figures)
        found = Gradients(None, len(norms), clipping=self.clipping, is_shard=self.is_shard)
        if overflow:
            found.is_skipped = True
        elif not all(map(math.isfinite, norms)):
            self._find_faulty(found, norms)
        elif scale and not self.is_exact:
            found.norm = math.hypot(*norms) / scale
        return found

    def _find_faulty(self, found: Gradients, norms: Sequence[float]) -> None:
        """Add parameters to the result if their gradients are not finite. A finite gradient may have an infinite
        norm.
        """
        for parameter, norm in zip(reversed(self._parameters), reversed(norms), strict=True):
            if math.isfinite(norm):
                continue
            is_certain = self.is_exact or math.isnan(norm)
            is_known = None if is_certain else is_finite(parameter)
            if is_known:
                continue
            if not found.faulty:
                found.kind = NAN if math.isnan(norm) else INF
                found.is_doubtful = not is_certain and is_known is None
            found.faulty.append(parameter)


def measure(parameters: Sequence[Any], *, is_exact: bool = False, scaling: Sequence[Any] = ()) -> Measurement | None:
    """Measure the gradients of `parameters`. Returns None if they are missing or cannot be measured.

    The norm is the L2 norm, or with `is_exact` the largest magnitude, which never overflows but takes longer.
    `scaling` are the two numbers or tensors that a gradient scaler gives to an optimizer (see `Measurement`).
    """
    found: dict[torch.dtype, list[Any]] = {}
    grads: dict[torch.dtype, list[Tensor]] = {}
    is_shard = False
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if type(grad) is not Tensor:
            grad, is_shard = _local(grad), True
        if grad is None or grad.layout is not torch.strided or not grad.is_floating_point():
            return None
        found.setdefault(grad.dtype, []).append(parameter)
        grads.setdefault(grad.dtype, []).append(grad)
    devices = {grad.device for each in grads.values() for grad in each}
    if len(devices) != 1 or not can_read(*devices):
        return None
    norms = [torch.stack(_norms(each, _LARGEST if is_exact else 2)).double() for each in grads.values()]
    norms = [torch.stack([_number(figure, *devices) for figure in scaling]), *norms] if scaling else norms
    return Measurement(
        [parameter for each in found.values() for parameter in each],
        LateFigures(norms[0] if len(norms) == 1 else torch.cat(norms)),
        is_exact=is_exact,
        is_scaled=bool(scaling),
        is_shard=is_shard,
    )


def _norms(grads: list[Tensor], order: float) -> list[Tensor]:
    if grads[0].dtype.itemsize < 4:  # a norm in the type of the gradient would have too few digits
        return foreach_norm(grads, order, dtype=torch.float32)
    return foreach_norm(grads, order)


def _number(figure: Any, device: torch.device) -> Tensor:
    """Convert a tensor or a number to a float64 tensor without axes on `device`."""
    if isinstance(figure, Tensor):
        return figure.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    return torch.full((), float(figure), dtype=torch.float64, device=device)


def _local(grad: Any) -> Tensor | None:
    """Return the part of a DTensor that is in this process. Returns None for other subclasses of Tensor."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or type(grad) is not tensors.DTensor:
        return None
    local = grad.to_local()
    return local if type(local) is Tensor else None


def measured(
    parameters: Sequence[Any], *, is_exact: bool = False, scaling: Sequence[Any] = ()
) -> Gradients | Measurement | None:
    """Measure the gradients of `parameters`, and return them.

    Returns the `Measurement` if their norms have not arrived from the device, and None if they cannot be measured.
    """
    found = measure(parameters, is_exact=is_exact, scaling=scaling)
    return (found and found.read()) or found


def is_finite(parameter: Any) -> bool | None:
    """Return whether the gradient of `parameter` is finite. Returns None if it has no gradient on a CPU."""
    grad = parameter.grad
    if type(grad) is not Tensor or not grad.is_cpu or not grad.numel():
        return None
    (norm,) = foreach_norm([grad], _LARGEST)
    return math.isfinite(norm.item())


def seem_finite(parameters: Sequence[Any]) -> bool | None:
    """Return whether the sums of the gradients of `parameters` are finite. Returns None if some parameters have no
    gradient on a CPU.

    This takes a quarter of the time of norms of infinite order. A sum is finite only if all elements are. The
    reverse is not certain, because a sum may overflow.
    """
    grads = [parameter.grad for parameter in parameters]
    if not grads or not all([type(grad) is Tensor and grad.is_cpu and grad.numel() for grad in grads]):
        return None
    # Joining the gradients copies them, so join small ones only.
    if sum([grad.numel() for grad in grads]) <= MOST_JOINED:
        grads = [torch.cat([grad.reshape(-1) for grad in grads])]
    return all([math.isfinite(grad.sum(dtype=_dtype_of_sum(grad)).item()) for grad in grads])


def _dtype_of_sum(grad: Tensor) -> torch.dtype | None:
    return torch.float32 if grad.dtype.itemsize < 4 else None  # a sum of float16 overflows soon


def small_gradients(parameters: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` parameters with small gradients, spread evenly over the model."""
    sizes = [(grad.numel(), at) for at, one in enumerate(parameters) if (grad := one.grad) is not None]
    size = max(1, -(-len(sizes) // count))
    return [parameters[min(sizes[at : at + size])[1]] for at in range(0, len(sizes), size)]


class Budget:
    """Limits the time for measuring gradients to a share of the program's time."""

    __slots__ = ("_costs_ns", "_due_ns", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._costs_ns: deque[int] = deque(maxlen=COSTS)  # costs of the latest measurements
        self._due_ns = 0  # earliest time in ns of the next measurement

    def is_due(self, now_ns: int) -> bool:
        """Whether gradients may be measured now without exceeding the limit."""
        return now_ns >= self._due_ns

    def spend(self, begun_ns: int) -> None:
        """Count a measurement that took from `begun_ns` until now.

        The first one takes longer and is not counted.
        """
        if self._due_ns:
            self._costs_ns.append(clock.perf_counter_ns() - begun_ns)
        self._due_ns = begun_ns + round(statistics.median(self._costs_ns or [0]) / self.share)


class ThreadGradients:
    """What is known about the gradients of the open step of one thread."""

    __slots__ = (
        "__weakref__",
        "_clipped",
        "_clips",
        "_faulty",
        "budget",
        "clipped",
        "is_l2",
        "latest_model",
        "latest_phase",
        "small_budget",
    )

    def __init__(self) -> None:
        self.budget, self.small_budget = Budget(SHARE), Budget(SMALL_SHARE)
        self.is_l2 = False  # True while a function of torch that clips by the L2 norm is running
        # Clipped lists of gradients that contained a faulty gradient, identified by the id of their first parameter.
        self._faulty: set[int] = set()
        # The phase of the last step. Further optimizers after the same backward belong to this phase.
        self.latest_phase = ""
        self.latest_model: Callable[[], Any] = _no_model
        self.forget()

    def forget(self) -> None:
        """Forget what was learned when gradients were clipped."""
        self._clips = 0
        self._clipped: Gradients | Measurement | None = None
        self.clipped = 0  # number of parameters with gradients that the program has clipped

    @property
    def has_clips(self) -> bool:
        """Whether the program has clipped gradients in this step."""
        return self._clips > 0

    def clips_by_value(self) -> None:
        """Count a clipping of gradients by value. It computes no norm."""
        self._clips += 1

    def clips(self, parameters: Any, total: Any) -> None:
        """Look at the gradients of `parameters` before the program clips them. Their norm is `total`."""
        self._clips += 1
        if self._clips > 1 or type(parameters) not in (list, tuple) or is_observed():
            return
        self.clipped = len(parameters)
        is_known = self.is_l2 and type(total) is Tensor and total.device.type == "cpu"
        norm = total.item() if is_known else math.nan
        first = id(parameters[0]) if parameters else 0
        if math.isfinite(norm):
            self._clipped = Gradients(norm)
            self._faulty.discard(first)
        elif is_known and first in self._faulty:
            self._clipped = Gradients(None, is_again=True)
        elif is_known or self.budget.is_due(clock.perf_counter_ns()):
            begun_ns = clock.perf_counter_ns()
            self._clipped = measured(parameters)
            self.budget.spend(begun_ns)
            if is_known:
                self._faulty.add(first)

    def take(self) -> tuple[Gradients | Measurement | None, bool]:
        """Return the gradients from before they were clipped (None if unknown), and whether they were clipped."""
        clipped, clips = self._clipped, self._clips
        self.forget()
        if clips != 1 or clipped is None:
            return None, clips > 0
        clipped.clipping = "before"
        return clipped, True


def _no_model() -> None:
    return None


gradients_here: Callable[[], ThreadGradients] = finder(ThreadGradients)
