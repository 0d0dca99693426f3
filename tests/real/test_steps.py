"""Tests with pairs of programs under `cbtop run` with slow steps: the faulty program gets the right verdict."""

from __future__ import annotations

import pytest

from tests.real.programs import OF_NEIGHBOURS, Run, has_compiler

pytest.importorskip("torch", reason="torch is not installed: make torch")


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        # The default run skips this case, because test_training.py tests a similar pair.
        pytest.param("pause_between_steps", "idle-between-steps", marks=pytest.mark.slow),
        pytest.param("slow_detokenizer", "idle-between-steps", marks=pytest.mark.slow),
        ("stalling_step", "outlier-mean"),
        ("two_code_paths", "bimodal-latency"),
        pytest.param("two_batch_shapes", "bimodal-latency", marks=pytest.mark.slow),
        pytest.param("recompiled", "recompilation", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_what_makes_steps_slow_is_named_and_a_twin_gets_no_warning(run: Run, script: str, verdict: str) -> None:
    if script == "slow_detokenizer":
        pytest.importorskip("transformers", reason="transformers is not installed")
    if script == "recompiled" and not has_compiler():
        pytest.skip("torch.compile finds no C++ compiler")
    faulty, healthy = run.faulty(script, verdict), run.healthy(script)
    assert verdict in faulty.verdicts or (verdict in OF_NEIGHBOURS and faulty.is_starved)
    assert faulty.warnings <= {verdict}
    assert not healthy.warnings


@pytest.mark.slow  # test_verdicts.py tests the rule
def test_a_process_that_shares_its_cpu_is_starved_one_alone_is_not(run: Run) -> None:
    faulty, healthy = run.faulty("starved", "starved"), run.healthy("starved")
    assert [verdict.id for verdict in faulty.view.verdicts] == ["starved"]
    assert "cbtop: warning starved: " in faulty.summary
    (evidence,) = [each for each in faulty.verdicts["starved"].evidence if each.name == "waited for a processor"]
    # Three processes of the program share one CPU. Other programs may use this CPU, too.
    assert evidence.value == pytest.approx(67, abs=22)
    assert not healthy.warnings


@pytest.mark.slow
def test_a_hanging_step_is_stuck_and_a_step_of_a_long_prompt_is_not(run: Run) -> None:
    faulty, healthy = run.faulty("long_prompt", "stuck"), run.healthy("long_prompt")
    assert "stuck" in faulty.during()
    assert "stuck" not in healthy.during()
    assert not healthy.warnings


@pytest.mark.slow
def test_slow_first_steps_are_a_warm_up_and_in_no_other_figure(run: Run) -> None:
    faulty, healthy = run("lazy_start", "faulty"), run("lazy_start", "healthy")
    for outcome in (faulty, healthy):
        assert not outcome.warnings
    assert faulty.view.warm_up is not None
    assert healthy.view.warm_up is not None
    assert faulty.view.warm_up.took_us > 2 * healthy.view.warm_up.took_us
    # The program has five slow steps at its start. At least four of these steps must count as warm-up.
    assert faulty.view.warm_up.took_us >= 0.8e6
    assert faulty.view.steps is not None
    assert faulty.view.steps.mean_us is not None
    assert faulty.view.steps.mean_us < 0.1e6


@pytest.mark.slow
def test_steps_that_grow_with_their_cache_are_told_from_short_texts(run: Run) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    faulty, healthy = run.faulty("growing_cache", "grows-with-cache"), run.healthy("growing_cache")
    if faulty.is_shared and "grows-with-cache" not in faulty.verdicts:
        pytest.skip("others use the processors: how long steps take follows them, not the cache")
    assert "grows-with-cache" in faulty.verdicts
    assert not faulty.warnings
    assert "grows-with-cache" not in healthy.verdicts
    assert not healthy.warnings
