"""Decides from a module's path and class which brick it is. The first matching rule in `RULES` decides.

This file does not use torch: a `Described` has all that the rules read. A module without children that matches no
rule becomes a brick with the name of its class. Names in the rules come from models of Hugging Face, Meta and vLLM.

A module with children that matches no rule
- Its own operations are those that `forward` runs outside of the calls of children. They are a brick with the name of
  the class (`own_kind`), also for layers. Own operations of modules around layers count as the model's.
- If kernels are recorded, this brick appears if it has kernels. If the host times calls, it appears if it takes
  LEAST_OWN_PERCENT of the phase's time (profiler/analysis/phase_totals.py). Otherwise its time counts for the layer,
  brick or step around it.
- A container (Sequential, ModuleList) runs nothing itself. The same is true for a subclass that inherits the
  `forward` of a container.
- AttentionBlock and FeedForwardBlock are the own operations of known modules, and keep their names. The host does not
  time small ones.
- All modules of one class are one row. If the class has the name of a known brick or of a class of torch.nn, "module"
  is added to the row's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from cbtop.protocol.vocabulary import BrickCategory, BrickId

# Names and categories of bricks that have no BrickId.
ALIBI_BIAS = "AlibiBias"
# The whole attention module. Its self time is spent outside of its inner bricks.
ATTENTION_BLOCK = "AttentionBlock"
ATTENTION_FUSED = "Attention (fused)"
ATTENTION_EAGER = "Attention (eager)"
ATTENTION_MASK = "AttentionMask"
KV_EXPANSION = "KvExpansion"
KV_WRITE = "KvWrite"
# The whole feed-forward network. Its self time is mostly the product gate * up.
FEED_FORWARD_BLOCK = "FeedForwardBlock"
GATE_UP_PROJECTION = "GateUpProjection"
GENERATE_INPUTS = "GenerateInputs"
MERGE_HEADS = "MergeHeads"
MIXER = "Mixer"
MOE_EXPERTS = "MoeExperts"
MOE_ROUTER = "MoeRouter"
MULTIHEAD_ATTENTION = "MultiheadAttention"  # torch's own attention module, which does not call its parts
RESIDUAL_ADD = "ResidualAdd"
ROTARY_TABLES = "RotaryTables"
SPLIT_HEADS = "SplitHeads"
CATEGORIES = {
    ALIBI_BIAS: BrickCategory.ATTENTION,
    ATTENTION_BLOCK: BrickCategory.ATTENTION,
    ATTENTION_FUSED: BrickCategory.ATTENTION,
    ATTENTION_EAGER: BrickCategory.ATTENTION,
    ATTENTION_MASK: BrickCategory.ATTENTION,
    KV_EXPANSION: BrickCategory.ATTENTION,
    KV_WRITE: BrickCategory.ATTENTION,
    FEED_FORWARD_BLOCK: BrickCategory.FFN,
    GATE_UP_PROJECTION: BrickCategory.FFN,
    GENERATE_INPUTS: BrickCategory.OTHER,
    MERGE_HEADS: BrickCategory.ATTENTION,
    MIXER: BrickCategory.OTHER,
    MOE_EXPERTS: BrickCategory.FFN,
    MOE_ROUTER: BrickCategory.FFN,
    MULTIHEAD_ATTENTION: BrickCategory.ATTENTION,
    RESIDUAL_ADD: BrickCategory.OTHER,
    ROTARY_TABLES: BrickCategory.ATTENTION,
    SPLIT_HEADS: BrickCategory.ATTENTION,
}
# Bricks that contain other bricks. If a device times them, their self time is mostly the time of Python code.
BLOCKS = frozenset({ATTENTION_BLOCK, FEED_FORWARD_BLOCK})
# Names of known bricks and of the parts of a training step. A class with such a name gets a different one as a brick.
KNOWN_NAMES = frozenset(CATEGORIES) | {brick.display_name for brick in BrickId}
KNOWN_NAMES |= {"BackwardEnd", "GradientSync", "Loop", "Loss", "Optimizer"}


@dataclass(frozen=True, slots=True)
class Described:
    """A module as the rules see it, without torch.

    `path` is the module's name in the model (`model.layers.3.self_attn.q_proj`). `classes` are the class names of the
    module and the modules around it, innermost first. `siblings` are the names of the other modules in its parent.
    `holds` has the names of its children.
    """

    path: str
    classes: tuple[str, ...]
    siblings: frozenset[str] = frozenset()
    holds: frozenset[str] = frozenset()
    in_layer: bool = True
    gives_vocabulary: bool = False  # whether the module's weight has as many rows as the vocabulary

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_leaf(self) -> bool:
        return not self.holds

    @property
    def lies_in(self) -> str:
        """The path of the module's parent in the model."""
        return self.path.rpartition(".")[0]

    @property
    def in_attention(self) -> bool:
        """Whether the module's parent is attention or a part of attention (BERT's `attention.output`)."""
        near = self.lies_in.split(".")[-2:]
        named = any([_ATTENTION_NAME.search(part) for part in near]) and not _FEED_FORWARD.search(near[-1])
        return not self.in_mixer and (named or (len(self.classes) > 1 and "Attention" in self.classes[1]))

    @property
    def in_mixer(self) -> bool:
        return any([_MIXER.search(name) for name in self.classes[1:3]])


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """The brick of a module: its `BrickId` or its name, and whether the modules inside it are bricks, too."""

    brick: BrickId | str
    shows_inside: bool = False
    is_own: bool = False  # whether the brick is only the module's own operations

    @property
    def name(self) -> str:
        return self.brick.display_name if isinstance(self.brick, BrickId) else self.brick

    @property
    def category(self) -> BrickCategory:
        if isinstance(self.brick, BrickId):
            return self.brick.category
        known = CATEGORIES.get(self.brick)
        if known is not None:
            return known
        return BrickCategory.NORM if "Norm" in self.brick else BrickCategory.OTHER


