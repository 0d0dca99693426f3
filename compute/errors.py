"""The exceptions that compute raises on purpose.

ComputeError
├── GuardError       a brick computed NaN, infinity or a wrong value; the message names the brick if it was found
├── NoTokenError     a logit of a pass is NaN or infinite, so that no logit is the largest
├── LossError        the loss of a training step is NaN or infinite
├── ContractError    a kernel's contract cannot be read; the message names the file and the fault
└── ModelError       a model file cannot be read or run; the message is one line for the user
    └── TensorTypeError   a tensor is of a type that is not supported
"""

from __future__ import annotations


class ComputeError(Exception):
    """The base class of the errors that compute raises on purpose."""


class ContractError(ComputeError):
    """The contract of a kernel is missing or invalid."""


class ModelError(ComputeError):
    """A model file is missing, damaged or not supported by this decoder."""


class TensorTypeError(ModelError):
    """A tensor of a model file is of a type that is not supported. `architecture` is the model's, or None."""

    def __init__(self, message: str, architecture: object) -> None:
        super().__init__(message)
        self.architecture = architecture


class NoTokenError(ComputeError):
    """A logit is NaN or infinite, so no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "no token can be chosen: a logit is NaN or infinite; the weights are damaged, or a number of the pass is "
            "more than what holds it: `cbtop demo --guard stop --model FILE` names the brick"
        )


class LossError(ComputeError):
    """The loss of training step number `step` is NaN or infinite."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(
            f"the loss is {loss} in training step {step}; the weights are damaged, or a number of the pass is too "
            "large: `cbtop demo --guard stop --model FILE` names the brick"
        )


class GuardError(ComputeError):
    """The guard has stopped a run because of the fault `met` in the output of `brick`.

    `layer` is None for a brick outside the layers. `brick` is None if the logits showed a fault, but no brick was
    faulty when the step ran again.
    """

    def __init__(self, brick: str | None, layer: int | None, position: int, met: str) -> None:
        where = "" if layer is None else f" in layer {layer}"
        what = _A.get(met, met)
        said = f"{brick}{where} computed {what} at position {position}"
        if brick is None:
            said = f"{what} was among the logits at position {position}, and no brick wrong as it ran again"
        super().__init__(f"{said}; the guard stopped the run")
        self.brick = brick
        self.layer = layer
        self.position = position
        self.met = met


_A = {
    "NaN": "a NaN",
    "infinity": "an infinity",
    "overflow": "an overflow",
    "divergence": "what its reference does not",
}
