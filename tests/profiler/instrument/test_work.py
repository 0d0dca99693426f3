"""Tests of the FLOP and bytes of real programs: both equal torch's own count and a calculation by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import timed_model
from cbtop.profiler.instrument.attachment import attach
from cbtop.profiler.instrument.experts import chosen_experts
from cbtop.profiler.instrument.work import work_of
from cbtop.profiler.instrument.wrapping import MAX_KEYS
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import UNKNOWN_TYPE, Work
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickId
from tests.profiler.instrument.engines import steps_of
from tests.profiler.instrument.oracle import Brick, bricks_of, counted, counted_in, each_step, observe, recorded
from tests.profiler.instrument.tiny import model_of, torch, transformers, words
from tests.profiler.instrument.tiny_unet import pictures, unet
from tests.profiler.memory import Memory
from tests.representatives import first_by_default

nn = torch.nn
of_a_builtin = pytest.mark.skipif(chosen() is HotPath, reason="torch's attention is timed on a compiled hot path")
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MOE = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
DEEPSEEK = MLA | MOE | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 16, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        yield


@first_by_default("way", ["eager", "batched_mm", "grouped_mm"])
@first_by_default("kind", EXPERTS, 3)
def test_experts_count_those_that_each_token_runs_through(kind: str, way: str) -> None:
    model, ids = model_of(kind, **EXPERTS[kind]), words(2, 7)
    model.set_experts_implementation(way)
    ours = recorded(model, lambda: model(ids))["experts"]
    model.set_experts_implementation("eager")  # With other implementations of experts, torch counts no FLOP.
    assert ours.flops == counted_in(counted(model, lambda: model(ids)), "experts") > 0
    assert ours.bytes is None  # The tokens decide which experts are read, so the bytes are unknown.
    assert ours.dtypes == {"float32"}


def test_experts_of_jetmoe_count_rows_and_no_bytes() -> None:
    sizes = {"kv_channels": 8, "num_local_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    model, ids = model_of("jetmoe", **sizes), words(1, 7)
    ours = recorded(model, lambda: model(ids))
    theirs = counted(model, lambda: model(ids))
    for name in ("input_linear", "output_linear"):
        assert ours[name].flops == counted_in(theirs, f"mlp.{name}") > 0
        assert ours[name].bytes is None


def test_experts_are_unknown_if_the_router_chooses_among_more() -> None:
    block = model_of("mixtral").model.layers[0].mlp
    assert chosen_experts(block.experts, block, [block.gate]) == 2
    # With five experts in the gate, their number contradicts the module, so nothing is known.
    block.gate.weight = nn.Parameter(torch.zeros(5, 32))
    assert chosen_experts(block.experts, block, [block.gate]) is None
    assert chosen_experts(block.experts, block, []) is None


def test_experts_are_unknown_if_router_and_block_disagree() -> None:
    block = model_of("mixtral").model.layers[0].mlp
    block.gate.top_k = 1
    assert chosen_experts(block.experts, block, [block.gate]) is None
    assert work_of(block.experts, "MoeExperts").flops(1, 1) is None


def test_a_matrix_for_each_of_several_is_unknown() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 8, 6
            self.weight = nn.Parameter(torch.zeros(16, 6, 8))

    assert work_of(Grouped(), BrickId.UP_PROJECTION) == Work()


def _bert() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(7)
    return transformers.BertModel(transformers.BertConfig(vocab_size=101, **sizes)).eval()


@pytest.mark.parametrize(("dtype", "size", "multiplied"), [("qint8", 1, "int8"), ("float16", 2, "float32")])
def test_weights_that_torch_packs_count_their_bytes(dtype: str, size: int, multiplied: str) -> None:
    model, ids = _bert(), words(1, 7)
    theirs = counted(model, lambda: model(ids))
    packed = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=getattr(torch, dtype))
    ours = recorded(packed, lambda: packed(ids))
    query = ours["query"]
    assert query.flops == counted_in(theirs, "query") > 0
    assert query.bytes == 2 * (32 * 32 * size + 32 * 4 + 7 * (32 + 32) * 4)  # two layers
    assert query.dtypes == {multiplied}
    assert 0.0 not in [brick.bytes for brick in ours.values()]


def test_quantised_layers_whose_name_says_nothing_are_bricks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    packed = torch.ao.quantization.quantize_dynamic(Model().eval(), {nn.Linear}, dtype=torch.qint8)
    ours = recorded(packed, lambda: packed(torch.zeros(7, 8)))
    assert ours["0"].flops == ours["2"].flops == 2 * 2 * 7 * 8 * 6  # two layers
    assert ours["0"].bytes == 2 * (8 * 6 + 6 * 4 + 7 * (8 + 6) * 4)


def test_weights_out_of_sight_have_no_bytes() -> None:
    class Hidden(nn.Module):
        in_features, out_features = 8, 6

    assert work_of(Hidden(), BrickId.UP_PROJECTION).bytes(1, 8) is None
    embedding = torch.ao.nn.quantized.Embedding(10, 8)
    assert work_of(embedding, BrickId.EMBEDDING).bytes(1, 8) is None


def _adapted(kind: str = "qwen2", **more: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "down_proj"]
    settings = {"r": 4, "target_modules": targets, "init_lora_weights": False} | more
    return peft.get_peft_model(model_of(kind), peft.LoraConfig(**settings)).eval()


def _add(model: Any, name: str, rank: int) -> None:
    import peft

    model.add_adapter(name, peft.LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False))


def _products(model: Any, call: Any, names: tuple[str, ...] = ("q_proj", "down_proj")) -> dict[str, Brick]:
    """Check that the FLOP of these bricks equal torch's count. Returns the bricks."""
    ours, theirs = recorded(model, call), counted(model, call)
    for name in names:
        assert ours[name].flops == counted_in(theirs, name) > 0
    return {name: ours[name] for name in names}


