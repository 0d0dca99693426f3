"""Tests with pairs of programs under `cbtop run`.

An earlier version showed a wrong figure for each pair: FLOP, bytes, memory or calls.
"""

from __future__ import annotations

import pytest

from tests.real.programs import Outcome, Run

pytest.importorskip("torch", reason="torch is not installed: make torch")


def calls_a_step(outcome: Outcome, brick: str) -> float:
    assert outcome.view.steps is not None
    return outcome.brick(brick).count / outcome.view.steps.recorded


@pytest.mark.slow
def test_active_adapters_of_peft_count_as_work_disabled_ones_do_not(run: Run) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    faulty, healthy = run("lora_by_peft", "faulty"), run("lora_by_peft", "healthy")
    # FLOP for 64 tokens, of the projection and of its adapter
    base, adapter = 2 * 64 * 256 * 256, 2 * 2 * 64 * 256 * 64
    for outcome, flops in ((faulty, 3 * base + 2 * adapter), (healthy, 3 * base)):
        row = outcome.brick("QkvProjection")
        assert row.flops == pytest.approx(row.count / 3 * flops)
        assert not outcome.warnings


@pytest.mark.slow
def test_a_linear_of_its_own_class_has_no_flop_and_a_plain_one_has(run: Run) -> None:
    faulty, healthy = run("lora_by_hand", "faulty"), run("lora_by_hand", "healthy")
    for outcome in (faulty, healthy):
        # The layer also computes something besides its own weight, so its work is unknown.
        assert outcome.brick("UpProjection").flops is None
        row = outcome.brick("DownProjection")
        assert row.flops == pytest.approx(row.count * 2 * 64 * 2048 * 512)
        assert not outcome.warnings


@pytest.mark.slow
def test_autocast_products_are_of_bfloat16_and_plain_ones_of_float32(run: Run) -> None:
    faulty, healthy = run("autocast", "faulty"), run("autocast", "healthy")
    for outcome, dtypes in ((faulty, ("float32",)), (healthy, ("bfloat16",))):
        row = outcome.brick("Linear")
        assert row.dtypes == dtypes
        assert row.flops == pytest.approx(row.count * 2 * 256 * 1024 * 4096)
        assert not outcome.warnings


@pytest.mark.slow
def test_dynamically_quantised_weights_count_a_byte_each(run: Run) -> None:
    faulty, healthy = run("quantized_linear", "faulty"), run("quantized_linear", "healthy")
    weights, values = 1024 * 4096, 4 * 8 * (1024 + 4096)
    for outcome, size, dtype in ((faulty, 1, "int8"), (healthy, 4, "float32")):
        row = outcome.brick("Linear")
        assert row.dtypes == (dtype,)
        assert row.bytes == pytest.approx(row.count * (size * weights + values), rel=0.01)
        assert row.percent is not None
        assert row.percent > 50
        assert not outcome.warnings


@pytest.mark.slow
def test_an_embedding_computed_in_each_step_is_seen_in_each(run: Run) -> None:
    faulty, healthy = run("recomputed_embeddings", "faulty"), run("recomputed_embeddings", "healthy")
    assert calls_a_step(faulty, "Embedding") == 1
    assert calls_a_step(faulty, "Linear") == calls_a_step(healthy, "Linear") + 2
    assert "Embedding" not in [row.name for row in healthy.view.bricks]
    # FLOP of the layers for 64 tokens, and FLOP of the encoder for a text of 256 tokens
    layers, encoder = 4 * 2 * 64 * 256 * 256, 2 * 2 * 256 * 256 * 1024
    for outcome, flops in ((faulty, layers + encoder), (healthy, layers)):
        assert outcome.view.steps is not None
        assert outcome.brick("Linear").flops == pytest.approx(outcome.view.steps.recorded * flops)
        assert not outcome.warnings


@pytest.mark.slow
def test_memory_that_grows_is_shown_to_grow_and_no_verdict_is_given(run: Run) -> None:
    grown = {}
    for kind in ("faulty", "healthy"):
        outcome = run("memory_growth", kind)
        rows = [
            row for view in outcome.views() for machine in view.machines for row in machine.processes if row.source
        ]
        resident = [row.resident_bytes for row in rows if row.resident_bytes]
        grown[kind] = resident[-1] - resident[1]
        assert not outcome.warnings
    assert grown["faulty"] > 100e6 > 2 * grown["healthy"]


@pytest.mark.slow
def test_generation_has_a_step_for_each_token_with_and_without_a_cache(run: Run) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for kind in ("faulty", "healthy"):
        outcome = run("without_cache", kind)
        generated_a_second = float(outcome.output)
        steps_per_sec = [steps.steps_per_sec for steps in outcome.view.phases if steps.steps_per_sec]
        # The program measures its rate with the warm-up steps, so the phases are added up.
        assert sum(steps_per_sec) == pytest.approx(generated_a_second, rel=0.3)
        assert not outcome.warnings
