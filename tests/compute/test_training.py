"""Tests of the training of adapters: gradients of whole models, a loss that decreases, and the records of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute import backends, ceilings
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, Projection, read_model
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.decoder.reference import forward_reference
from cbtop.compute.errors import ComputeError, LossError, ModelError
from cbtop.compute.kernels import cross_entropy, rms_norm_backward
from cbtop.compute.settings import WorkloadOptions, crossovers, with_crossovers
from cbtop.compute.training.adapters import Adapter
from cbtop.compute.training.text import TEXT, batches
from cbtop.compute.training.times import PartTimes
from cbtop.compute.training.trainer import Trainer
from cbtop.compute.training.workload import run
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Ceiling, CheckResult, Manifest, Node
from cbtop.protocol.structure_messages import Conditions
from cbtop.protocol.training_messages import TrainingTimes
from cbtop.protocol.vocabulary import TRAIN, NodeKind, TrainingPart
from tests.representatives import first_by_default

from .conftest import ListRecorder

TOKENS = 12
STEP = 1e-4  # step of a finite difference
TRAINABLE = ("qwen2", "qwen3", "llama", "phi3", "gemma3", "stablelm")
SILENT = BrickProfiler(enabled=False)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small buffer to measure peak rates, and pretend that kernels are compiled.

    A gigabyte is too much for a test, and a first run would compile in a forked process.
    """
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER_BYTES", 16 << 20)
    monkeypatch.setattr(backends, "is_first_run", lambda: False)


@pytest.fixture
def trained(model_files: dict[str, Path]) -> Trainer:
    return trainer_of(read_model(model_files["qwen2"], FAMILIES))


def trainer_of(model: Model, profiler: BrickProfiler = SILENT, threads: int = 1, **how: Any) -> Trainer:
    return Trainer(model, "numba", threads, profiler, TOKENS, **how)


def random_adapters(trainer: Trainer) -> None:
    """Set the adapters to random values. With the initial zeros, some gradients would be zero."""
    weights = trainer.parameters.weights
    weights[:] = 0.05 * np.random.default_rng(5).standard_normal(weights.shape)


@dataclass(frozen=True)
class Adapted:
    """A matrix in float64 with its low-rank adapter, for the reference decoder."""

    matrix: Any
    adapter: Adapter
    wide: list[Any]  # the two factors of the adapter (down and up) in float64

    @property
    def rows(self) -> int:
        return int(self.matrix.rows)

    @property
    def columns(self) -> int:
        return int(self.matrix.columns)

    def dequantized(self, rows: Any) -> Any:
        down, up = self.wide
        return self.matrix.dequantized(rows).astype(np.float64) + up[rows] @ down


def adapted(trainer: Trainer) -> tuple[Model, list[list[Any]]]:
    """Return the model with its adapters in float64, and these adapters (down and up), which a test may change."""
    layers, every = [], []
    for weights, adapters in zip(trainer.model.layers, trainer.parameters.layers, strict=True):
        products = []
        for projection, adapter in zip((weights.q, weights.v), adapters, strict=True):
            wide = [one.weights.astype(np.float64) for one in (adapter.down, adapter.up)]
            every.append(wide)
            matrix: Any = Adapted(projection.weight, adapter, wide)
            products.append(Projection(matrix, projection.bias))
        layers.append(replace(weights, q=products[0], v=products[1]))
    return replace(trainer.model, layers=tuple(layers)), every


def loss_of(model: Model, batch: list[int]) -> float:
    """Return the mean loss of the model on one batch, computed in float64."""
    logits, losses = forward_reference(model, batch[:-1], TOKENS), np.zeros(len(batch) - 1)
    cross_entropy.reference(logits, np.array(batch[1:]), losses)
    return float(losses.mean())


@first_by_default(
    "family",
    [
        one if one in ("qwen2", "gemma3", "stablelm") else pytest.param(one, marks=pytest.mark.slow)
        for one in TRAINABLE
    ],
)
def test_gradients_of_a_whole_model_are_those_of_finite_differences(
    family: str, model_files: dict[str, Path]
) -> None:
    trainer = trainer_of(read_model(model_files[family], FAMILIES))
    random_adapters(trainer)
    batch = next(batches(TOKENS, trainer.model.vocabulary, 1))
    loss = trainer.gradients(batch)
    model, wide = adapted(trainer)
    assert loss == pytest.approx(loss_of(model, batch), rel=1e-4)
    factors = [one for layer in trainer.parameters.layers for adapter in layer for one in (adapter.down, adapter.up)]
    rng = np.random.default_rng(2)
    for factor, exact in zip(factors, [one for both in wide for one in both], strict=True):
        # In the direction of the gradient, the loss changes most. A random direction finds errors in single elements.
        for direction in (factor.gradient, rng.standard_normal(factor.gradient.shape)):
            unit = direction / np.linalg.norm(direction)
            sums = []
            for sign in (1, -1):
                exact += sign * STEP * unit
                sums.append(loss_of(model, batch))
                exact -= sign * STEP * unit
            slope = (sums[0] - sums[1]) / (2 * STEP)
            assert (factor.gradient * unit).sum() == pytest.approx(
                slope, rel=2e-3, abs=2e-3 * np.linalg.norm(factor.gradient)
            )


