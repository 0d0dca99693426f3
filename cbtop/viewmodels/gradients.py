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
    """The L2 norm of the gradients before a step of the optimizer, over the parameters of this process."""

    step: int  # number of the optimizer's step with `norm`, from 1
    norm: float
    p50: float  # median of the newest norms
    max: float  # maximum of the newest norms
    measured: int  # number of the newest norms, at most 64
    clipping: str | None  # whether the norm is from "before" or "after" clipping; None if no clipping was seen
    is_shard: bool  # whether the process has only a part of some gradients


@dataclass(frozen=True, slots=True)
class GradientFaultView:
    """The first step with a NaN or Inf gradient, and the parameter that the backward pass reached first."""

    parameter: str | None  # name of the parameter, or None if it is not known
    kind: str  # NaN or Inf
    step: int
    finite_step: int | None  # latest earlier step with only finite gradients, or None if unknown
    last_step: int  # latest step with a NaN or Inf gradient
    checked_step: int  # latest step that was checked
    faulty: int  # number of parameters with a NaN or Inf gradient in `step`
    parameters: int  # number of parameters with any gradient in `step`

    @property
    def is_certain(self) -> bool:
        """Whether the gradients of the previous step are known to be finite."""
        return self.finite_step == self.step - 1

    @property
    def is_over(self) -> bool:
        """Whether all gradients were finite at the latest check."""
        return self.last_step < self.checked_step


@dataclass(frozen=True, slots=True)
class LossScaleView:
    """The loss scale of a gradient scaler. If a gradient is not finite, the scaler skips the step and lowers the
    scale.

    `latest` is a number of updates: of the newest 64, the updates from the first decrease on. The first 32 updates of
    the program are never part of them.
    """

    scale: float
    updates: int
    falls: int  # number of updates that lowered the scale, since the start
    before: float  # scale before the `latest` updates
    latest: int
    latest_falls: int
    latest_rises: int


@dataclass(frozen=True, slots=True)
class GradientsView:
    """The known facts about the gradients of training steps. A field is None if the process has not reported it."""

    norm: GradientNormView | None
    fault: GradientFaultView | None
    loss_scale: LossScaleView | None


def gradients_view(record: SourceRecord, step: Node) -> GradientsView | None:
    """Return the gradients of the steps of the node `step`, or None if the process has reported nothing about
    them.
    """
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
    """Return the message of the type `kind` about the steps of the node `step`. They may be warm-up steps.

    A step node has a model's name only if the process runs several models.
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
