"""Table of the decoder's bricks: the name of each brick and the assertions on its output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cbtop.compute.checks import Assertion, IsEquivalent, IsFinite
from cbtop.protocol.vocabulary import BACKWARD, BrickCategory, BrickId

# These tolerances are larger than the contracts' tolerances, which are for the contracts' own examples. In the demo's
# model, the biases of the keys move all scores near 100. Float32 rounding alone then changes attention by 9.3e-6, and
# the contract allows 1e-5. A product of a few thousand float32 terms changes by about 1e-6 of the largest output if
# its terms are added in a different order.
PRODUCT = IsEquivalent(5e-5)
ELEMENTWISE = IsEquivalent(1e-5)
EXACT = IsEquivalent(0.0)
# Tolerance if softmax weights are rounded to bfloat16, which changes each weight by at most 2^-9 of its value.
ROUNDED = IsEquivalent(4e-3)


@dataclass(frozen=True, slots=True)
class BrickSpec:
    """One row of the table of bricks. `brick` is None if the profiler has no BrickId for the brick, which then has
    only a name.
    """

    name: str
    category: BrickCategory
    assertions: tuple[Assertion, ...]
    brick: BrickId | None = None

    @classmethod
    def of(cls, brick: BrickId, *assertions: Assertion) -> BrickSpec:
        return cls(brick.display_name, brick.category, assertions, brick)


EMBEDDING = BrickSpec.of(BrickId.EMBEDDING, IsFinite(), ELEMENTWISE)
RMS_NORM = BrickSpec.of(BrickId.RMS_NORM, IsFinite(), ELEMENTWISE)
LAYER_NORM = BrickSpec.of(BrickId.LAYER_NORM, IsFinite(), ELEMENTWISE)
QKV_PROJECTION = BrickSpec.of(BrickId.QKV_PROJECTION, IsFinite(), PRODUCT)
ROPE_EMBEDDING = BrickSpec.of(BrickId.ROPE_EMBEDDING, IsFinite(), ELEMENTWISE)
KV_WRITE = BrickSpec("KvWrite", BrickCategory.ATTENTION, (IsFinite(), EXACT))
ATTENTION = BrickSpec("Attention (fused)", BrickCategory.ATTENTION, (IsFinite(), PRODUCT))
ATTENTION_BF16 = replace(ATTENTION, assertions=(IsFinite(), ROUNDED))
OUTPUT_PROJECTION = BrickSpec.of(BrickId.OUTPUT_PROJECTION, IsFinite(), PRODUCT)
RESIDUAL_ADD = BrickSpec("ResidualAdd", BrickCategory.OTHER, (IsFinite(), ELEMENTWISE))
ADD_RMS_NORM = BrickSpec("AddRmsNorm (fused)", BrickCategory.NORM, (IsFinite(), ELEMENTWISE))
GATE_PROJECTION = BrickSpec.of(BrickId.GATE_PROJECTION, IsFinite(), PRODUCT)
UP_PROJECTION = BrickSpec.of(BrickId.UP_PROJECTION, IsFinite(), PRODUCT)
ACTIVATION = BrickSpec.of(BrickId.ACTIVATION, IsFinite(), ELEMENTWISE)
GATED = BrickSpec("GateUpActivation (fused)", BrickCategory.FFN, (IsFinite(), PRODUCT))
DOWN_PROJECTION = BrickSpec.of(BrickId.DOWN_PROJECTION, IsFinite(), PRODUCT)
# The bricks of a mixture of experts. The profiler uses the same names for other programs
# (profiler/instrument/classification.py).
MOE_ROUTER = BrickSpec("MoeRouter", BrickCategory.FFN, (IsFinite(), PRODUCT))
MOE_EXPERTS = BrickSpec("MoeExperts", BrickCategory.FFN, (IsFinite(), PRODUCT))
MOE_COMBINE = BrickSpec("MoeCombine", BrickCategory.FFN, (IsFinite(), ELEMENTWISE))
LM_HEAD = BrickSpec.of(BrickId.LM_HEAD, IsFinite(), PRODUCT)
SOFT_CAP = BrickSpec("SoftCap", BrickCategory.OTHER, (IsFinite(), ELEMENTWISE))
SAMPLING = BrickSpec.of(BrickId.SAMPLING, EXACT)
LORA = BrickSpec("Lora", BrickCategory.ATTENTION, (IsFinite(), PRODUCT))
LOSS = BrickSpec("Loss", BrickCategory.OTHER, (IsFinite(), ELEMENTWISE))
OPTIMIZER = BrickSpec("Optimizer", BrickCategory.OTHER, (IsFinite(), ELEMENTWISE))
# Exchanges between ranks compute nothing. They have the names that the profiler gives to torch's exchanges
# (profiler/instrument/collectives.py).
SEND = BrickSpec("Send", BrickCategory.COMMUNICATION, ())
RECV = BrickSpec("Recv", BrickCategory.COMMUNICATION, ())
BROADCAST = BrickSpec("Broadcast", BrickCategory.COMMUNICATION, ())
ALL_REDUCE = BrickSpec("AllReduce", BrickCategory.COMMUNICATION, ())

# All bricks of one token's pass, in the order of execution.
BRICKS: tuple[BrickSpec, ...] = (
    EMBEDDING,
    RMS_NORM,
    LAYER_NORM,
    QKV_PROJECTION,
    ROPE_EMBEDDING,
    KV_WRITE,
    ATTENTION,
    OUTPUT_PROJECTION,
    RESIDUAL_ADD,
    ADD_RMS_NORM,
    GATE_PROJECTION,
    UP_PROJECTION,
    ACTIVATION,
    GATED,
    DOWN_PROJECTION,
    MOE_ROUTER,
    MOE_EXPERTS,
    MOE_COMBINE,
    LM_HEAD,
    SOFT_CAP,
    SAMPLING,
)


def backward_of(spec: BrickSpec) -> BrickSpec:
    """Return the row of the brick that computes the gradients of `spec`."""
    return BrickSpec(spec.name + BACKWARD, spec.category, (IsFinite(), PRODUCT))


# All bricks that only a training step has. Gradients do not pass through a mixture of experts, soft caps or sampling.
# The sum of a residual stream needs no backward brick, because its gradient is passed on unchanged.
TRAINING_BRICKS: tuple[BrickSpec, ...] = (
    LORA,
    LOSS,
    *(
        backward_of(spec)
        for spec in (
            RMS_NORM,
            LAYER_NORM,
            ADD_RMS_NORM,
            QKV_PROJECTION,
            LORA,
            ROPE_EMBEDDING,
            ATTENTION,
            OUTPUT_PROJECTION,
            GATE_PROJECTION,
            UP_PROJECTION,
            ACTIVATION,
            GATED,
            DOWN_PROJECTION,
            LM_HEAD,
            LOSS,
        )
    ),
    OPTIMIZER,
)
