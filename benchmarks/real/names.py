"""Name the brick of a module by its path and class. The rules are of this file alone and use none of cbtop's code."""

from __future__ import annotations

import re

ATTENTION, FFN, NORM, OTHER = "Attention", "FFN", "Norm", "Other"
FUSED_ATTENTION = "Attention (fused)"
ATTENTION_REST, FEED_FORWARD_REST = "AttentionBlock", "FeedForwardBlock"

# The last name of a path, the brick, its category. A module inside a projection (a LoRA adapter) belongs to it.
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
    (r"Rotary", "RotaryTables", ATTENTION),
    (r"GELU|SiLU|Activation|SiluAndMul", "Activation", FFN),
    (r"Embedding$", "Embedding", OTHER),
    (r"^Attention$", FUSED_ATTENTION, ATTENTION),  # vLLM's, which is one kernel
)
# These bricks of cbtop are functions. The oracle finds their time in this module.
INSIDE = {
    "RopeEmbedding": ATTENTION_REST,
    "KvWrite": ATTENTION_REST,
    "KvExpansion": ATTENTION_REST,
    "SplitHeads": ATTENTION_REST,
    "MergeHeads": ATTENTION_REST,
    "Attention (eager)": FUSED_ATTENTION,
}
# These bricks of cbtop are in no module that has a name here, so they are not compared.
BETWEEN_MODULES = frozenset({"AttentionMask", "GenerateInputs", "ResidualAdd", "Sampling"})


def brick_of(path: str, class_name: str, is_leaf: bool) -> tuple[str, str] | None:
    """Return brick and category of a module, or None if its own time belongs to none."""
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
