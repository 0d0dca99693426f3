"""The bricks of a whole model: one for each place where an operation runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from cbtop.compute import brick_specs
from cbtop.compute.brick import ComputeBrick, Launch, Profiler
from cbtop.compute.brick_specs import BrickSpec
from cbtop.compute.decoder.base import LayerWeights, Matrix, Model, Projection
from cbtop.compute.decoder.experts import of_expert
from cbtop.compute.kernels import (
    activation,
    attention,
    combine,
    embedding,
    kv_write,
    linear,
    linear_int8,
    residual_add,
    rms_norm,
    rope,
    route,
    sampling,
    soft_cap,
    take_rows,
)
from cbtop.compute.kernels.base import Kernel
from cbtop.compute.quantization.base import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class ExpertBricks:
    """The feed-forward network of a mixture of experts. `experts` runs once for each expert that a token of the pass
    has chosen, with the weights of that one: what it counts is what was read."""

    router: ComputeBrick
    experts: ComputeBrick
    combine: ComputeBrick


@dataclass(frozen=True, slots=True)
class LayerBricks:
    """One layer's bricks, in the order they run."""

    attention_norm: ComputeBrick
    qkv: ComputeBrick
    qk_norm: ComputeBrick | None
    rope: ComputeBrick
    kv_write: ComputeBrick
    attention: ComputeBrick
    output_projection: ComputeBrick
    attention_post_norm: ComputeBrick | None
    attention_add: ComputeBrick
    ffn_norm: ComputeBrick
    gate: ComputeBrick | None  # this and the next three: None in a mixture of experts
    up: ComputeBrick | None
    activation: ComputeBrick | None
    down: ComputeBrick | None
    experts: ExpertBricks | None
    ffn_post_norm: ComputeBrick | None
    ffn_add: ComputeBrick


@dataclass(frozen=True, slots=True)
class ModelBricks:
    """A model's bricks, in the order they run."""

    embedding: ComputeBrick
    layers: tuple[LayerBricks, ...]
    final_norm: ComputeBrick
    lm_head: ComputeBrick
    soft_cap: ComputeBrick | None
    sampling: ComputeBrick

    def places(self) -> dict[ComputeBrick, int | None]:
        """Every brick with its layer, None outside of layers."""
        places: dict[ComputeBrick, int | None] = {self.embedding: None}
        for index, layer in enumerate(self.layers):
            places |= dict.fromkeys(_bricks_of(layer), index)
        last = (self.final_norm, self.lm_head, self.soft_cap, self.sampling)
        return places | {brick: None for brick in last if brick is not None}


def _bricks_of(part: LayerBricks | ExpertBricks) -> Iterator[ComputeBrick]:
    for field in fields(part):
        one = getattr(part, field.name)
        if isinstance(one, ComputeBrick):
            yield one
        elif one is not None:
            yield from _bricks_of(one)


