"""Tests of the data type of products: the type is taken from each step. An unknown type is not reported."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import multiplied
from cbtop.profiler.instrument.attachment import attach
from cbtop.profiler.instrument.work import work_of
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import UNKNOWN_TYPE
from cbtop.protocol.vocabulary import BrickId
from tests.profiler.instrument.oracle import each_step, observe
from tests.profiler.instrument.tiny import model_of, torch, words
from tests.profiler.instrument.tiny_unet import pictures, unet
from tests.profiler.memory import Memory

nn = torch.nn


def _under(model: Any, *given: Any, dtype: Any = torch.bfloat16) -> Any:
    def step() -> None:
        with torch.autocast("cpu", dtype=dtype):
            model(*given)

    return step


def test_products_multiply_what_autocast_makes_of_them() -> None:
    model, ids = model_of("qwen2"), words(2, 6)
    steps = [lambda: model(ids), _under(model, ids), lambda: model(ids), _under(model, ids, dtype=torch.float16)]
    for bricks, expected in zip(each_step(model, *steps), ["float32", "bfloat16", "float32", "float16"], strict=True):
        for name in ("q_proj", "sdpa", "down_proj", "lm_head"):
            assert bricks[name].dtypes == {expected}, name
        assert bricks["input_layernorm"].dtypes == {"float32"}


def test_the_type_is_that_of_each_products_result() -> None:
    model, ids = model_of("qwen2"), words(2, 6)
    found: dict[str, set[str]] = {}

    def add(name: str, module: Any, given: Any, result: Any) -> None:
        if isinstance(module, nn.Linear):
            found.setdefault(name, set()).add(str(result.dtype).removeprefix("torch."))

    observe(model, _under(model, ids), add)
    (ours,) = each_step(model, _under(model, ids))
    assert {name: ours[name].dtypes for name in found} == found
    assert len(found) == 8


def test_autocast_inside_a_model_is_seen() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make torch")
    model, ids = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model_of("qwen2")), words(1, 6)
    for bricks in each_step(model, lambda: model(ids), lambda: model(ids)):
        assert bricks["q_proj"].dtypes == bricks["sdpa"].dtypes == {"bfloat16"}
    accelerate.state.AcceleratorState._reset_state(True)


def test_a_convolution_before_the_layers_follows_autocast_at_once() -> None:
    model, given = unet(), pictures(1, 16, 16)
    plain, under, again = each_step(model, lambda: model(*given), _under(model, *given), lambda: model(*given))
    for name in ("conv_in", "conv1", "downsample", "to_q"):
        assert (plain[name].dtypes, under[name].dtypes, again[name].dtypes) == (
            {"float32"},
            {"bfloat16"},
            {"float32"},
        )
    assert under["conv_in"].bytes == plain["conv_in"].bytes / 2  # type: ignore[operator]


def test_attention_of_the_same_shapes_is_looked_at_anew_under_autocast() -> None:
    model, ids = model_of("llama"), words(1, 1)
    for bricks, expected in zip(
        each_step(model, lambda: model(ids), _under(model, ids), lambda: model(ids)),
        ("float32", "bfloat16", "float32"),
        strict=True,
    ):
        assert bricks["sdpa"].dtypes == {expected}


def test_a_layer_that_is_replaced_follows_autocast_as_the_others_do() -> None:
    model, ids = model_of("qwen2"), words(1, 6)
    under = _under(model, ids)

    def replaced() -> None:
        model.model.layers[1].self_attn.q_proj = nn.Linear(32, 32)
        for _ in range(20):  # Repeat the call, because cbtop notices a replaced module only after some steps.
            under()

    for bricks, expected in zip(
        each_step(model, under, replaced, lambda: model(ids), under),
        ({"bfloat16"}, {"bfloat16"}, {"float32"}, {"bfloat16"}),
        strict=True,
    ):
        assert bricks["q_proj"].dtypes == expected


def test_bytes_under_autocast_are_those_of_the_type_that_is_multiplied() -> None:
    model, ids = model_of("qwen2"), words(1, 6)
    (bricks,) = each_step(model, _under(model, ids))
    assert bricks["q_proj"].bytes == 3 * 2 * (32 * 32 + 32 + 6 * (32 + 32))
    # The input of the norm may have either data type, so its bytes are unknown.
    assert bricks["input_layernorm"].bytes is None


def test_a_model_in_half_precision_multiplies_that() -> None:
    model, ids = model_of("qwen2").bfloat16(), words(1, 6)
    (bricks,) = each_step(model, lambda: model(ids))
    assert bricks["q_proj"].dtypes == bricks["sdpa"].dtypes == {"bfloat16"}


def test_a_product_that_may_convert_its_weights_has_no_type() -> None:
    class Casted(nn.Linear):
        def forward(self, tokens: Any) -> Any:
            return nn.functional.linear(tokens, self.weight.to(tokens.dtype))

    for stored in ("float64", "float32", "bfloat16"):
        work = work_of(Casted(8, 6).to(getattr(torch, stored)), BrickId.UP_PROJECTION)
        unknown = f"{UNKNOWN_TYPE} (weights in {stored})"
        assert (work.dtype, work.flops(1, 8), work.bytes(1, 8)) == (unknown, 2 * 8 * 6, None)
    assert work_of(nn.Linear(8, 6).double(), BrickId.UP_PROJECTION).dtype == "float64"
    assert work_of(nn.Linear(8, 6), BrickId.UP_PROJECTION).dtype == "float32"


def test_weights_of_whole_numbers_have_no_type() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 8, 6
            self.qweight = nn.Buffer(torch.zeros(6, 8, dtype=torch.int8))
            self.scales = nn.Buffer(torch.zeros(6, dtype=torch.float16))

    assert work_of(Quantised(), BrickId.UP_PROJECTION).dtype == f"{UNKNOWN_TYPE} (weights in int8)"


@pytest.fixture
def _precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_precision")
def test_products_of_float32_that_torch_may_do_lower_have_no_type() -> None:
    assert multiplied.types_of_float32("cpu") == ("float32", "float32")
    torch.set_float32_matmul_precision("medium")
    assert multiplied.types_of_float32("cpu") == (UNKNOWN_TYPE, "float32")
    assert multiplied.types_of_float32("cuda") == ("tf32", "tf32")
    assert multiplied.types_of_float32("meta") == (UNKNOWN_TYPE, UNKNOWN_TYPE)


@pytest.mark.usefixtures("_precision")
def test_a_change_of_what_float32_multiplies_is_followed() -> None:
    model, ids = model_of("qwen2"), words(1, 6)

    def medium() -> None:
        torch.set_float32_matmul_precision("medium")

    *_, last = each_step(model, lambda: model(ids), medium, *[lambda: model(ids)] * 20)
    assert last["q_proj"].dtypes == last["sdpa"].dtypes == {UNKNOWN_TYPE}


def test_to_ask_for_the_type_takes_less_than_a_microsecond() -> None:
    model = model_of("qwen2")
    attachment = attach(model, BrickProfiler(recorder=Memory()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        took_s = min(timeit.repeat(attachment.steps.ask, number=1_000, repeat=20)) / 1_000
    attachment.detach()
    assert took_s < 1e-6