@first_by_default("kind", ["qwen2", "llama", "gpt2"])
def test_an_adapter_counts_with_what_it_is_added_to(kind: str) -> None:
    model, ids = _adapted(kind), words(2, 7)
    _products(model, lambda: model(ids), ("c_attn",) if kind == "gpt2" else ("q_proj", "down_proj"))


@pytest.mark.slow
def test_an_adapter_that_is_not_active_counts_nothing() -> None:
    model, ids = _adapted(), words(1, 7)
    _add(model, "other", 8)
    query = _products(model, lambda: model(ids))["q_proj"]
    weights = 32 * 32 + 32 + 4 * (32 + 32)  # FLOP of the product, of its bias and of the adapter
    assert query.bytes == 3 * 4 * (weights + 7 * (32 + 32))
    model.set_adapter("other")
    query = _products(model, lambda: model(ids))["q_proj"]
    assert query.bytes == 3 * 4 * (weights + 4 * (32 + 32) + 7 * (32 + 32))


def test_adapters_that_are_active_together_all_count() -> None:
    model, ids = _adapted(), words(1, 7)
    _add(model, "other", 8)
    model.base_model.set_adapter(["default", "other"])
    _products(model, lambda: model(ids))


def test_an_adapter_that_is_merged_or_disabled_counts_nothing() -> None:
    model, ids = _adapted(), words(1, 7)

    def disabled() -> None:
        with model.disable_adapter():
            model(ids)

    bare = 3 * 4 * (32 * 32 + 32 + 7 * (32 + 32))
    assert _products(model, disabled)["q_proj"].bytes == bare
    model.merge_adapter()
    assert _products(model, lambda: model(ids))["q_proj"].bytes == bare


def test_adapters_that_change_between_steps_count_in_each_as_they_are() -> None:
    model, ids = _adapted(), words(1, 7)
    _add(model, "other", 8)

    def disabled() -> None:
        with model.disable_adapter():
            model(ids)

    def other() -> None:
        model.set_adapter("other")
        model(ids)
        model.set_adapter("default")

    steps = [lambda: model(ids), disabled, lambda: model(ids), other, disabled, lambda: model(ids)]
    found = [bricks["q_proj"].flops for bricks in each_step(model, *steps)]
    assert found == [counted_in(counted(model, step), "q_proj") for step in steps]
    assert len(set(found)) == 3


def test_the_steps_of_each_adapter_have_a_phase_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_model, "MAX_ADAPTERS", 3)
    model, ids, memory = _adapted(), words(1, 7), Memory()
    model(ids)
    attachment = attach(model, BrickProfiler(recorder=memory))
    model(ids)
    attachment.detach()
    assert steps_of(memory) == [("prefill", 7)]
    for name in ("other", "third"):
        _add(model, name, 8)
    memory = Memory()
    attachment = attach(model, BrickProfiler(recorder=memory))
    assert attachment.steps.in_python  # C code does not look at adapters
    for name in ("default", "other", "other", "third"):
        model.set_adapter(name)
        model(ids)
    with model.disable_adapter():
        model(ids)
    attachment.detach()
    adapters = ("adapter default", *["adapter other"] * 2, "adapter third", "other adapters")
    assert steps_of(memory) == [(f"prefill, {adapter}", 7) for adapter in adapters]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"use_dora": True}, {"target_modules": ["q_proj"], "use_bdlora": None}])
