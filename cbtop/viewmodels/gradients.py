"""The gradients and the loss scale of training steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.messages import Node
from cbtop.protocol.training_messages import GradientFault, GradientMessage, GradientNorm, LossScale
from cbtop.protocol.vocabulary import WARM_UP

Kind = TypeVar("Kind", bound="GradientMessage")


@dataclass(frozen=True, slots=True)
class GradientNormView:
    """The L2 norm of the gradients before an optimizer's step, over the parameters of this process."""

    step: int  # The step of `norm`. The first step of the optimizer is 1.
    norm: float
    p50: float  # Median of the latest `measured` norms.
    max: float  # The largest of these.
    measured: int  # At most 64.
    clipping: str | None  # "before" or "after" the program clips the gradients. None if no clipping was seen.
    is_shard: bool  # Whether the process has only a part of some gradients.


@dataclass(frozen=True, slots=True)
class GradientFaultView:
    """The first step with a gradient that was NaN or Inf, and the parameter that the backward pass reached first."""

    parameter: str | None  # None if its name is not known.
    kind: str  # NaN or Inf.
    step: int
    finite_step: int | None  # The latest step before with finite gradients only, or None if unknown.
    last_step: int  # The latest step with such a gradient.
    checked_step: int  # The latest step that was checked.
    faulty: int  # Parameters with such a gradient in `step`.
    parameters: int  # Parameters with a gradient in `step`.

    @property
    def is_certain(self) -> bool:
        """Whether the gradients of the step before are known to be finite."""
        return self.finite_step == self.step - 1

    @property
    def is_over(self) -> bool:
        """Whether all gradients were finite when they were last checked."""
        return self.last_step < self.checked_step


@dataclass(frozen=True, slots=True)
class LossScaleView:
    """The loss scale of a gradient scaler. An update that lowers the scale follows a step that was skipped.

    The newest `latest` updates begin with the first fall among 64. The first 32 updates are in none of these.
    """

    scale: float
    updates: int
    falls: int  # Updates that lowered the scale, of all.
    before: float  # The scale before the newest `latest` updates.
    latest: int
    latest_falls: int
    latest_rises: int


@dataclass(frozen=True, slots=True)
class GradientsView:
    """What is known of the gradients of training steps. Each is None if the process has not reported it."""

    norm: GradientNormView | None
    fault: GradientFaultView | None
    loss_scale: LossScaleView | None


def gradients_view(record: SourceRecord, step: Node) -> GradientsView | None:
    """Return the gradients of the steps `step`, or None if nothing is known of them."""
    norm = message_of(record, step, GradientNorm)
    fault = message_of(record, step, GradientFault)
    scale = message_of(record, step, LossScale)
    if norm is None and fault is None and scale is None:
        return None
    return GradientsView(
        None if norm is None else _norm(norm),
        None if fault is None else _fault(fault),
        None if scale is None else _scale(scale),
    )


def message_of(record: SourceRecord, step: Node, kind: type[Kind]) -> Kind | None:
    """Return the message of `kind` about the steps `step`, which may be a warm-up.

    A step names its model only if the process runs several.
    """
    phase = step.name.removesuffix(WARM_UP)
    of_phase = [one for one in record.gradients.values() if isinstance(one, kind) and one.phase == phase]
    exact = [one for one in of_phase if one.model == step.label]
    found = exact or (of_phase if not step.label else [])
    return found[0] if len(found) == 1 else None


def _norm(said: GradientNorm) -> GradientNormView:
    return GradientNormView(
        said.step, said.norm, said.p50, said.highest, said.measured, said.clipping or None, said.is_shard
    )


def _fault(said: GradientFault) -> GradientFaultView:
    return GradientFaultView(
        said.parameter or None,
        said.kind,
        said.step,
        said.finite_step or None,
        said.last_step,
        said.checked_step,
        said.faulty,
        said.parameters,
    )


def _scale(said: LossScale) -> LossScaleView:
    return LossScaleView(
        said.scale, said.updates, said.falls, said.before, said.latest, said.latest_falls, said.latest_rises
    )
