"""Tests of healthy models: the guard raises no alarm in 10,000 steps.

The models have padding, masks, experts, autocast and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make torch")

from cbtop.profiler.instrument import attach, uninstall  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.guard_messages import GuardedSteps  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip

STEPS = 1_700  # number of steps for each of the six kinds of models
Made = tuple[Any, Callable[[int], None]]  # a model, and a function that runs step number n of the model

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def left_padded(number: int) -> tuple[Any, Any]:
    """Ids and a mask: the first of two sequences begins with up to 7 positions of padding."""
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, : number % 8] = 0
    return torch.randint(64, (2, 8)), mask


def mlp() -> Made:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, 16), nn.LogSoftmax(-1)
    )
    return model, lambda _: model(torch.randn(4, 16))


def gpt() -> Made:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()

    def step(number: int) -> None:
        ids, mask = left_padded(number)
        model(ids, attention_mask=mask)

    return model, step


def bert() -> Made:
    config = transformers.BertConfig(**SMALL, intermediate_size=64, attn_implementation="eager")
    model = transformers.BertModel(config).eval()

    def step(number: int) -> None:
        ids, mask = left_padded(number)
        model(ids, attention_mask=mask.flip(1))

    return model, step


def experts() -> Made:
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    model = transformers.MixtralForCausalLM(config).eval()

    def step(number: int) -> None:
        ids, mask = left_padded(number)
        model(ids, attention_mask=mask)

    return model, step


def convolutions() -> Made:
    block = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)]
    model = nn.Sequential(*block)
    return model, lambda _: model(torch.randn(2, 3, 8, 8))


def trained_with_autocast() -> Made:
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=5)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp, gpt, bert, experts, convolutions, trained_with_autocast])
def test_a_healthy_model_raises_no_alarm(make: Callable[[], Made], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    memory = Memory()
    model, step = make()
    try:
        attach(model, BrickProfiler(recorder=memory), guard="log")
        with torch.set_grad_enabled(make is trained_with_autocast):
            for number in range(STEPS):
                step(number)
            # Plant a fault at the end, to see that the guard was still active.
            next(model.parameters()).data.fill_(torch.nan)
            step(0)
    finally:
        uninstall()
    reports = [said for said in memory.said if isinstance(said, GuardedSteps)]
    assert [said.faulty for said in reports[:-1]] == [0] * (len(reports) - 1)
    assert reports[-1].faulty == 1
    assert reports[-1].checked >= STEPS - 10
    assert len(caplog.records) == 1