def test_variants_of_adapters_are_unknown_or_as_torch_counts(more: dict[str, Any]) -> None:
    model, ids = _adapted(**{name: value for name, value in more.items() if value is not None}), words(1, 7)
    query = recorded(model, lambda: model(ids))["q_proj"]
    assert query.flops in (None, counted_in(counted(model, lambda: model(ids)), "q_proj"))


def test_adapters_of_each_sequence_in_a_batch_are_unknown() -> None:
    model, ids = _adapted(), words(2, 7)
    _add(model, "other", 8)
    mixed = recorded(model, lambda: model(input_ids=ids, adapter_names=["default", "other"]))
    assert mixed["q_proj"].flops is None


def test_adapters_of_another_type_than_their_product_have_no_type() -> None:
    base = model_of("qwen2").bfloat16()
    peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
    model, ids = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).eval(), words(1, 7)
    found = recorded(model, lambda: model(ids))
    assert found["q_proj"].dtypes == {UNKNOWN_TYPE}
    assert found["k_proj"].dtypes == {"bfloat16"}


def test_another_method_than_low_rank_adapters_is_unknown() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
    config = peft.LoHaConfig(r=4, target_modules=["q_proj"])
    model, ids = peft.get_peft_model(model_of("qwen2"), config).eval(), words(1, 7)
    assert recorded(model, lambda: model(ids))["q_proj"].flops is None


def test_weights_that_are_computed_from_others_are_unknown() -> None:
    product = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
    assert work_of(product, BrickId.UP_PROJECTION) == Work()


def test_a_class_that_names_no_file_runs_no_code_of_its_own() -> None:
    class Named(type(nn.Module)):  # type: ignore[misc]
        @property
        def __module__(cls) -> str:
            raise AssertionError("code of the host ran")

    class Product(nn.Module, metaclass=Named):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 8, 6
            self.weight = nn.Parameter(torch.zeros(6, 8))
            self._active_adapter = "default"

    assert work_of(Product(), BrickId.UP_PROJECTION).flops(1, 8) == 2 * 8 * 6


def test_attention_whose_values_are_narrower_counts_both_widths() -> None:
    model, ids = model_of("deepseek_v3", **DEEPSEEK, attn_implementation="sdpa"), words(2, 1)
    ours, theirs = recorded(model, lambda: model(ids)), counted(model, lambda: model(ids))
    inside = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    attention = counted_in(theirs, "self_attn") - counted_in(theirs, *[f"self_attn.{name}" for name in inside])
    assert ours["sdpa"].flops == attention > 0
    # In 3 layers, 2 sequences and 4 heads, attention reads a key of 16 numbers and a value of 8 numbers. Each number
    # has 4 bytes.
    assert ours["sdpa"].bytes == 3 * 2 * 4 * (16 + 8) * 4


