"""Make the bricks of a whole model. Each operation of each layer gets a brick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from cbtop.compute import brick_specs
from cbtop.compute.brick import BrickLaunch, ComputeBrick, Profiler
from cbtop.compute.brick_specs import BrickSpec
from cbtop.compute.decoder.base import LayerWeights, Model, Norm, Projection
from cbtop.compute.decoder.experts import of_expert
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES
from cbtop.compute.kernels import (
    activation,
    add_rms_norm,
    add_rms_norm_int8,
    attention,
    attention_bf16,
    combine,
    embedding,
    expert_gated,
    expert_linear,
    gated,
    kv_write,
    layer_norm,
    linear,
    linear_int8,
    qkv,
    residual_add,
    rms_norm,
    rms_norm_int8,
    rope,
    route,
    sampling,
    soft_cap,
    take_rows,
)
from cbtop.compute.kernels.base import Kernel
from cbtop.compute.kernels.linear_int8 import can_share
from cbtop.compute.quantization.interleaved import InterleavedMatrix, Matrix
from cbtop.compute.settings import crossovers


@dataclass(frozen=True, slots=True)
class ExpertBricks:
    """The bricks of a mixture of experts.

    A pass of one token runs `of_token` once, with the weights of all experts that the token has chosen. A pass of
    several tokens runs `experts` once for each chosen expert. The work of both bricks includes only the weights that
    were read.
    """

    router: ComputeBrick
    of_token: ComputeBrick
    experts: ComputeBrick
    combine: ComputeBrick


@dataclass(frozen=True, slots=True)
class LayerBricks:
    """The bricks of one layer, in the order of execution.

    If an RMSNorm follows a sum, one brick computes both: `ffn_norm` includes `attention_add`, and the next layer's
    `attention_norm` includes `ffn_add`. The last layer has a separate `ffn_add`.
    """

    attention_norm: ComputeBrick
    qkv: ComputeBrick
    qk_norm: ComputeBrick | None
    rope: ComputeBrick
    kv_write: ComputeBrick
    attention: ComputeBrick
    output_projection: ComputeBrick
    attention_post_norm: ComputeBrick | None
    attention_add: ComputeBrick | None
    ffn_norm: ComputeBrick
    # The brick that computes gate, up and activation together. If the next three fields have separate bricks, this
    # field is None. In a mixture of experts, all four fields are None.
    gated: ComputeBrick | None
    gate: ComputeBrick | None
    up: ComputeBrick | None
    activation: ComputeBrick | None
    down: ComputeBrick | None
    experts: ExpertBricks | None
    ffn_post_norm: ComputeBrick | None
    ffn_add: ComputeBrick | None


@dataclass(frozen=True, slots=True)
class ModelBricks:
    """The bricks of a model, in the order of execution."""

    embedding: ComputeBrick
    layers: tuple[LayerBricks, ...]
    final_norm: ComputeBrick
    lm_head: ComputeBrick
    soft_cap: ComputeBrick | None
    sampling: ComputeBrick

    def places(self) -> dict[ComputeBrick, int | None]:
        """Return every brick with the index of its layer, or None for bricks outside the layers."""
        places: dict[ComputeBrick, int | None] = {self.embedding: None}
        for index, layer in enumerate(self.layers):
            places |= dict.fromkeys(_bricks_of(layer), index)
        last = (self.final_norm, self.lm_head, self.soft_cap, self.sampling)
        return places | {brick: None for brick in last if brick is not None}

    def adds_up(self, layer: int) -> ComputeBrick:
        """Return the brick that adds the output of the layer's second half to the residual stream.

        The first argument of the brick is the residual stream. After the brick has run, the residual stream contains
        the layer's output.
        """
        add = self.layers[layer].ffn_add
        return self.layers[layer + 1].attention_norm if add is None else add


def _bricks_of(part: LayerBricks | ExpertBricks) -> Iterator[ComputeBrick]:
    for field in fields(part):
        one = getattr(part, field.name)
        if isinstance(one, ComputeBrick):
            yield one
        elif one is not None:
            yield from _bricks_of(one)


class BrickMaker:
    """Makes the bricks of one model, for one backend and one profiler."""

    def __init__(
        self,
        model: Model,
        backend: str,
        profiler: Profiler,
        cache_bytes: int,
        sampling: Kernel,
        *,
        names_launches: bool = False,
    ) -> None:
        self._names_launches = names_launches
        self._sampling = sampling
        self._cache_bytes = cache_bytes
        self._model = model
        self._backend = backend
        self._profiler = profiler

    def bricks(self) -> ModelBricks:
        model = self._model
        is_interleaved = isinstance(model.embedding, InterleavedMatrix)
        lookup = embedding.INTERLEAVED_EMBEDDING if is_interleaved else embedding.EMBEDDING
        embed = BrickLaunch(lookup, embedding.work(model.embedding, model.embedding_scale != 1))
        held = BrickLaunch(soft_cap.SOFT_CAP, soft_cap.work())
        return ModelBricks(
            embedding=self._brick(brick_specs.EMBEDDING, embed),
            layers=tuple(self._layer(place) for place in range(len(model.layers))),
            final_norm=self._norm(model.final_norm, [model.lm_head]),
            lm_head=self._brick(brick_specs.LM_HEAD, _product(model.lm_head, has_bias=False)),
            soft_cap=self._brick(brick_specs.SOFT_CAP, held) if model.logit_cap else None,
            sampling=self._brick(brick_specs.SAMPLING, BrickLaunch(self._sampling, sampling.work())),
        )

    def _layer(self, place: int) -> LayerBricks:
        model, weights = self._model, self._model.layers[place]
        is_last = place == len(model.layers) - 1
        adds_first = place > 0 and _can_add(weights.attention_norm)
        adds_between = _can_add(weights.ffn_norm)
        adds_last = is_last or not _can_add(model.layers[place + 1].attention_norm)
        is_dense = weights.router is None
        shared, cache_bytes = model.heads // model.kv_heads, self._cache_bytes
        is_capped = model.attention_cap > 0
        in_bf16 = (
            BF16_PAYS
            and not self._names_launches
            and attention_bf16.can_take(model.head_dim, cache_bytes)
            and weights.output.weight.takes_int8
        )
        fused = (
            BrickLaunch(attention_bf16.ATTENTION_BF16, attention_bf16.work(model.head_dim, shared, is_capped))
            if in_bf16
            else BrickLaunch(attention.ATTENTION, attention.work(model.head_dim, shared, cache_bytes, is_capped))
        )
        activated = activation.ACTIVATIONS[model.activation]
        is_gated = is_dense and self._can_gate(weights)
        is_apart = is_dense and not is_gated
        return LayerBricks(
            attention_norm=self._norm(
                weights.attention_norm, [one.weight for one in (weights.q, weights.k, weights.v)], adds=adds_first
            ),
            qkv=self._qkv(weights),
            qk_norm=self._qk_norm(weights),
            rope=self._brick(brick_specs.ROPE_EMBEDDING, *self._rope()),
            kv_write=self._brick(brick_specs.KV_WRITE, BrickLaunch(kv_write.KV_WRITE, kv_write.work(cache_bytes))),
            attention=self._brick(brick_specs.ATTENTION_BF16 if in_bf16 else brick_specs.ATTENTION, fused),
            output_projection=self._projections(brick_specs.OUTPUT_PROJECTION, weights.output),
            attention_post_norm=self._post_norm(weights.attention_post_norm),
            attention_add=None if adds_between else self._add(),
            ffn_norm=self._norm(
                weights.ffn_norm, [weights.gate.weight, weights.up.weight] if is_dense else [], adds=adds_between
            ),
            gated=self._brick(brick_specs.GATED, _gated(weights.gate, weights.up)) if is_gated else None,
            gate=self._projections(brick_specs.GATE_PROJECTION, weights.gate) if is_apart else None,
            up=self._projections(brick_specs.UP_PROJECTION, weights.up) if is_apart else None,
            activation=self._brick(brick_specs.ACTIVATION, BrickLaunch(activated, activated.work()))
            if is_apart
            else None,
            down=self._projections(brick_specs.DOWN_PROJECTION, weights.down) if is_dense else None,
            experts=self._experts(weights),
            ffn_post_norm=self._post_norm(weights.ffn_post_norm),
            ffn_add=self._add() if adds_last else None,
        )

    def _qkv(self, weights: LayerWeights) -> ComputeBrick:
        projections = weights.q, weights.k, weights.v
        matrices = [one.weight for one in projections]
        if not can_share(matrices):
            return self._projections(brick_specs.QKV_PROJECTION, *projections)
        codes = [matrix.format.code for matrix in matrices]
        kernel = qkv.kernel_for(codes, is_int8=matrices[0].takes_int8)
        work = qkv.work(matrices, sum(one.bias.size for one in projections))
        return self._brick(brick_specs.QKV_PROJECTION, BrickLaunch(kernel, work, sum(one.rows for one in matrices)))

    def _can_gate(self, weights: LayerWeights) -> bool:
        """Return whether one kernel can compute gate, up and activation together."""
        return self._model.activation == "silu" and can_share((weights.gate.weight, weights.up.weight))

    def _experts(self, weights: LayerWeights) -> ExpertBricks | None:
        experts, model, router = self._model.experts, self._model, weights.router
        if experts is None or router is None:
            return None
        gate, up, down = (
            replace(one, weight=of_expert(one.weight, 0, experts.count))
            for one in (weights.gate, weights.up, weights.down)
        )
        taken = BrickLaunch(take_rows.TAKE_ROWS, take_rows.work(), model.hidden)
        inner: tuple[BrickLaunch, ...] = (_gated(gate, up),)
        of_token: tuple[BrickLaunch, ...] = (_expert_gated(gate, up, experts.used),)
        if not self._can_gate(weights):
            activated = activation.ACTIVATIONS[model.activation]
            last = BrickLaunch(activated, activated.work(), model.feed_forward)
            inner = (_product(gate.weight, has_bias=False), _product(up.weight, has_bias=False), last)
            last = replace(last, elements_per_token=experts.used * model.feed_forward)
            of_token = (*(_expert_product(one.weight, experts.used, 1) for one in (gate, up)), last)
        routed = BrickLaunch(route.ROUTE, route.work(experts.used), experts.count)
        down_of_token = _expert_product(down.weight, experts.used, experts.used)
        return ExpertBricks(
            router=self._brick(brick_specs.MOE_ROUTER, _product(router.weight, router.bias.size > 0), routed),
            of_token=self._brick(brick_specs.MOE_EXPERTS, *of_token, down_of_token),
            experts=self._brick(brick_specs.MOE_EXPERTS, taken, *inner, _product(down.weight, has_bias=False)),
            combine=self._brick(brick_specs.MOE_COMBINE, BrickLaunch(combine.COMBINE, combine.work(experts.used))),
        )

    def _brick(self, spec: BrickSpec, *launches: BrickLaunch) -> ComputeBrick:
        has_tiles = HAS_TILES and not self._names_launches
        return ComputeBrick(
            spec,
            launches,
            self._backend,
            self._profiler,
            names_launches=self._names_launches,
            bfloat16_tokens=crossovers().bf16_tokens if has_tiles else None,
        )

    def _norm(self, norm: Norm, behind: Sequence[Matrix] = (), *, adds: bool = False) -> ComputeBrick:
        """Return the brick of a norm.

        `behind` are the matrices that multiply the norm's output. If some of them take int8, the norm also makes int8
        codes. On a GPU it makes none, because the pass makes them (see `BrickLaunches`).

        `adds`: whether the brick also computes the residual sum that the norm reads.
        """
        makes_codes = norm.bias is None and not self._names_launches and any(one.takes_int8 for one in behind)
        hidden = norm.weight.size
        if adds:
            made = BrickLaunch(add_rms_norm.ADD_RMS_NORM, add_rms_norm.work(hidden, is_on_gpu=self._names_launches))
            if makes_codes:
                made = BrickLaunch(add_rms_norm_int8.ADD_RMS_NORM_INT8, add_rms_norm_int8.work(hidden))
            return self._brick(brick_specs.ADD_RMS_NORM, made)
        made = (
            BrickLaunch(rms_norm_int8.RMS_NORM_INT8, rms_norm_int8.work(hidden))
            if makes_codes
            else self._normed(norm)
        )
        return self._brick(_norm_spec(norm), made)

    def _post_norm(self, norm: Norm | None) -> ComputeBrick | None:
        return None if norm is None else self._norm(norm)

    def _normed(self, norm: Norm, rows: float = 1.0) -> BrickLaunch:
        """Return the kernel and the work of a norm. The norm has `rows` rows per token."""
        hidden, is_on_gpu = norm.weight.size, self._names_launches
        if norm.bias is None:
            return BrickLaunch(rms_norm.RMS_NORM, rms_norm.work(hidden, is_on_gpu=is_on_gpu), rows)
        work = layer_norm.work(hidden, has_bias=norm.bias.size > 0, is_on_gpu=is_on_gpu)
        return BrickLaunch(layer_norm.LAYER_NORM, work, rows)

    def _add(self) -> ComputeBrick:
        return self._brick(brick_specs.RESIDUAL_ADD, BrickLaunch(residual_add.RESIDUAL_ADD, residual_add.work()))

    def _qk_norm(self, weights: LayerWeights) -> ComputeBrick | None:
        if weights.q_norm is None or weights.k_norm is None:
            return None
        queries, keys = (weights.q_norm, self._model.heads), (weights.k_norm, self._model.kv_heads)
        return self._brick(_norm_spec(weights.q_norm), self._normed(*queries), self._normed(*keys))

    def _rope(self) -> Sequence[BrickLaunch]:
        kernel = rope.ROPE_NEOX if self._model.rope.layout == "neox" else rope.ROPE_NORMAL
        return [BrickLaunch(kernel, rope.work(), heads) for heads in (self._model.heads, self._model.kv_heads)]

    def _projections(self, spec: BrickSpec, *projections: Projection) -> ComputeBrick:
        return self._brick(spec, *(_product(p.weight, has_bias=p.bias.size > 0) for p in projections))


def _can_add(norm: Norm) -> bool:
    """Return whether one kernel can compute this norm and the sum before it."""
    return norm.bias is None


def _norm_spec(norm: Norm) -> BrickSpec:
    return brick_specs.RMS_NORM if norm.bias is None else brick_specs.LAYER_NORM


def _gated(gate: Projection, up: Projection) -> BrickLaunch:
    weights = gate.weight, up.weight
    kernel = gated.kernel_for([one.format.code for one in weights], is_int8=weights[0].takes_int8)
    return BrickLaunch(kernel, gated.work(*weights, (gate.bias.size > 0) + (up.bias.size > 0)), gate.weight.rows)


def _expert_gated(gate: Projection, up: Projection, used: int) -> BrickLaunch:
    weights = gate.weight, up.weight
    kernel = expert_gated.kernel_for((weights[0].format.code, weights[1].format.code), is_int8=weights[0].takes_int8)
    return BrickLaunch(kernel, expert_gated.work(*weights, used), used * gate.weight.rows)


def _expert_product(weight: Matrix, used: int, rows_of_x: int) -> BrickLaunch:
    kernels = expert_linear.EXPERT_LINEAR_INT8 if weight.takes_int8 else expert_linear.EXPERT_LINEAR
    work = expert_linear.work(weight, used, rows_of_x)
    return BrickLaunch(kernels[weight.format.code], work, used * weight.rows)


def _product(weight: Matrix, has_bias: bool) -> BrickLaunch:
    kernels = linear_int8.LINEAR_INT8 if weight.takes_int8 else linear.LINEAR
    return BrickLaunch(kernels[weight.format.code], linear.work(weight, has_bias), weight.rows)
