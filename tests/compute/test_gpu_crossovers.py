"""Tests of the size from which a GPU is faster (crossover), and of how the size of a model is counted.

The GPU is fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cbtop.compute import crossovers, gpu_crossovers
from cbtop.compute.crossovers import PairedTimes, Rung
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu_crossovers import DECODING, PROMPTS, layer_bytes, measure_gpu_crossovers
from cbtop.protocol.crossovers import NEVER, Crossover
from cbtop.protocol.vocabulary import Provenance
from tests.compute.fake_gpu import FakeGpu


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    monkeypatch.setattr(gpu_crossovers, "Gpu", lambda: found)
    monkeypatch.setattr(gpu_crossovers, "HIDDEN", (256, 512))
    monkeypatch.setattr(gpu_crossovers, "HIDDEN_OF_PROMPTS", 256)
    monkeypatch.setattr(gpu_crossovers, "TOKENS", (1, 4))
    return found


def test_each_step_runs_on_the_cpu_one_way_and_on_the_gpu_the_other(fake: FakeGpu) -> None:
    launched: list[str] = []
    fake.before_launch = lambda one: launched.append(one.entry)
    sizes: list[list[int]] = []

    def planted(rungs: Sequence[Rung]) -> list[PairedTimes]:
        """Return simulated times. For decoding, the GPU is faster from the second size on.

        For prompts, it is never faster.
        """
        sizes.append([rung.size for rung in rungs])
        for rung in rungs:
            rung.before()
            assert launched == []
            rung.after()
            assert launched
            launched.clear()
        gpu_ns = (200, 50) if len(sizes) == 1 else (200, 200)
        return [PairedTimes(rung.size, [100] * 9, [ns] * 9) for rung, ns in zip(rungs, gpu_ns, strict=True)]

    decoding, prompts = measure_gpu_crossovers(1, lambda name: None, planted)
    layer = [gpu_crossovers._model(hidden).weights_bytes // gpu_crossovers.LAYERS for hidden in (256, 512)]
    assert sizes == [layer, [layer[0], 4 * layer[0]]]
    assert decoding == Crossover(DECODING, layer[1], Provenance.MEASURED, "fake", 0.1, 0.05, 0.0)
    slower = f"slower at {4 * layer[0]:,}"
    assert prompts == Crossover(PROMPTS, NEVER, Provenance.STATIC, slower, 0.1, 0.2, 0.0)


def test_the_work_of_a_token_is_a_layers_weights_with_only_the_used_experts(
    model_files: dict[str, Path],
) -> None:
    for name in ("qwen2", "mixtral"):
        model = read_model(model_files[name], FAMILIES)
        experts = model.experts
        share = 1.0 if experts is None else experts.used / experts.count
        weights = 0.0
        for layer in model.layers:
            weights += sum(one.weight.size_bytes for one in (layer.q, layer.k, layer.v, layer.output))
            weights += share * sum(one.weight.size_bytes for one in (layer.gate, layer.up, layer.down))
        weights /= len(model.layers)
        # The bytes of a layer also include its norms, its biases and the router of its experts.
        assert weights <= layer_bytes(model_files[name]) < 1.1 * weights


@pytest.mark.gpu
def test_a_gpu_is_measured_beside_this_processor(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(crossovers, "ROUNDS", 5)
    decoding, prompts = measure_gpu_crossovers(1, lambda name: None)
    assert (decoding.name, prompts.name) == (DECODING, PROMPTS)
    for one in (decoding, prompts):
        assert one.note == gpu.name or one.note.startswith("unsure at ")
        assert one.before_us
        assert one.after_us
