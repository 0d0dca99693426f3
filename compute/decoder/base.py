"""The sizes and the weights of a decoder, and the code that reads them from the files of each architecture family."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.errors import ModelError, TensorTypeError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.kernels.activation import Activation
from cbtop.compute.kernels.rope import angle_table
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import Matrix

# Limits of metadata. They exceed every model that runs on one machine. Larger values could overflow the size of a
# buffer.
MAX_LAYERS = 1_000
MAX_HIDDEN = 1 << 17
MAX_HEADS = 1_024
MAX_CONTEXT = 1 << 24
MAX_EXPERTS = 4_096
SOFTMAX_GATING = 1  # llama.cpp's LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX

# Keys that do not change what a decoder computes. Some keys only describe the model, or repeat what the tensors show
# (such as whether the halves of a layer are parallel). Some matter only together with keys that are refused or off
# (such as the number of used experts). Keys with a prefix in OF_IMAGES are ignored, too, because they describe
# tensors in other files.
DESCRIBING = frozenset(
    {
        "vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned",
        "attention.sliding_window_pattern", "expert_used_count", "use_parallel_residual",
    }
)  # fmt: skip

OF_IMAGES = "vision.", "mm."
TENSORS_OF_IMAGES = "v.", "mm."
SCALES_OF_MATRICES = ".scale", ".input_scale"  # the ends of names that llama.cpp gives to scales of NVFP4 matrices

# Shortest range of pairs over which YaRN's scaling changes gradually. The value is from ggml's rope_yarn_ramp.
YARN_SHORTEST_RAMP = 0.001
# Defaults of YaRN's settings beta_fast and beta_slow. llama.cpp uses the same values, and the paper suggests them for
# Llama.
YARN_TURNS = 32.0, 1.0

RopeLayout = Literal["normal", "neox"]


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture family: its name in `general.architecture` of GGUF files, and how it differs from other
    families.

    - `qkv_bias`: whether the three attention projections must have biases. Other biases are read if the file has
      them.
    - `layer_norm`: whether norms are LayerNorms with biases. Otherwise they are RMSNorms.
    - `qk_norm`: whether each head of queries and keys is normalised before it rotates.
    - `experts`: whether the feed-forward network may be a mixture of experts.
    - `fused`: whether queries, keys and values are rows of one tensor (`attn_qkv`), and gate and up rows of another
      (`ffn_up`).
    - `activation`: the activation of the feed-forward network's gate.
    - `post_norms`: whether the output of a half layer is normalised before it is added.
    - `scales_embedding`: whether embeddings are multiplied by the square root of the hidden size.
    - `attention_cap`, `logit_cap`: caps of scores and logits if the file does not contain a cap. 0: no cap. None:
      files of this family have no key for the cap.
    - `window_period`: every `window_period`-th layer sees all positions, and the other layers have a sliding window.
      0: all layers have a window. None: no layer has one, and a context ends at the window's size.
    - `window`: the size of the window if the file has none.
    - `sliding_rope_base`: the RoPE base of layers with a sliding window, if the file has none. Positions in these
      layers are not scaled. None: these layers rotate like the other layers.
    - `layers_scaled_by_hidden`: a model with this number of layers scales scores by hidden / heads, not by head_dim.
    """

    architecture: str
    rope_layout: RopeLayout
    qkv_bias: bool
    layer_norm: bool = False
    qk_norm: bool = False
    experts: bool = False
    fused: bool = False
    activation: Activation = "silu"
    post_norms: bool = False
    scales_embedding: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    window_period: int | None = None
    window: int = 0
    sliding_rope_base: float | None = None
    layers_scaled_by_hidden: int = 0


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight matrix and its bias, float32 (rows,). The bias is empty if the projection has none."""

    weight: Matrix
    bias: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Norm:
    """The weights of an RMSNorm, float32 (columns,), or of a LayerNorm if there is a bias."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class Experts:
    """The settings of a mixture of experts.

    Each token uses `used` of the `count` experts: the ones with the largest router logits.

    The weights of the used experts are `scale` times a softmax. If `normalised`, the softmax is over the used
    experts, otherwise over all experts.
    """

    count: int
    used: int
    normalised: bool
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one transformer layer.

    In a mixture, `gate`, `up` and `down` hold the rows of all experts, one expert after the other.
    """

    attention_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None  # weights of the norm of each head, (head_dim,); None if queries and keys are not normalised
    k_norm: Norm | None
    output: Projection
    # Weights of the norm after each half of the layer; None if the output of that half is not normalised.
    attention_post_norm: Norm | None
    ffn_norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    router: Projection | None  # the router's weights (experts, hidden); None without experts
    ffn_post_norm: Norm | None
    slides: bool  # whether a token sees only the positions in the model's window


@dataclass(frozen=True, slots=True)
class Rope:
    """The RoPE settings.

    `dimensions` dimensions of each head are rotated. The frequencies are divided by `short_factors` or
    `long_factors`.

    Rotated values are also multiplied by `magnitude`. `magnitude` is llama.cpp's `attn_factor` times a factor that
    YaRN computes from the scale.
    """

    layout: RopeLayout
    dimensions: int
    base: float
    scale: float
    magnitude: float
    # Factors of the frequencies if the context is at most `original_context`.
    short_factors: NDArray[np.float32] | None
    # Factors of the frequencies if the context is longer (LongRoPE, Ding et al. 2024).
    long_factors: NDArray[np.float32] | None
    original_context: int
    extrapolation: float  # YaRN: how much of a fast pair's frequency is not scaled, as a share; 0 without YaRN
    # YaRN: limits in turns over the original context. A pair of dimensions with more turns than the first limit is
    # fast. A pair with fewer turns than the second limit is slow.
    turns: tuple[float, float]

    def table(self, context: int) -> NDArray[np.float32]:
        """Return the cosines and sines of all positions of a context, multiplied by the magnitude.

        They have the layout of `angle_table`.
        """
        table = angle_table(context, self._frequencies(context))
        table *= np.float32(self.magnitude)
        return table

    def _frequencies(self, context: int) -> NDArray[np.float64]:
        """Return how many radians each pair of dimensions rotates per position, float64 (pairs,).

        YaRN follows Peng et al. 2023, section 3.2, with whole pairs as in ggml.
        """
        unscaled = self.base ** (-np.arange(0, self.dimensions, 2, dtype=np.float64) / self.dimensions)
        factors = self.long_factors if context > self.original_context else self.short_factors
        if factors is not None:
            unscaled = unscaled / factors
        if not self.extrapolation:
            return self.scale * unscaled
        fast, slow = (
            self.dimensions * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in self.turns
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), self.dimensions - 1)
        ramp = (np.arange(self.dimensions // 2) - first) / max(last - first, YARN_SHORTEST_RAMP)
        kept = self.extrapolation * (1 - np.clip(ramp, 0, 1))
        frequencies: NDArray[np.float64] = unscaled * (self.scale * (1 - kept) + kept)
        return frequencies


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes and weights of a decoder."""

    name: str
    architecture: str
    quantization: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    context_length: int
    # Number of positions that a token sees in layers with a sliding window, including its own; 0: all positions.
    window: int
    epsilon: float
    rope: Rope
    # RoPE of layers with a sliding window; the same object as `rope` if all layers have the same RoPE.
    sliding_rope: Rope
    activation: Activation
    embedding_scale: float
    attention_scale: float
    attention_cap: float  # soft cap of the attention scores (limit of their magnitude); 0: none
    logit_cap: float
    experts: Experts | None
    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: Matrix
    parameters: int
    weights_bytes: int
    # The index of `layers[0]` in the whole model; it is not 0 if other ranks have earlier layers.
    first_layer: int = 0


