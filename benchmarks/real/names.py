"""Find the brick that a module belongs to, by the module's path and class.

The rules are only in this file and use no code of cbtop, so that they can check cbtop.
"""

from __future__ import annotations

import re

ATTENTION, FFN, NORM, OTHER = "Attention", "FFN", "Norm", "Other"
FUSED_ATTENTION = "Attention (fused)"
ATTENTION_REST, FEED_FORWARD_REST = "AttentionBlock", "FeedForwardBlock"

# Each row has a pattern that matches a name in a module's path, the brick, and its category. A module inside a
# projection, such as a LoRA adapter, belongs to the projection.
PROJECTIONS = (
    (r"(q|k|v|qkv)_proj|query|key|value|qkv", "QkvProjection", ATTENTION),
    (r"o_proj|out_proj|proj", "OutputProjection", ATTENTION),
    (r"gate_proj", "GateProjection", FFN),
    (r"gate_up_proj", "GateUpProjection", FFN),
    (r"up_proj|fc1", "UpProjection", FFN),
    (r"down_proj|fc2", "DownProjection", FFN),
    (r"lm_head|proj_out", "LmHead", OTHER),
)
CLASSES = (
    (r"RMSNorm", "RmsNorm", NORM),
    (r"LayerNorm", "LayerNorm", NORM),
    (r"GroupNorm", "GroupNorm", NORM),
    (r"Rotary", "RotaryTables", ATTENTION),
    (r"GELU|SiLU|Activation|SiluAndMul", "Activation", FFN),
    (r"Embedding$", "Embedding", OTHER),
    (r"^Attention$", FUSED_ATTENTION, ATTENTION),  # In vLLM, a module of this class runs a single kernel.
)
# In cbtop, these bricks are functions and not modules. The oracle, which only times modules, counts their time as
# part of the module named here.
INSIDE = {
    "RopeEmbedding": ATTENTION_REST,
    "KvWrite": ATTENTION_REST,
    "KvExpansion": ATTENTION_REST,
    "SplitHeads": ATTENTION_REST,
    "MergeHeads": ATTENTION_REST,
    "Attention (eager)": FUSED_ATTENTION,
}
# These bricks of cbtop are not inside any module that has a name here, so they are not compared.
BETWEEN_MODULES = frozenset({"AttentionMask", "GenerateInputs", "ResidualAdd", "Sampling"})
# These bricks of a training step are not compared, because they are not forward calls. The oracle only times calls of
# modules.
OF_TRAINING = frozenset({"DataWait", "Loss", "BackwardEnd", "GradientSync", "ClipGradients", "Optimizer", "ZeroGrad"})
NO_FORWARD = (" backward", " recompute")


def brick_of(path: str, class_name: str, is_leaf: bool) -> tuple[str, str] | None:
    """Return the brick and the category of a module. Returns None if the module's own time belongs to no brick."""
    parts = path.split(".")
    if is_leaf:
        for pattern, brick, category in CLASSES:
            if re.search(pattern, class_name):
                return brick, category
    if (bert := _of_bert(path)) is not None:
        return bert
    for part in reversed(parts):
        for pattern, brick, category in PROJECTIONS:
            if re.fullmatch(pattern, part):
                return brick, category
    if is_leaf:
        return class_name, OTHER
    if re.search(r"Attention$", class_name):
        return ATTENTION_REST, ATTENTION
    if re.search(r"MLP$|FeedForward$", class_name):
        return FEED_FORWARD_REST, FFN
    return None


def _of_bert(path: str) -> tuple[str, str] | None:
    if path.endswith("attention.output.dense"):
        return "OutputProjection", ATTENTION
    if path.endswith("intermediate.dense"):
        return "UpProjection", FFN
    if path.endswith("output.dense"):
        return "DownProjection", FFN
    return None