_ATTENTION_NAME = re.compile(r"att(entio)?n|Attention", re.IGNORECASE)
_FEED_FORWARD_CLASS = re.compile(r"(MLP|Mlp|FeedForward|FFN|ActDense)$")
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward|^ff$", re.IGNORECASE)
# Names of the linear layers for queries, keys and values in an attention module.
_QKV = (
    r"(q|k|v|kv|qkv)_proj|(q|k|v|kv)_[ab]_proj(_with_mqa)?"
    r"|c_attn|q_attn|query_key_value|W?qkv|in_proj|fused_qkv_a_proj(_with_mqa)?|qkv_linear"
    r"|q|k|v|w[qkv]|W[qkv]|[qkv]_lin|to_(q|k|v|kv|qkv)|query|key|value|(query|key|value)_proj"
)
_MIXER = re.compile(r"(Mixer\d*|Mamba\d*|DeltaNet|ShortConv|RecurrentBlock|Rwkv\w*Attention)$")
# In T5 and its descendants, the class "LayerNorm" subtracts no mean and adds no bias, so it is an RMS norm.
_RMS_NORM = re.compile(
    r"RMS_?Norm|(^|M|m|U)T5LayerNorm|(LongT5|Pop2Piano|SwitchTransformers|Udop|Pix2Struct)LayerNorm"
)
_ACTIVATION = re.compile(
    r"^\w*(SiLU|Silu|GELU|Gelu|GeLU|ReLU\d*|ReLUSquared\w*|Sigmoid|Tanh|SwiGLU|GELUTanh|Mish|ELU|AndMul)(Activation)?$"
)

Rule = Callable[[Described], bool]


def _path(pattern: str, *also: Rule) -> Rule:
    """Return a rule for modules inside a layer. It matches if the last part of the path matches `pattern`."""
    compiled = re.compile(rf"({pattern})$")
    return lambda it: it.in_layer and compiled.match(it.name) is not None and all([rule(it) for rule in also])


def _class(pattern: str | re.Pattern[str], *also: Rule) -> Rule:
    compiled = re.compile(pattern)
    return lambda it: compiled.search(it.classes[0]) is not None and all([rule(it) for rule in also])


def _in_attention(it: Described) -> bool:
    return it.in_attention


def _in_feed_forward(it: Described) -> bool:
    return not it.in_attention and not it.in_mixer


def _beside(*names: str) -> Rule:
    return lambda it: all([name in it.siblings for name in names])


def _not_beside(*names: str) -> Rule:
    return lambda it: not any([name in it.siblings for name in names])


def _leaf(it: Described) -> bool:
    return it.is_leaf


