"""View of the gradients and the loss scale of training steps."""

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

    step: int  # number (from 1) of the optimizer's step that used these gradients
    norm: float
    p50: float  # median of the newest norms of the gradients
    max: float  # maximum of the newest norms of the gradients
    measured: int  # number of newest norms that are stored, at most 64
    # whether the norm is from "before" or "after" clipping; None if no clipping was seen
    clipping: str | None
    is_shard: bool  # whether this process has only parts of some gradients, because ranks share them


@dataclass(frozen=True, slots=True)
class GradientFaultView:
    """The first step with a NaN or Inf gradient.

    `parameter` is the parameter that got this gradient. It is the first one that the backward pass reached.
    """

    parameter: str | None  # name of the first such parameter that the backward pass reached; None if unknown
    kind: str  # NaN or Inf
    step: int
    finite_step: int | None  # last step before the fault with only finite gradients; None if unknown
    last_step: int  # number of the latest step with a NaN or Inf gradient
    checked_step: int  # number of the latest step with checked gradients
    faulty: int  # number of parameters with a NaN or Inf gradient in the step with the fault
    parameters: int  # number of parameters with any gradient in the step with the fault

    @property
    def is_certain(self) -> bool:
        """Whether all gradients are known to have been finite one step before the fault."""
        return self.finite_step == self.step - 1

    @property
    def is_over(self) -> bool:
        """Whether all gradients were finite at the last check."""
        return self.last_step < self.checked_step


@dataclass(frozen=True, slots=True)
class LossScaleView:
    """The loss scale of a gradient scaler.

    The scaler skips a step with a gradient that is not finite, and lowers the scale. `latest` counts the updates
    since the first decrease, among the newest 64. The program's first 32 updates never count.
    """

    scale: float
    updates: int
    falls: int  # number of updates that lowered the loss scale, since the start
    before: float  # the loss scale before the updates in `latest`
    latest: int
    latest_falls: int
    latest_rises: int


@dataclass(frozen=True, slots=True)
class GradientsView:
    """What is known about the gradients of training steps. None: the process has not reported it."""

    norm: GradientNormView | None
    fault: GradientFaultView | None
    loss_scale: LossScaleView | None


def gradients_view(record: SourceRecord, step: Node) -> GradientsView | None:
    """Return what the process has reported about gradients in the steps of the node `step`, or None."""
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
    """Return the message of the type `kind` about the steps of the node `step`, which may be warm-up steps.

    Only with several models does a step node have a model's name.
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
