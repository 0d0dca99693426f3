"""Tests of plans (what cbtop will time in a model).

Each plan has the right stacks, layers and bricks of a real model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, ValuesView
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.analysis.graph.node_table import MAX_DEPTH
from cbtop.profiler.definitions import BrickDefinition, OwnOperations, own_operations
from cbtop.profiler.instrument import attach, planning
from cbtop.profiler.instrument.planning import holds_a_stack, plan_of
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.timed_model import LOOK_EVERY
from cbtop.profiler.instrument.work import work_of
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import UNKNOWN_WORK
from cbtop.protocol.vocabulary import BrickId
from tests.profiler.instrument.tiny import WORDS, model_of, torch
from tests.profiler.memory import Memory

from torch import nn  # isort: skip

QKV = {"QkvProjection q_proj": 3, "QkvProjection k_proj": 3, "QkvProjection v_proj": 3, "OutputProjection o_proj": 3}
GLU = {
    "GateProjection gate_proj": 3,
    "UpProjection up_proj": 3,
    "DownProjection down_proj": 3,
    "Activation act_fn": 3,
}
BLOCKS = {"AttentionBlock self_attn": 3, "FeedForwardBlock mlp": 3}
TOP = {"Embedding embed_tokens": 1, "RotaryTables rotary_emb": 1, "RmsNorm norm": 1, "LmHead lm_head": 1}
NORMS = {"RmsNorm input_layernorm": 3, "RmsNorm post_attention_layernorm": 3}
MOE = {"MoeRouter gate": 3, "MoeExperts experts": 3}
MODELS = {
    "llama": BLOCKS | QKV | GLU | TOP | NORMS,
    "qwen2": BLOCKS | QKV | GLU | TOP | NORMS,
    "gemma2": BLOCKS
    | QKV
    | GLU
    | TOP
    | NORMS
    | {"RmsNorm pre_feedforward_layernorm": 3, "RmsNorm post_feedforward_layernorm": 3},
    "mixtral": {"AttentionBlock self_attn": 3, "MixtralSparseMoeBlock mlp": 3} | QKV | MOE | TOP | NORMS,
    "qwen2_moe": {"AttentionBlock self_attn": 3, "FeedForwardBlock shared_expert": 3, "Linear shared_expert_gate": 3}
    | {"Qwen2MoeSparseMoeBlock mlp": 3}
    | QKV
    | GLU
    | MOE
    | TOP
    | NORMS,
    "gpt2": {
        "Embedding wte": 1,
        "Embedding wpe": 1,
        "Dropout drop": 1,
        "LayerNorm ln_1": 3,
        "AttentionBlock attn": 3,
        "QkvProjection c_attn": 3,
        "Dropout attn_dropout": 3,
        "Dropout resid_dropout": 3,
        "OutputProjection c_proj": 3,
        "LayerNorm ln_2": 3,
        "FeedForwardBlock mlp": 3,
        "UpProjection c_fc": 3,
        "Activation act": 3,
        "DownProjection c_proj": 3,
        "Dropout dropout": 3,
        "LayerNorm ln_f": 1,
        "LmHead lm_head": 1,
    },
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_leaf_is_a_brick_and_each_layer_a_layer(kind: str) -> None:
    plan = plan_of(model_of(kind))
    assert plan
    assert plan.stacks == {"": 3}
    assert len(plan.layers) == 3
    assert len(plan.trunk) == 2
    named = Counter(
        f"{part.key.name} {part.key.label}" for part in plan.bricks if isinstance(part.key, BrickDefinition)
    )
    assert named == Counter(MODELS[kind])


@pytest.mark.parametrize("kind", MODELS)
def test_every_module_has_one_place_in_the_plan(kind: str) -> None:
    model = model_of(kind)
    plan = plan_of(model)
    assert plan
    places = Counter(id(module) for module in [*plan.trunk, *(part.module for part in plan.parts)])
    assert set(places.values()) == {1}
    others = {id(module) for module in plan.others} - set(places)
    assert set(places) | others == {id(module) for module in model.modules()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(2), Stack(3)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)


def test_an_encoder_and_a_decoder_are_two_stacks() -> None:
    whole = Whole()
    plan = plan_of(whole)
    assert plan
    assert plan.stacks == {"encoder": 2, "decoder": 3}
    assert [part.key for part in plan.layers] == [
        *((1, at, "encoder") for at in range(2)),
        *((1, at, "decoder") for at in range(3)),
    ]
    assert plan.trunk == [whole, whole.encoder, whole.decoder]


def test_a_head_of_any_name_is_known_by_its_words() -> None:
    plan = plan_of(Whole())
    assert plan
    assert [part.path for part in plan.bricks if getattr(part.key, "name", "") == "LmHead"] == ["head"]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([nn.ReLU(), Stack(0)])],
)
def test_what_holds_no_layers_has_no_plan(model: nn.Module) -> None:
    assert not holds_a_stack(model)
    assert plan_of(model) is None


def test_a_model_without_a_list_of_layers_has_bricks_alone() -> None:
    plan = plan_of(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert plan is not None
    assert not plan.layers
    assert [part.path for part in plan.bricks] == ["0", "1", "2"]


def test_a_root_that_is_a_sequence_of_layers_has_bricks_between_them() -> None:
    plan = plan_of(nn.Sequential(nn.Linear(2, 2), Stack(1), Stack(1), nn.Linear(2, 2)))
    assert plan is not None
    assert [part.path for part in plan.layers] == ["1", "2"]
    assert {part.path for part in plan.bricks} >= {"0", "3"}


def test_experts_in_a_list_are_one_brick_a_layer() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(Block() for _ in range(4))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Moe()

    model = nn.Module()
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    plan = plan_of(model)
    assert plan
    keys = {}
    for part in plan.bricks:
        if getattr(part.key, "name", "") == "MoeExperts":
            keys.setdefault(part.path.split(".")[1], []).append(part.key)
    assert {layer: (len(of_layer), len(set(of_layer))) for layer, of_layer in keys.items()} == {
        "0": (4, 1),
        "1": (4, 1),
    }


def test_the_work_of_a_low_rank_product_is_unknown() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features = self.out_features = 64
            self.down, self.up = nn.Parameter(torch.ones(2, 64)), nn.Parameter(torch.ones(64, 2))

    assert work_of(LowRank(), BrickId.DOWN_PROJECTION) == UNKNOWN_WORK


def test_the_work_of_a_product_is_a_line_in_what_it_is_given() -> None:
    plan = plan_of(model_of("llama"))
    assert plan
    part = next(part for part in plan.bricks if part.path.endswith("0.mlp.down_proj"))
    assert isinstance(part.key, BrickDefinition)
    assert part.key.work
    rows = torch.zeros(5, 48)
    assert part.key.work.flops(1, rows.numel()) == 2 * 5 * 48 * 32
    assert part.key.work.bytes(1, rows.numel()) == 4 * (48 * 32 + 5 * 48 + 5 * 32)


def test_another_devices_work_is_unknown_and_its_times_are_named_launches() -> None:
    plan = plan_of(model_of("llama").to("meta"))
    assert plan
    bricks = [part.key for part in plan.bricks if isinstance(part.key, BrickDefinition)]
    assert all(brick.work == UNKNOWN_WORK for brick in bricks)
    assert {brick.backend for brick in bricks} == {"torch on meta: launches"}


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow small blocks, because the models in tests are small."""
    monkeypatch.setattr(planning, "LEAST_BLOCK_WEIGHTS", 0)