def _attention(given: Any, **more: Any) -> tuple[Brick, int]:
    """Run a single attention call. Return the brick that was recorded, and the FLOP that torch counts."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(2, 2))

        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return nn.functional.scaled_dot_product_attention(query, key, value, **more)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, *given: Any) -> Any:
            return [layer(*given) for layer in self.layers]

    model = Model()
    return recorded(model, lambda: model(*given))["sdpa"], counted(model, lambda: model(*given))["Global"]


@of_a_builtin
@first_by_default(
    "shapes",
    [
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
        ((2, 5, 8), (2, 7, 8), (2, 7, 16)),  # These tensors have no dimension for heads.
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
        ((2, 3, 1, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    ],
    2,
)
def test_attention_of_any_shape_counts_as_torch_does(shapes: tuple[tuple[int, ...], ...]) -> None:
    ours, theirs = _attention([torch.randn(shape) for shape in shapes])
    assert ours.flops == theirs > 0


@of_a_builtin
def test_a_query_that_several_sequences_share_is_unknown() -> None:
    ours, _ = _attention([torch.randn(1, 2, 5, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)])
    assert ours.flops is None


@of_a_builtin
@first_by_default(("new", "kept"), [(5, 5), (5, 7), (7, 5)])
def test_causal_attention_of_torch_begins_at_the_first_key(new: int, kept: int) -> None:
    ours, _ = _attention([torch.randn(1, 2, length, 8) for length in (new, kept, kept)], is_causal=True)
    pairs = torch.ones(new, kept).tril().sum()  # This is the mask that torch's documentation describes.
    assert ours.flops == 2 * 2 * pairs * 4 * 8  # layers, heads


@of_a_builtin
def test_one_query_reads_the_keys_and_values_of_its_group_once() -> None:
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 4)
    ours, _ = _attention([query, key, value], enable_gqa=True)
    assert ours.bytes == 2 * (key.nbytes + value.nbytes)  # two layers


@pytest.mark.parametrize("size", [(1, 16, 16), (2, 17, 13)])
def test_convolutions_of_a_unet_count_as_torch_does(size: tuple[int, int, int]) -> None:
    model, given = unet(), pictures(*size)
    ours, theirs = recorded(model, lambda: model(*given)), counted(model, lambda: model(*given))
    names = ("shortcut", "conv1", "conv2", "downsample", "upsample", "to_q", "to_k", "to_v", "to_out")
    for name in names:
        assert ours[name].flops == pytest.approx(counted_in(theirs, name), rel=1e-12), name
    for name in ("conv_in", "conv_out"):
        assert ours[name].flops == pytest.approx(theirs[name], rel=1e-12)
    inside = [f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out")]
    if chosen() is not HotPath:
        assert ours["sdpa"].flops == counted_in(theirs, "attention") - counted_in(theirs, *inside) > 0


def test_convolutions_count_weights_images_and_results_once() -> None:
    model, given = unet(), pictures(2, 17, 13)
    ours = recorded(model, lambda: model(*given))
    moved = dict.fromkeys(("conv_in", "downsample", "upsample", "conv_out"), 0)

    def add(name: str, module: Any, image: Any, result: Any) -> None:
        if name in moved:
            moved[name] += image.nbytes + result.nbytes + sum(weights.nbytes for weights in module.parameters())

    observe(model, lambda: model(*given), add)
    assert {name: pytest.approx(ours[name].bytes) for name in moved} == moved


CONVOLUTIONS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    (nn.Conv1d(4, 6, 5, stride=3, padding=2, dilation=2), (2, 4, 11)),
    (nn.Conv2d(4, 8, (3, 1), stride=(1, 2), groups=4, padding_mode="circular", padding=(1, 0)), (2, 4, 9, 11)),
    # An image without a batch dimension. Its sizes cannot be divided by the stride.
    (nn.Conv2d(4, 8, 4, stride=4), (4, 9, 11)),
    (nn.Conv3d(2, 4, 3, padding="same"), (1, 2, 5, 6, 7)),
    (nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1), (2, 4, 11)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 7)),
    (nn.ConvTranspose3d(2, 4, 3, dilation=2), (1, 2, 5, 6, 7)),
]


@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_a_convolution_counts_as_torch_does(module: Any, shape: tuple[int, ...]) -> None:
    image = torch.randn(shape)
    result = module(image)
    size = shape[-len(module.kernel_size) :]
    work = work_of(module, type(module).__name__, size=size)
    theirs = counted(module, lambda: module(image))["Global"]
    assert work.flops(1, image.numel()) == pytest.approx(theirs, rel=1e-12)
    weights = sum(weights.nbytes for weights in module.parameters())
    assert work.bytes(1, image.numel()) == pytest.approx(weights + image.nbytes + result.nbytes)
    without = work_of(module, type(module).__name__)
    # Without the size of the image, the work is either unknown or the same as for any size.
    assert without in (Work(), work)


@pytest.mark.slow
def test_images_of_very_many_sizes_leave_the_work_unknown() -> None:
    model = unet()
    memory = Memory()
    attachment = attach(model, BrickProfiler(recorder=memory))
    with torch.no_grad():
        for width in range(8, 8 + 2 * MAX_KEYS):
            model(*pictures(1, 8, width))
    attachment.detach()
    names = [node.label for node in memory.said if isinstance(node, Node)]
    assert names.count("downsample") <= 2 * MAX_KEYS
    assert bricks_of(memory)["downsample"].flops is None


def test_a_convolution_of_a_class_of_its_own_is_unknown() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, image: Any) -> Any:
            return super().forward(image)

    assert work_of(Standardised(4, 6, 3, padding=1), "Standardised") == Work()