class BrickMaker:
    """Makes the bricks of one model for one backend and one profiler."""

    def __init__(self, model: Model, backend: str, profiler: Profiler, cache_bytes: int, sampling: Kernel) -> None:
        self._sampling = sampling
        self._cache_bytes = cache_bytes  # of a number in the KV cache
        self._model = model
        self._backend = backend
        self._profiler = profiler

    def bricks(self) -> ModelBricks:
        model = self._model
        is_plain = isinstance(model.embedding, QuantizedMatrix)
        lookup = embedding.EMBEDDING if is_plain else embedding.INTERLEAVED_EMBEDDING
        embed = Launch(lookup, embedding.work(model.embedding, model.embedding_scale != 1))
        held = Launch(soft_cap.SOFT_CAP, soft_cap.work())
        return ModelBricks(
            embedding=self._brick(brick_specs.EMBEDDING, embed),
            layers=tuple(self._layer(weights) for weights in model.layers),
            final_norm=self._norm(),
            lm_head=self._brick(brick_specs.LM_HEAD, _product(model.lm_head, has_bias=False)),
            soft_cap=self._brick(brick_specs.SOFT_CAP, held) if model.logit_cap else None,
            sampling=self._brick(brick_specs.SAMPLING, Launch(self._sampling, sampling.work())),
        )

    def _layer(self, weights: LayerWeights) -> LayerBricks:
        model = self._model
        is_dense = weights.router is None
        shared, cache_bytes = model.heads // model.kv_heads, self._cache_bytes
        is_capped = model.attention_cap > 0
        fused = Launch(attention.ATTENTION, attention.work(model.head_dim, shared, cache_bytes, is_capped))
        gated = activation.ACTIVATIONS[model.activation]
        return LayerBricks(
            attention_norm=self._norm(),
            qkv=self._projections(brick_specs.QKV_PROJECTION, weights.q, weights.k, weights.v),
            qk_norm=None if weights.q_norm is None else self._brick(brick_specs.RMS_NORM, *self._qk_norm()),
            rope=self._brick(brick_specs.ROPE_EMBEDDING, *self._rope()),
            kv_write=self._brick(brick_specs.KV_WRITE, Launch(kv_write.KV_WRITE, kv_write.work(cache_bytes))),
            attention=self._brick(brick_specs.ATTENTION, fused),
            output_projection=self._projections(brick_specs.OUTPUT_PROJECTION, weights.output),
            attention_post_norm=None if weights.attention_post_norm is None else self._norm(),
            attention_add=self._add(),
            ffn_norm=self._norm(),
            gate=self._projections(brick_specs.GATE_PROJECTION, weights.gate) if is_dense else None,
            up=self._projections(brick_specs.UP_PROJECTION, weights.up) if is_dense else None,
            activation=self._brick(brick_specs.ACTIVATION, Launch(gated, gated.work())) if is_dense else None,
            down=self._projections(brick_specs.DOWN_PROJECTION, weights.down) if is_dense else None,
            experts=self._experts(weights),
            ffn_post_norm=None if weights.ffn_post_norm is None else self._norm(),
            ffn_add=self._add(),
        )

    def _experts(self, weights: LayerWeights) -> ExpertBricks | None:
        experts, model, router = self._model.experts, self._model, weights.router
        if experts is None or router is None:
            return None
        gate, up, down = (
            _product(of_expert(one.weight, 0, experts.count), has_bias=False)
            for one in (weights.gate, weights.up, weights.down)
        )
        taken = Launch(take_rows.TAKE_ROWS, take_rows.work(), model.hidden)
        gated = activation.ACTIVATIONS[model.activation]
        activated = Launch(gated, gated.work(), model.feed_forward)
        routed = Launch(route.ROUTE, route.work(experts.used), experts.count)
        return ExpertBricks(
            router=self._brick(brick_specs.MOE_ROUTER, _product(router.weight, router.bias.size > 0), routed),
            experts=self._brick(brick_specs.MOE_EXPERTS, taken, gate, up, activated, down),
            combine=self._brick(brick_specs.MOE_COMBINE, Launch(combine.COMBINE, combine.work(experts.used))),
        )

    def _brick(self, spec: BrickSpec, *launches: Launch) -> ComputeBrick:
        return ComputeBrick(spec, launches, self._backend, self._profiler)

    def _norm(self) -> ComputeBrick:
        return self._brick(brick_specs.RMS_NORM, Launch(rms_norm.RMS_NORM, rms_norm.work(self._model.hidden)))

    def _add(self) -> ComputeBrick:
        return self._brick(brick_specs.RESIDUAL_ADD, Launch(residual_add.RESIDUAL_ADD, residual_add.work()))

    def _qk_norm(self) -> Sequence[Launch]:
        work = rms_norm.work(self._model.head_dim)
        return [Launch(rms_norm.RMS_NORM, work, heads) for heads in (self._model.heads, self._model.kv_heads)]

    def _rope(self) -> Sequence[Launch]:
        kernel = rope.ROPE_NEOX if self._model.rope.layout == "neox" else rope.ROPE_NORMAL
        return [Launch(kernel, rope.work(), heads) for heads in (self._model.heads, self._model.kv_heads)]

    def _projections(self, spec: BrickSpec, *projections: Projection) -> ComputeBrick:
        return self._brick(spec, *(_product(p.weight, has_bias=p.bias.size > 0) for p in projections))


def _product(weight: Matrix, has_bias: bool) -> Launch:
    kernels = linear.LINEAR if isinstance(weight, QuantizedMatrix) else linear_int8.LINEAR_INT8
    return Launch(kernels[weight.format.code], linear.work(weight, has_bias), weight.rows)