def test_every_brick_of_a_step_equals_its_reference(trained: Trainer) -> None:
    random_adapters(trained)
    found = trained.verify_step(next(batches(TOKENS, trained.model.vocabulary, 1)))
    assert all(one.passed for one in found)
    names = {one.brick for one in found}
    assert {"QkvProjection", "Lora", "Loss", "Loss backward", "LmHead backward", "Lora backward"} <= names


def test_a_wrong_gradient_is_found_before_training(
    model_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = rms_norm_backward.RMS_NORM_BACKWARD

    def scaled(*arguments: Any) -> None:
        kernel.implementation(*arguments)
        arguments[5][:] *= 1.5

    monkeypatch.setattr(rms_norm_backward, "RMS_NORM_BACKWARD", replace(kernel, implementation=scaled))
    trainer = trainer_of(read_model(model_files["qwen2"], FAMILIES))
    found = trainer.verify_step(next(batches(TOKENS, trainer.model.vocabulary, 1)))
    assert {one.brick for one in found if not one.passed} == {"RmsNorm backward", "AddRmsNorm (fused) backward"}


def test_the_loss_falls_in_30_steps_and_the_weights_of_the_model_stay(trained: Trainer) -> None:
    matrices = [one.weight.data for layer in trained.model.layers for one in (layer.q, layer.v, layer.down)]
    before = [data.copy() for data in matrices]
    batch = next(batches(TOKENS, trained.model.vocabulary, 1))
    losses = [trained.step(repeat(batch)) for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    assert all(np.array_equal(data, old) for data, old in zip(matrices, before, strict=True))


def test_two_threads_train_the_same_weights_as_one(model_files: dict[str, Path]) -> None:
    model, found = read_model(model_files["qwen2"], FAMILIES), []
    with with_crossovers(replace(crossovers(), product_bytes=1, attention_products=1)):
        for threads in (1, 2):
            trainer = trainer_of(model, threads=threads)
            for batch in islice(batches(TOKENS, model.vocabulary, 1), 3):
                trainer.step(iter([batch]))
            found.append(trainer.parameters.weights)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_conditions_of_contracts_hold_in_every_step(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    trainer = trainer_of(read_model(model_files["qwen2"], FAMILIES), profiler, check_contracts=True)
    for _ in range(2):
        trainer.step(batches(TOKENS, 512, 1))
    found = [one for one in recorder.messages if isinstance(one, CheckResult)]
    assert all(one.passed for one in found)
    assert {"Optimizer", "Attention (fused) backward"} <= {one.brick for one in found}


def test_a_step_is_recorded_with_forward_and_backward_in_the_same_layers(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    trainer = trainer_of(read_model(model_files["qwen2"], FAMILIES), profiler)
    trainer.step(batches(TOKENS, 512, 1))
    nodes = {one.id: one for one in recorder.messages if isinstance(one, Node)}
    step = next(one for one in nodes.values() if one.parent is None)
    assert step.name == TRAIN
    assert (step.id, TOKENS) in recorder.records
    bricks: dict[str, list[str]] = {}
    for one in nodes.values():
        if one.kind is NodeKind.BRICK:
            bricks.setdefault(nodes[one.parent].name if one.parent else "", []).append(one.name)
    layers = [names for names in bricks.values() if "Attention (fused)" in names]
    assert len(layers) == 2
    forward = [name for name in layers[1] if not name.endswith(" backward")]
    without = {"KvWrite", "ResidualAdd"}
    assert {f"{name} backward" for name in forward if name not in without} == {*layers[1]} - {*forward}
    # Nothing before the adapters of the first layer is trained, so its QKV projection has no backward pass.
    assert {*layers[1]} - {*layers[0]} - without == {"QkvProjection backward"}
    outside = bricks[TRAIN]
    assert {"DataWait", "ZeroGrad", "Loss", "Loss backward", "LmHead backward", "Optimizer"} <= {*outside}


def test_a_loss_that_is_not_finite_ends_training_before_the_weights_change(trained: Trainer) -> None:
    trained.model.final_norm.weight[:] = np.inf
    before = trained.parameters.weights.copy()
    with pytest.raises(LossError, match=r"the loss is (nan|inf) in training step 1;"):
        trained.step(batches(TOKENS, 512, 1))
    assert np.array_equal(trained.parameters.weights, before)


@pytest.mark.parametrize(("family", "what"), [("gemma2", "soft caps"), ("qwen3moe", "a mixture of experts")])
def test_a_model_that_cannot_be_trained_is_refused_by_what_it_has(
    family: str, what: str, model_files: dict[str, Path]
) -> None:
    with pytest.raises(ModelError, match=f"has {what}, which cannot be trained here"):
        trainer_of(read_model(model_files[family], FAMILIES))


def test_interleaved_weights_are_refused(model_files: dict[str, Path]) -> None:
    model = model_to_run(model_files["qwen2"])
    if model.lm_head.takes_int8:
        with pytest.raises(ModelError, match="has interleaved weights"):
            trainer_of(model)


def test_the_parts_of_steps_add_up_to_their_time() -> None:
    times = PartTimes(count(0, 10).__next__)
    for _ in range(70):
        for part in (TrainingPart.DATA_WAIT, TrainingPart.FORWARD, TrainingPart.BACKWARD, TrainingPart.FORWARD):
            times.end(part)
        times.end_step()
    found = times.latest()
    assert (found.phase, found.steps, found.wall_ns) == (TRAIN, 64, 64 * 50)
    assert [(one.name, one.sum_ns, one.p50_ns) for one in found.parts] == [
        ("data wait", 640, 10),
        ("forward", 1280, 20),
        ("backward", 640, 10),
        ("other", 640, 10),
    ]


def test_a_new_beginning_forgets_an_unfinished_step() -> None:
    times = PartTimes(iter([0, 5, 100, 110, 110]).__next__)
    times.end(TrainingPart.FORWARD)
    times.begin()
    times.end(TrainingPart.LOSS)
    times.end_step()
    assert [(one.name, one.sum_ns) for one in times.latest().parts] == [("loss", 10)]


def test_batches_are_parts_of_the_text() -> None:
    for batch in islice(batches(64, 512, 1), 5):
        assert bytes(batch).decode() in TEXT
        assert len(batch) == 65
    assert max(next(batches(64, 100, 1))) < 100


def steps(limit: int) -> Iterator[bool]:
    yield from [False] * limit
    yield from repeat(True)


def test_the_workload_announces_itself_trains_until_stopped_and_reports_the_loss(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    told: list[str] = []
    losses: dict[int, float] = {}
    options = WorkloadOptions(model=model_files["qwen2"], threads=1, context=TOKENS)
    stops = steps(30)
    run(options, profiler, lambda: next(stops), lambda what, done: told.append(what), losses.__setitem__)
    assert list(losses) == list(range(1, 31))
    assert np.mean([losses[n] for n in range(21, 31)]) < np.mean([losses[n] for n in range(1, 11)])
    kinds = list(dict.fromkeys(type(message) for message in recorder.messages))
    assert kinds[:5] == [Manifest, Conditions, CheckResult, Ceiling, Node]
    assert told == ["reading the model", "compiling kernels", "checking the bricks", "measuring ceilings", ""]
    assert sum(1 for tag, tokens in recorder.records if tokens == TOKENS) >= 30


def test_the_times_of_parts_are_announced_after_the_last_step(
    model_files: dict[str, Path], profiler: BrickProfiler, recorder: ListRecorder
) -> None:
    options = WorkloadOptions(model=model_files["qwen2"], threads=1, context=TOKENS, steps=2)
    run(options, profiler, lambda: False, lambda what, done: None, lambda done, loss: None)
    times = [one for one in recorder.messages if isinstance(one, TrainingTimes)][-1]
    assert times.steps == 2
    assert {part.name for part in times.parts} >= {"data wait", "forward", "loss", "backward", "optimizer"}


@pytest.mark.parametrize("tokens", [1, 65, 4096])
def test_a_step_of_too_few_or_too_many_tokens_is_refused(tokens: int, model_files: dict[str, Path]) -> None:
    options = WorkloadOptions(model=model_files["qwen2"], threads=1, context=tokens, steps=1)
    with pytest.raises(ComputeError, match=f"a training step of {tokens} tokens; give a context of 2 to 64"):
        run(options, SILENT, lambda: False, lambda what, done: None, lambda done, loss: None)