def _blocks(model: nn.Module, *, is_timed_there: bool = False) -> list[BrickDefinition]:
    plan = plan_of(model, is_timed_there=is_timed_there)
    assert plan
    bricks = [part.key for part in plan.bricks if isinstance(part.key, BrickDefinition)]
    return [brick for brick in bricks if brick.name.endswith("Block")]


def test_a_block_of_attention_has_a_time_of_its_own_on_a_cpu_and_no_work() -> None:
    blocks = _blocks(model_of("llama"))
    assert len(blocks) == 2 * 3
    assert all(brick.work == UNKNOWN_WORK for brick in blocks)


def test_a_block_that_is_through_soon_is_no_brick(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    attention = sum(weights.numel() for weights in model.model.layers[0].self_attn.parameters())
    monkeypatch.setattr(planning, "LEAST_BLOCK_WEIGHTS", attention + 1)
    assert {brick.name for brick in _blocks(model)} == {"FeedForwardBlock"}


def test_between_stamps_on_a_device_blocks_are_no_bricks() -> None:
    assert not _blocks(model_of("llama"), is_timed_there=True)
    assert not _blocks(model_of("llama").to("meta"))


class Gate(nn.Module):
    """A module with a child. The module multiplies the child's result itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner(x).sigmoid()


class Activation(Gate):
    """A module with a class that has the name of a known brick."""


class Chain(nn.Sequential):
    """A container with a class of its own."""


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Chain(nn.Linear(8, 8), Activation())
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": Gate()}) for _ in range(2))
        self.blocks = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _own(*, is_timed_there: bool = False, by_kernels: bool = False) -> list[tuple[str, str]]:
    """Return the path and the name of each brick in `Gated` that stands for a module's own operations.

    This includes the own operations of layers.
    """
    plan = plan_of(Gated(), is_timed_there=is_timed_there, by_kernels=by_kernels)
    assert plan
    assert own_operations(plan.own)
    found = [(part.path, own_operations(part.key)) for part in plan.parts]
    return [(path, own.name) for path, own in found if own is not None and own.on_device is is_timed_there]


def test_operations_of_a_module_with_children_have_its_class_name() -> None:
    inside = [("stem.1", "Activation module"), ("layers.0.gate", "Gate"), ("layers.1.gate", "Gate")]
    of_layers = [("blocks.0", "Gate"), ("blocks.1", "Gate")]
    assert sorted(_own()) == sorted(inside + of_layers)
    assert sorted(_own(is_timed_there=True, by_kernels=True)) == sorted(inside + of_layers)
    assert _own(is_timed_there=True) == of_layers  # with time stamps, only the own operations of layers are bricks


def test_a_class_called_like_one_of_torch_has_a_row_of_its_own() -> None:
    model = Gated()
    model.stem[1].__class__ = type("Linear", (Gate,), {})
    plan = plan_of(model)
    assert plan
    rows = {own.name for part in plan.parts if (own := own_operations(part.key)) is not None}
    assert rows == {"Linear module", "Gate"}


def test_a_layer_with_a_compiled_forward_has_no_operations_of_its_own() -> None:
    model = Gated()
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend="eager")
    plan = plan_of(model)
    assert plan
    assert [part.path for part in plan.layers if own_operations(part.key)] == ["blocks.1"]


def test_recorded_kernels_of_a_known_block_have_its_name() -> None:
    plan = plan_of(model_of("llama"), is_timed_there=True, by_kernels=True)
    assert plan
    bricks = [part.key for part in plan.bricks if isinstance(part.key, OwnOperations)]
    assert Counter(brick.name for brick in bricks) == {"AttentionBlock": 3, "FeedForwardBlock": 3}


class _Counted(dict[str, object]):
    """The parameters of a module as a dict that counts how often it is listed."""

    listed = 0

    def values(self) -> ValuesView[object]:
        _Counted.listed += 1
        return super().values()

    def items(self) -> ItemsView[str, object]:
        _Counted.listed += 1
        return super().items()


@pytest.mark.parametrize("what", ["_parameters", "_modules"])
def test_twice_the_layers_are_listed_at_most_twice_as_often(what: str) -> None:
    def listed(layers: int) -> int:
        model = Stack(layers)
        for module in list(model.modules()):
            module.__dict__[what] = _Counted(module.__dict__[what])
        _Counted.listed = 0
        assert plan_of(model)
        return _Counted.listed

    assert listed(40) <= 2 * listed(20) + 20


def _told(model: nn.Module, **options: Any) -> list[object]:
    """Return the content of a model's plan, for comparisons.

    Definitions of bricks are numbered in the order of their first use in a layer.
    """
    plan = plan_of(model, **options)
    assert plan
    told: list[object] = [plan.stacks, plan.trunk]
    for section in plan.sections:
        numbers: dict[object, int] = {}
        told += [section.place, section.state, section.visited, [id(module) for module in section.others]]
        for path, module, key, product, place in section.parts:
            brick = key
            if isinstance(key, BrickDefinition):
                brick = key.name, key.category, key.brick, key.backend, key.work, key.label
            told += [path, id(module), brick, numbers.setdefault(key, len(numbers)), product, place]
    return told


def _planned_alone(layer: nn.Module) -> None:
    """Return None, so that no layer reuses the plan of an equal layer."""


@pytest.mark.parametrize("kind", MODELS)
def test_layers_built_alike_are_planned_as_each_would_be_by_itself(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    together = _told(model), _told(model, is_timed_there=True)
    monkeypatch.setattr(planning.Builds, "of", lambda builds, layer: _planned_alone(layer))
    assert (_told(model), _told(model, is_timed_there=True)) == together


class Scaled(Block):
    """A linear layer with packed weights. Its sizes are attributes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = 8, rows
        self.register_buffer("packed", torch.zeros(64, dtype=torch.uint8))


class Convolved(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(4, 4, 3, stride=stride)


class Labelled(nn.Module):
    """A layer with two norms of the same name. The number of the layer distinguishes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Sequential()
        self.inner.norm = nn.LayerNorm(4)


def _with_one_shared() -> list[nn.Module]:
    layers = [Block(), Block(), Block()]
    layers[2].up = layers[1].up
    return layers


@pytest.mark.parametrize(
    "layers",
    [
        [Block(), Block().half(), Block()],
        [Convolved(1), Convolved(2), Convolved(1)],
        [nn.Sequential(Scaled(16)), nn.Sequential(Scaled(32)), nn.Sequential(Scaled(16))],
        [Labelled(), Labelled(), Labelled()],
        [Block(), nn.Sequential(Block()), Block(), nn.Sequential(Block(), nn.ReLU())],
        _with_one_shared(),
    ],
    ids=[
        "another type",
        "another stride",
        "another size",
        "labels with a number",
        "other modules",
        "a shared module",
    ],
)
def test_layers_that_differ_are_planned_as_each_would_be_by_itself(
    layers: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    together = _told(model)
    monkeypatch.setattr(planning.Builds, "of", lambda builds, layer: _planned_alone(layer))
    assert _told(model) == together


def test_layers_built_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return count

    for name in ("work_of", "children_of", "state_of", "Described"):
        monkeypatch.setattr(planning, name, counted(name, getattr(planning, name)))
    assert plan_of(Stack(2))
    of_two = dict(calls)
    calls.clear()
    assert plan_of(Stack(20))
    assert {name: calls[name] - of_two[name] for name in ("work_of", "state_of", "Described")} == {
        "work_of": 0,
        "state_of": 0,
        "Described": 0,
    }
    # The function is called up to 18 times per model to find the stack of layers.
    assert calls["children_of"] - of_two["children_of"] <= 2 * 18


def test_a_layer_whose_state_is_known_is_not_planned_again() -> None:
    model = Stack(4)
    first = plan_of(model)
    assert first
    known = {section.place: section for section in first.sections if section.state is not None}
    model.layers[1].up = nn.Linear(8, 16)
    second = plan_of(model, known=known)
    assert second
    assert [section.is_unchanged for section in second.sections] == [True, False, True, True, False]
    assert [part.path for part in second.parts] == ["layers.1", "layers.1.up", "layers.1.down"]


def test_a_layer_that_shares_a_module_with_another_is_planned_each_time() -> None:
    model = Stack(3)
    model.layers[1].up = model.layers[0].up
    first = plan_of(model)
    assert first
    known = {section.place: section for section in first.sections if section.state is not None}
    model.layers[0].up = nn.Linear(8, 16)
    second = plan_of(model, known=known)
    assert second
    assert "layers.1.up" in [part.path for part in second.parts]


class Odd(Block):
    """A block that is false, empty and equal to everything.

    It cannot be hashed, and raises when an attribute is read.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        if name in ("up", "down"):
            return super().__getattr__(name)
        raise RuntimeError(name)


def test_modules_that_are_unhashable_and_equal_to_all_are_planned() -> None:
    model = Stack(0)
    model.layers = nn.ModuleList(Odd() for _ in range(3))
    plan = plan_of(model)
    assert plan
    assert plan.stacks == {"": 3}
    assert len(plan.layers) == 3
    assert len(plan.bricks) == 6


def test_a_module_that_holds_itself_is_planned_once() -> None:
    model = Stack(2)
    model.itself = model
    plan = plan_of(model)
    assert plan
    assert len(plan.trunk) == 1


def test_a_model_of_many_modules_is_looked_through_more_rarely() -> None:
    steps = ModelSteps(BrickProfiler(), "", lambda: None, lambda error: None)
    for modules, every in ((40, 8), (1_645, 8), (24_000, 120)):
        steps.look_through(modules)
        assert steps.look_every == every
        assert every % LOOK_EVERY == 0


class _OwnWeights(nn.Module):  # type: ignore[misc]
    """A layer without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, rows: Any) -> Any:
        return rows @ self.w


def test_layers_whose_class_has_weights_and_no_modules_are_timed() -> None:
    plan = plan_of(nn.Sequential(nn.ModuleList(_OwnWeights() for _ in range(3))))
    assert plan is not None
    assert len(plan.layers) == 3
    assert not holds_a_stack(nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(3))))


def test_no_brick_is_nested_deeper_than_a_node_may_be() -> None:
    class Nest(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.product = inner, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.product(x))  # type: ignore[no-any-return]

    model: nn.Module = nn.Linear(4, 4)
    for _ in range(2 * MAX_DEPTH):
        model = Nest(model)
    memory = Memory()
    attach(model, BrickProfiler(recorder=memory))
    model(torch.ones(1, 4))
    nodes = [tag & (1 << 24) - 1 for tag, *_ in memory.records]
    assert len(nodes) > 2 * MAX_DEPTH
    assert min(nodes) > 0
