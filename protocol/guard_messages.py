"""The messages about the guard. The guard looks for outputs of bricks with values that are not finite."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEPS = 1 << 53  # A message may report at most this many steps. Numbers up to this limit are exact in JSON.
# The state of the input of a brick; UNKNOWN if no tensor in it was checked.
FINITE, FAULTY, UNKNOWN = "finite", "faulty", "unknown"


@dataclass(frozen=True, slots=True)
class GuardFault:
    """The first fault that the guard found: the first brick with a faulty output, in the first faulty step.

    - `kind` is "NaN", "Inf" or "over the bound".
    - `brick` is the name of the brick, or "" if only the output of a whole layer was faulty.
    - `module` is the name of the brick's module, such as `layers.2.mlp.down_proj`.
    - `given` says whether the input of the brick was finite, faulty or unknown.
    - `inside`: if the input was faulty, the innermost layer or brick around this brick that had a finite input, or
      "".
    - `weight` is the brick's first weight that is not finite, or "" if all are finite.

    Each phase counts its steps from 1.
    """

    phase: str
    step: int
    kind: str
    brick: str
    module: str
    layer: int | None
    given: str
    last_step: int  # the latest faulty step of this phase
    inside: str = ""
    weight: str = ""
    file: str = ""  # path of the file with the saved inputs of the brick

    def __post_init__(self) -> None:
        if not 1 <= self.step <= self.last_step < MAX_STEPS:
            raise ValueError(f"a fault in the steps {self.step} to {self.last_step}")
        if self.given not in (FINITE, FAULTY, UNKNOWN):
            raise ValueError(f"an input that is {self.given!r}; expected {FINITE}, {FAULTY} or {UNKNOWN}")
        if self.layer is not None and not 0 <= self.layer < MAX_STEPS:
            raise ValueError(f"layer {self.layer}")


@dataclass(frozen=True, slots=True)
class GuardedSteps:
    """The number of checked steps of a model, and the first fault. A message replaces the previous one.

    `steps` is the number of all steps of the model, checked or not, or 0 if unknown.
    """

    model: str
    checked: int
    faulty: int = 0
    fault: GuardFault | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.faulty <= self.checked < MAX_STEPS or (self.fault is None) != (self.faulty == 0):
            raise ValueError(f"{self.model!r}: {self.faulty} of {self.checked} checked steps are faulty")
        if self.steps and not self.checked <= self.steps < MAX_STEPS:
            raise ValueError(f"{self.model!r}: {self.checked} of {self.steps} steps are checked")