def read_model(path: Path, families: dict[str, Family]) -> Model:
    """Read the model in the GGUF file at `path`. Raises ModelError if no family in `families` can run it."""
    try:
        opened = GgufFile.open(path)
    except TensorTypeError as error:
        # If no family can run the model, its files with other types cannot help.
        if isinstance(error.architecture, str):
            _check_architecture(path, error.architecture, families)
        raise
    with opened as file:
        architecture = file.metadata.text("general.architecture")
        _check_architecture(path, architecture, families)
        model = _FamilyReader(file, families[architecture]).model()
        file.load()
    return model


def _check_architecture(path: Path, architecture: str, families: dict[str, Family]) -> None:
    if architecture not in families:
        raise ModelError(
            f"{path} is of architecture {architecture[:60]!r}; supported are {', '.join(families)}: "
            "give a model of one of these"
        )


class _FamilyReader:
    """Reads the weights and sizes from one file, by the rules of one family."""

    def __init__(self, file: GgufFile, family: Family) -> None:
        self._file = file
        self._family = family
        prefix = self._prefix = family.architecture
        self._layers = layers = file.metadata.integer(f"{prefix}.block_count", MAX_LAYERS)
        self._hidden = file.metadata.integer(f"{prefix}.embedding_length", MAX_HIDDEN)
        self._heads = file.metadata.integer_of_all(f"{prefix}.attention.head_count", MAX_HEADS, layers)
        self._kv_heads = file.metadata.integer_of_all(
            f"{prefix}.attention.head_count_kv", MAX_HEADS, layers, default=self._heads
        )
        default_dim = max(self._hidden // self._heads, 1)
        self._head_dim = file.metadata.integer(f"{prefix}.attention.key_length", MAX_HIDDEN, default=default_dim)
        self._feed_forward = file.metadata.integer_of_all(f"{prefix}.feed_forward_length", MAX_HIDDEN, layers)
        self._experts = self._mixture()
        if self._experts is not None:
            self._feed_forward = file.metadata.integer_of_all(
                f"{prefix}.expert_feed_forward_length", MAX_HIDDEN, layers, default=self._feed_forward
            )
        norm = "layer_norm" if family.layer_norm else "layer_norm_rms"
        self._epsilon = file.metadata.number(f"{prefix}.attention.{norm}_epsilon")
        self._context_length = self._trained_context = file.metadata.integer(f"{prefix}.context_length", MAX_CONTEXT)
        key, least = f"{prefix}.attention.sliding_window", min(family.window, 1)
        self._window = window = file.metadata.integer(key, MAX_CONTEXT, default=family.window, least=least)
        self._slides = self._sliding_layers() if window else (False,) * layers
        if window and family.window_period is None:
            # A context that is not longer than the window needs no sliding layers, because every layer sees all
            # positions.
            self._window, self._context_length = 0, min(self._context_length, window)

    def model(self) -> Model:
        file, prefix, hidden = self._file, self._prefix, self._hidden
        rope = self._rope()
        sliding_rope = self._sliding_rope(rope)
        attention_cap = self._cap("attn_logit_softcapping", self._family.attention_cap)
        logit_cap = self._cap("final_logit_softcapping", self._family.logit_cap)
        is_by_hidden = self._layers == self._family.layers_scaled_by_hidden
        self._refuse_what_would_be_ignored()
        vocabulary = file.rows_of("token_embd.weight")
        embedding = file.matrix("token_embd.weight", vocabulary, hidden)
        # A file without an output matrix has tied embeddings. The embedding is then also the output matrix.
        tied = not file.has_tensor("output.weight")
        model = Model(
            name=file.metadata.text("general.name", default=file.path.stem),
            architecture=prefix,
            quantization=self._quantization(),
            hidden=hidden,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            feed_forward=self._feed_forward,
            vocabulary=vocabulary,
            context_length=self._context_length,
            window=self._window,
            epsilon=self._epsilon,
            rope=rope,
            sliding_rope=sliding_rope,
            activation=self._family.activation,
            embedding_scale=math.sqrt(hidden) if self._family.scales_embedding else 1.0,
            attention_scale=(hidden // self._heads if is_by_hidden else self._head_dim) ** -0.5,
            attention_cap=attention_cap,
            logit_cap=logit_cap,
            experts=self._experts,
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(self._layers)),
            final_norm=self._norm("output_norm", hidden),
            lm_head=embedding if tied else file.matrix("output.weight", vocabulary, hidden),
            parameters=file.elements(),
            weights_bytes=file.size_bytes(),
        )
        untaken = file.untaken_tensors()
        if untaken and all(name.startswith(TENSORS_OF_IMAGES) for name in untaken):
            raise ModelError(
                f"{file.path} also reads images ({untaken[0]!r} and {len(untaken) - 1} more tensors), which is not "
                "supported; give a file of its text model alone, as llama.cpp's convert_hf_to_gguf.py writes it"
            )
        if untaken and all(name.endswith(SCALES_OF_MATRICES) for name in untaken):
            raise ModelError(
                f"{file.path} has a scale for each whole matrix ({untaken[0]!r} and {len(untaken) - 1} more), as "
                "NVFP4 checkpoints have, which is not supported; give a file made of the model's BF16 weights"
            )
        if untaken:
            raise ModelError(
                f"{file.path} has tensors that a {prefix} decoder would ignore ({untaken[0]!r} and "
                f"{len(untaken) - 1} more); its results would be wrong: give a plain {prefix} model"
            )
        return model

    def _refuse_what_would_be_ignored(self) -> None:
        file, prefix = self._file, self._prefix
        if self._heads % self._kv_heads:
            raise ModelError(
                f"{file.path} has {self._heads} heads for {self._kv_heads} key/value heads; "
                "a multiple is wanted: convert the model again"
            )
        value_dim = file.metadata.integer(f"{prefix}.attention.value_length", MAX_HIDDEN, default=self._head_dim)
        if value_dim != self._head_dim:
            raise ModelError(
                f"{file.path} has keys of {self._head_dim} and values of {value_dim} dimensions; "
                "only equal ones are supported: give another model"
            )
        if not file.metadata.flag(causal := f"{prefix}.attention.causal", default=True):
            raise ModelError(
                f"{file.path} has {causal} = false: each token sees those after it, too, which is not supported; "
                "give a model that generates text"
            )
        if not file.has_tensor(norm := "blk.0.ffn_norm.weight") and self._family.layer_norm:
            raise ModelError(
                f"{file.path} has no {norm!r}: both halves of its layers read the same input, as those of StableLM 2 "
                f"12B, which is not supported; give a {prefix} model whose halves follow each other"
            )
        for key, value in file.metadata.unasked_keys(f"{prefix}.").items():
            name = key.removeprefix(f"{prefix}.")
            if name not in DESCRIBING and not name.startswith(OF_IMAGES):
                raise ModelError(
                    f"{file.path} has {key!r:.80} = {value}, which a {prefix} decoder would ignore here; its results "
                    f"could be wrong: give a plain {prefix} model"
                )

    def _cap(self, name: str, default: float | None) -> float:
        return 0.0 if default is None else self._file.metadata.number_or_zero(f"{self._prefix}.{name}", default)

    def _sliding_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has a sliding window."""
        period, layers = self._family.window_period, self._layers
        if not period:
            return (period == 0,) * layers
        if self._file.metadata.is_array(key := f"{self._prefix}.attention.sliding_window_pattern"):
            return self._file.metadata.flags(key, layers)
        period = self._file.metadata.integer(key, MAX_LAYERS, period)
        return tuple(index % period < period - 1 for index in range(layers))

    def _sliding_rope(self, rope: Rope) -> Rope:
        if not any(self._slides) or not self._family.window_period:
            return rope
        own_base = self._family.sliding_rope_base
        base = self._file.metadata.number(f"{self._prefix}.rope.freq_base_swa", default=own_base or rope.base)
        if own_base is None:
            return rope if base == rope.base else replace(rope, base=base)
        # The positions of layers with a sliding window are not scaled. Therefore the magnitude is divided by the
        # factor that YaRN computes from the scale, as in llama.cpp.
        of_scale = 1 + 0.1 * math.log(1 / rope.scale) if rope.extrapolation else 1.0
        return replace(rope, base=base, scale=1.0, extrapolation=0.0, magnitude=rope.magnitude / of_scale)

    def _mixture(self) -> Experts | None:
        file, prefix = self._file, self._prefix
        if not file.metadata.is_on(f"{prefix}.expert_count"):
            return None
        if not self._family.experts:
            raise ModelError(
                f"{file.path} is a mixture of experts, which no {prefix} decoder here is; give a dense model, or one "
                "of an architecture with experts (qwen3moe, llama)"
            )
        count = file.metadata.integer(f"{prefix}.expert_count", MAX_EXPERTS)
        used = file.metadata.integer(f"{prefix}.expert_used_count", count)
        gating = file.metadata.integer(key := f"{prefix}.expert_gating_func", MAX_EXPERTS, default=SOFTMAX_GATING)
        if gating != SOFTMAX_GATING:
            raise ModelError(
                f"{file.path} has {key} = {gating}; supported is {SOFTMAX_GATING}, a softmax: give a plain {prefix} "
                "model"
            )
        if file.has_tensor(apart := "blk.0.ffn_gate.0.weight"):
            raise ModelError(
                f"{file.path} has a tensor for each expert ({apart!r}), as files of early 2024 have; all experts "
                "of a layer in one are wanted: convert the model again with llama.cpp's convert_hf_to_gguf.py"
            )
        return Experts(
            count,
            used,
            normalised=file.metadata.flag(f"{prefix}.expert_weights_norm", default=True),
            scale=file.metadata.number(scale, default=1.0)
            if file.metadata.is_on(scale := f"{prefix}.expert_weights_scale")
            else 1.0,
        )

    def _quantization(self) -> str:
        """Return the weight formats, ordered by their share of the bytes, largest first: `Q4_K+Q6_K`.

        F32 is listed only if the file has only this format.
        """
        sizes = self._file.format_sizes()
        names = sorted(sizes, key=lambda name: -sizes[name])
        return "+".join(name for name in names if name != "F32") or "F32"

    def _rope(self) -> Rope:
        file, prefix = self._file, self._prefix
        dimensions = file.metadata.integer(f"{prefix}.rope.dimension_count", MAX_HIDDEN, default=self._head_dim)
        if dimensions % 2 or dimensions > self._head_dim:
            raise ModelError(
                f"{file.path} rotates {dimensions} of {self._head_dim} dimensions; "
                "an even number up to that is wanted: convert the model again"
            )
        # As in llama.cpp, a scaling factor without a type is linear. The older key for the factor is used only if the
        # newer one is missing.
        scaling = file.metadata.text(f"{prefix}.rope.scaling.type", default="linear")
        if scaling not in ("none", "linear", "yarn", "longrope"):
            raise ModelError(
                f"{file.path} has rope scaling {scaling[:60]!r}; supported are none, linear, yarn and longrope: "
                "give the model without context extension"
            )
        old = file.metadata.number(f"{prefix}.rope.scale_linear", default=1.0)
        factor = file.metadata.number(f"{prefix}.rope.scaling.factor", default=old)
        scale = 1.0 if scaling == "none" else 1.0 / factor
        base = file.metadata.number(f"{prefix}.rope.freq_base", default=10_000.0)
        yarn = f"{prefix}.rope.scaling.yarn_"
        extrapolation = file.metadata.number_or_zero(f"{yarn}ext_factor", default=float(scaling == "yarn"))
        yarn_magnitude = file.metadata.number(f"{yarn}attn_factor", default=1.0)
        if extrapolation and base <= 1:
            raise ModelError(
                f"{file.path} has {base:g} as {prefix}.rope.freq_base; above 1 is wanted: convert it again"
            )
        if extrapolation:  # like llama.cpp, replace the magnitude that the file gives
            # The formula for the magnitude is in Peng et al. 2023, section 3.4.
            yarn_magnitude = 1 + 0.1 * math.log(max(1 / scale, 1.0))
        both = ("rope_factors_short.weight", "rope_factors_long.weight")
        of_all = "rope_freqs.weight"
        names = (of_all, of_all) if file.has_tensor(of_all) else both if any(map(file.has_tensor, both)) else None
        short, long = (self._factors(name, dimensions // 2) for name in names) if names else (None, None)
        trained = self._trained_context
        return Rope(
            layout="neox" if file.is_safetensors else self._family.rope_layout,
            dimensions=dimensions,
            base=base,
            scale=scale,
            magnitude=yarn_magnitude * file.metadata.number(f"{prefix}.rope.scaling.attn_factor", default=1.0),
            short_factors=short,
            long_factors=long,
            original_context=file.metadata.integer(
                f"{prefix}.rope.scaling.original_context_length", MAX_CONTEXT, trained
            ),
            extrapolation=extrapolation,
            turns=(
                file.metadata.number(f"{yarn}beta_fast", default=YARN_TURNS[0]),
                file.metadata.number(f"{yarn}beta_slow", default=YARN_TURNS[1]),
            ),
        )

    def _factors(self, name: str, pairs: int) -> NDArray[np.float32]:
        factors = self._file.vector(name, pairs)
        if not (factors > 0).all():
            raise ModelError(f"{self._file.path}: {name} holds factors that are not above zero: it is damaged")
        return factors

    def _layer(self, index: int) -> LayerWeights:
        hidden, feed_forward = self._hidden, self._feed_forward
        query_rows, kv_rows = self._heads * self._head_dim, self._kv_heads * self._head_dim
        bias = self._family.qkv_bias
        if self._family.fused:
            q, k, v = self._rows_of_one(f"blk.{index}.attn_qkv", (query_rows, kv_rows, kv_rows), hidden)
            gate, up = self._rows_of_one(f"blk.{index}.ffn_up", (feed_forward, feed_forward), hidden)
        else:
            q = self._projection(f"blk.{index}.attn_q", query_rows, hidden, bias)
            k = self._projection(f"blk.{index}.attn_k", kv_rows, hidden, bias)
            v = self._projection(f"blk.{index}.attn_v", kv_rows, hidden, bias)
            gate = self._of_experts(f"blk.{index}.ffn_gate", feed_forward, hidden)
            up = self._of_experts(f"blk.{index}.ffn_up", feed_forward, hidden)
        return LayerWeights(
            attention_norm=self._norm(f"blk.{index}.attn_norm", hidden),
            q=q,
            k=k,
            v=v,
            q_norm=self._head_norm(f"blk.{index}.attn_q_norm"),
            k_norm=self._head_norm(f"blk.{index}.attn_k_norm"),
            output=self._projection(f"blk.{index}.attn_output", hidden, query_rows),
            attention_post_norm=self._post_norm(f"blk.{index}.post_attention_norm"),
            ffn_norm=self._norm(f"blk.{index}.ffn_norm", hidden),
            gate=gate,
            up=up,
            down=self._of_experts(f"blk.{index}.ffn_down", hidden, feed_forward),
            router=(
                None
                if self._experts is None
                else self._projection(f"blk.{index}.ffn_gate_inp", self._experts.count, hidden)
            ),
            ffn_post_norm=self._post_norm(f"blk.{index}.post_ffw_norm"),
            slides=self._slides[index],
        )

    def _of_experts(self, name: str, rows: int, columns: int) -> Projection:
        """Return the projection with this name. In a mixture, its matrix holds the matrices of all experts."""
        if self._experts is None:
            return self._projection(name, rows, columns)
        weight = self._file.matrices(f"{name}_exps.weight", self._experts.count, rows, columns)
        return Projection(weight, np.zeros(0, np.float32))

    def _norm(self, name: str, columns: int) -> Norm:
        bias = self._file.vector(f"{name}.bias", columns) if self._family.layer_norm else None
        return Norm(self._file.vector(f"{name}.weight", columns), bias)

    def _head_norm(self, name: str) -> Norm | None:
        return self._norm(name, self._head_dim) if self._family.qk_norm else None

    def _post_norm(self, name: str) -> Norm | None:
        return self._norm(name, self._hidden) if self._family.post_norms else None

    def _rows_of_one(self, name: str, rows: tuple[int, ...], columns: int) -> Iterator[Projection]:
        """Divide a tensor into projections.

        `rows` has the number of rows of each projection. Each projection is yielded as a view of consecutive rows.
        """
        matrix = self._file.matrix(f"{name}.weight", sum(rows), columns)
        for first, count in zip(accumulate(rows, initial=0), rows, strict=False):
            part = QuantizedMatrix(matrix.format, matrix.data[first : first + count], columns)
            yield Projection(part, np.zeros(0, np.float32))

    def _projection(self, name: str, rows: int, columns: int, needs_bias: bool = False) -> Projection:
        weight = self._file.matrix(f"{name}.weight", rows, columns)
        has_bias = needs_bias or self._file.has_tensor(f"{name}.bias")
        bias = self._file.vector(f"{name}.bias", rows) if has_bias else np.zeros(0, np.float32)
        return Projection(weight, bias)
