"""Tests with real programs that train on two ranks under `cbtop run`. The ranks communicate by gloo."""

from __future__ import annotations

import re

import pytest

from cbtop.protocol.vocabulary import TrainingPart
from cbtop.viewmodels.source import SourceView
from tests.real.programs import Outcome, Run

pytest.importorskip("torch", reason="torch is not installed: make torch")

NEAR = 5.0  # allowed difference in percent of a step
# Verdicts that may be right in both programs: ranks and threads of gloo share two processors, so they wait for each
# other.
OF_BOTH = {"starved", "bimodal-latency", "outlier-mean"}


def exposed_percent(view: SourceView) -> float:
    """Return the share of exposed communication in a step. Check that all shares add up to 100 %."""
    assert view.phase == "train"
    assert view.training is not None
    assert sum(part.percent for part in view.training.parts) == pytest.approx(100)
    part = view.training.part(TrainingPart.COMMUNICATION)
    return part.percent if part else 0.0


def verdicts_of(view: SourceView) -> set[str]:
    return {verdict.id for verdict in view.verdicts}


def differs_by(outcome: Outcome) -> float:
    """Return the largest difference between the shares that cbtop shows and the shares that the program measured.

    The shares of exposed communication of both ranks are compared.
    """
    measured = {int(rank): float(share) for rank, share in re.findall(r"rank (\d): ([\d.]+) %", outcome.output)}
    assert len(measured) == len(outcome.ranks) == 2
    return max(abs(exposed_percent(view) - measured[view.rank or 0]) for view in outcome.ranks)


@pytest.mark.slow
def test_exposed_gradients_are_named_with_the_share_that_ddp_itself_measures(run: Run) -> None:
    for _ in range(3):  # Try three times, because cbtop and the program may have used different steps.
        faulty = run.faulty("ddp_exposed", "communication-exposed")
        if differs_by(faulty) <= NEAR:
            break
    assert differs_by(faulty) <= NEAR
    for view in faulty.ranks:
        assert "communication-exposed" in verdicts_of(view) or "starved" in verdicts_of(view)
        assert verdicts_of(view) <= {"communication-exposed"} | OF_BOTH
        assert view.training is not None
        assert view.training.communication is not None
        assert [row.name for row in view.training.communication.exposed] == ["GradientSync, backward"]
        # The program sends all gradients together at the end, so nothing overlaps.
        assert view.training.communication.overlapped_us == 0


@pytest.mark.slow
def test_gradients_that_are_small_next_to_the_computation_have_no_warning(run: Run) -> None:
    healthy = run.healthy("ddp_exposed")
    for view in healthy.ranks:
        assert "communication-exposed" not in verdicts_of(view)
    assert healthy.warnings <= OF_BOTH


@pytest.mark.slow
def test_a_rank_that_waits_names_the_slow_one_instead_of_the_communication(run: Run) -> None:
    faulty = run.faulty("ddp_slow_rank", "waits-for-rank")
    waits, slow = faulty.ranks
    (verdict,) = (one for one in waits.verdicts if one.id in ("waits-for-rank", "starved"))
    assert "waits for rank 1" in verdict.sentence or verdict.id == "starved"
    for view in (waits, slow):
        assert verdicts_of(view) <= {"waits-for-rank"} | OF_BOTH
    assert "waits-for-rank" not in verdicts_of(slow)
    assert exposed_percent(waits) > exposed_percent(slow) + 10
    # The comparison of the ranks must remain after rank 1 has ended.
    trained = [view for view in faulty.views() if view.rank == 0 and view.training and view.training.steps >= 64]
    assert trained
    for view in trained:
        assert view.training is not None
        assert view.training.communication is not None
        assert view.training.communication.ranks is not None


@pytest.mark.slow
def test_ranks_that_are_equally_fast_wait_for_none(run: Run) -> None:
    for view in run.healthy("ddp_slow_rank").ranks:
        assert verdicts_of(view) <= OF_BOTH | {"compute-bound"}


@pytest.mark.slow
def test_gathering_and_scattering_of_fsdp2_are_exposed_by_pass(run: Run) -> None:
    for _ in range(3):  # Try three times, because cbtop and the program may have used different steps.
        faulty, healthy = run.faulty("fsdp2", "communication-exposed"), run.healthy("fsdp2")
        if max(differs_by(faulty), differs_by(healthy)) <= NEAR:
            break
    assert max(differs_by(faulty), differs_by(healthy)) <= NEAR
    for view in faulty.ranks:
        assert "communication-exposed" in verdicts_of(view) or "starved" in verdicts_of(view)
        assert view.training is not None
        assert view.training.communication is not None
        kinds = {row.name for row in view.training.communication.exposed}
        assert kinds == {"AllGather, forward", "AllGather, backward", "ReduceScatter, backward"}
        inside = sum(row.percent or 0 for row in view.bricks if row.name in ("AllGather", "ReduceScatter"))
        assert inside == pytest.approx(exposed_percent(view), abs=2 * NEAR)
    shares = [max(map(exposed_percent, outcome.ranks)) for outcome in (faulty, healthy)]
    assert shares[0] > 2 * shares[1]