def _product(it: Described) -> bool:
    """Return whether the module may multiply by a weight: its class is not a norm, an activation or an embedding."""
    name = it.classes[0]
    return not (_RMS_NORM.search(name) or "Norm" in name or _ACTIVATION.match(name) or "Embedding" in name)


def _linear(it: Described) -> bool:
    return it.classes[0].endswith("Linear")


def _in_sequence_of_feed_forward(it: Described) -> bool:
    """Whether the module's parent is a Sequential named like `mlp`, or a Sequential in a feed-forward class."""
    if it.in_attention or it.classes[1:2] != ("Sequential",):
        return False
    named = _FEED_FORWARD.search(it.lies_in.rpartition(".")[2]) is not None
    return named or (len(it.classes) > 2 and _FEED_FORWARD_CLASS.search(it.classes[2]) is not None)


def _holds_qkv(it: Described) -> bool:
    return any([re.fullmatch(_QKV, name) for name in it.holds])


def _one_of_experts(it: Described) -> bool:
    return it.in_layer and re.search(r"(^|\.)(\w*_)?experts\.\d+$", it.path) is not None


def _outside(it: Described) -> bool:
    return not it.in_layer


RULES: tuple[tuple[Rule, ModuleKind], ...] = (
    # The rules for experts come first, so that no other rule matches the parts of experts.
    (_one_of_experts, ModuleKind(MOE_EXPERTS)),
    (_path("experts", lambda it: it.classes[0] != "ModuleList"), ModuleKind(MOE_EXPERTS)),
    (_path("router"), ModuleKind(MOE_ROUTER)),
    (_path("gate", _beside("experts")), ModuleKind(MOE_ROUTER)),
    (_class("Router$", lambda it: it.in_layer), ModuleKind(MOE_ROUTER)),
    (_path("topk", _beside("experts")), ModuleKind(MOE_ROUTER)),  # SGLang
    # A mixer (of a state-space model) takes the place of attention.
    (_class(_MIXER, lambda it: it.in_layer and not it.is_leaf), ModuleKind(MIXER, shows_inside=True)),
    # Attention. The attention modules of vLLM and SGLang are single kernels inside the model's own attention module.
    (_path("attn", lambda it: it.classes[0] == "Attention", _in_attention), ModuleKind(ATTENTION_FUSED)),
    (_class(r"^(MLA|Radix|EncoderOnly|ChunkedLocal)Attention$", _in_attention), ModuleKind(ATTENTION_FUSED)),
    (_class("Attention", _holds_qkv, lambda it: it.in_layer), ModuleKind(ATTENTION_BLOCK, shows_inside=True)),
    (_path(_QKV, _product, _in_attention), ModuleKind(BrickId.QKV_PROJECTION)),
    (
        _path(
            r"o_proj|out_proj|c_proj|dense|o|wo|Wo|out_lin|to_out|output_proj|proj",
            _product,
            _in_attention,
            lambda it: not _FEED_FORWARD.search(it.lies_in.rpartition(".")[2]),
        ),
        ModuleKind(BrickId.OUTPUT_PROJECTION),
    ),
    # The feed-forward network.
    (
        _class(_FEED_FORWARD_CLASS, _in_feed_forward, lambda it: it.in_layer and not it.is_leaf),
        ModuleKind(FEED_FORWARD_BLOCK, shows_inside=True),
    ),
    (_path("gate_up_proj|w13|Wi|gate_up", _product, _in_feed_forward), ModuleKind(GATE_UP_PROJECTION)),
    (_path("gate_proj|wi_0", _product, _in_feed_forward), ModuleKind(BrickId.GATE_PROJECTION)),
    (_path("w1", _product, _in_feed_forward, _beside("w3")), ModuleKind(BrickId.GATE_PROJECTION)),
    (_path("gate", _product, _in_feed_forward, _beside("up", "down")), ModuleKind(BrickId.GATE_PROJECTION)),
    (
        _path("up_proj|w3|fc1|c_fc|dense_h_to_4h|fc_in|wi|wi_1|lin1", _product, _in_feed_forward),
        ModuleKind(BrickId.UP_PROJECTION),
    ),
    (_path("w1", _product, _in_feed_forward, _beside("w2"), _not_beside("w3")), ModuleKind(BrickId.UP_PROJECTION)),
    (_path("up", _product, _in_feed_forward, _beside("down")), ModuleKind(BrickId.UP_PROJECTION)),
    (
        _path("dense", _product, lambda it: it.lies_in.endswith("intermediate")),
        ModuleKind(BrickId.UP_PROJECTION),
    ),
    (
        _path("down_proj|w2|fc2|c_proj|dense_4h_to_h|fc_out|wo|Wo|lin2", _product, _in_feed_forward),
        ModuleKind(BrickId.DOWN_PROJECTION),
    ),
    (_path("down", _product, _in_feed_forward, _beside("up")), ModuleKind(BrickId.DOWN_PROJECTION)),
    (
        _path("dense", _product, _in_feed_forward, lambda it: it.lies_in.endswith(".output")),
        ModuleKind(BrickId.DOWN_PROJECTION),
    ),
    # The feed-forward network inside torch's own encoder and decoder layers.
    (_path("linear1", _product, _beside("linear2")), ModuleKind(BrickId.UP_PROJECTION)),
    (_path("linear2", _product, _beside("linear1")), ModuleKind(BrickId.DOWN_PROJECTION)),
    # A feed-forward network that is a Sequential. Its first linear layer may follow a norm.
    (_path("[01]", _linear, _in_sequence_of_feed_forward), ModuleKind(BrickId.UP_PROJECTION)),
    (_path(r"\d+", _linear, _in_sequence_of_feed_forward), ModuleKind(BrickId.DOWN_PROJECTION)),
    # Rotary position. Inside a layer, the module rotates queries and keys. Outside of layers, the module makes the
    # tables for the rotation.
    (_class(r"Rotary|RoPE", _leaf, lambda it: it.in_layer), ModuleKind(BrickId.ROPE_EMBEDDING)),
    (_class(r"Rotary|RoPE", _leaf, _outside), ModuleKind(ROTARY_TABLES)),
    # The head of the model, which returns logits.
    (lambda it: it.gives_vocabulary and not it.in_layer, ModuleKind(BrickId.LM_HEAD)),
    (
        lambda it: (
            not it.in_layer
            and it.is_leaf
            and re.match(r"(lm_head|embed_out)$", it.name) is not None
            and "Norm" not in it.classes[0]
        ),
        ModuleKind(BrickId.LM_HEAD),
    ),
    # vLLM and SGLang do not call the head. Their LogitsProcessor multiplies by the head's weights.
    (_class(r"^LogitsProcessor(WithLoRA)?$", _outside), ModuleKind(BrickId.LM_HEAD)),
    (_class(r"^VocabParallelEmbeddingWithLoRA$", _outside), ModuleKind(BrickId.EMBEDDING)),  # vLLM with adapters
    # The rules from here on look only at the class of a module.
    (_class(_RMS_NORM), ModuleKind(BrickId.RMS_NORM)),
    (_class(r"LayerNorm"), ModuleKind(BrickId.LAYER_NORM)),
    (_class(r"Embedding$", _leaf), ModuleKind(BrickId.EMBEDDING)),
    (_class(_ACTIVATION, _leaf), ModuleKind(BrickId.ACTIVATION)),
)

# The first set has classes of modules that are never called. The second has classes that never call their children.
# The third has the one child of a layer of torch's eager quantisation, which holds the weight.
_NEVER_CALLED = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})
_RUNS_AS_ONE = frozenset({MULTIHEAD_ATTENTION})
_PACKED_WEIGHT = frozenset({"_packed_params"})


def classify(it: Described) -> ModuleKind | None:
    """Return the kind of the module `it`. Returns None for a container, because its children are classified
    instead.
    """
    if it.classes[0] in _NEVER_CALLED:
        return None
    for matches, kind in RULES:
        if matches(it):
            return kind
    runs_as_one = it.is_leaf or it.classes[0] in _RUNS_AS_ONE or it.holds == _PACKED_WEIGHT
    return ModuleKind(it.classes[0]) if runs_as_one else None


def own_kind(class_name: str, *, is_taken: bool = False) -> ModuleKind:
    """Return the kind of a module with children that becomes a brick of its own operations.

    `is_taken` says that a class of torch has this name.
    """
    name = f"{class_name} module" if is_taken or class_name in KNOWN_NAMES else class_name
    return ModuleKind(name, shows_inside=True, is_own=True)
