"""Tests with real programs under `cbtop run`: their gradients or their loss scale become wrong.

Each program prints its own norms, so that cbtop's norms can be compared.
"""

from __future__ import annotations

import pytest

from cbtop.viewmodels.gradients import GradientsView
from tests.real.programs import Outcome, Run

pytest.importorskip("torch", reason="torch is not installed: make torch")


def gradients_of(outcome: Outcome) -> GradientsView:
    assert outcome.view.training is not None
    assert outcome.view.training.gradients is not None
    return outcome.view.training.gradients


def printed(outcome: Outcome) -> dict[int, list[float]]:
    """Return the figures that the program printed, by the number of the step."""
    rows = [line.split() for line in outcome.output.splitlines()]
    return {int(number): [float(figure) for figure in figures] for number, *figures in rows}


def assert_the_norm_is_that_of_the_program(outcome: Outcome) -> None:
    norm = gradients_of(outcome).norm
    assert norm is not None
    assert norm.norm == pytest.approx(printed(outcome)[norm.step][0], rel=1e-3)


# The default run skips this test, because test_gradients.py tests the same, with a model in this process.
@pytest.mark.slow
def test_a_layer_whose_gradient_is_nan_is_named_with_its_step(run: Run) -> None:
    faulty, healthy = run.faulty("nan_gradient", "gradient-not-finite"), run.healthy("nan_gradient")
    fault = gradients_of(faulty).fault
    assert fault is not None
    assert (fault.parameter, fault.kind, fault.step, fault.is_certain) == ("layers.2.down.bias", "NaN", 100, True)
    assert faulty.warnings == {"gradient-not-finite"}
    assert gradients_of(healthy).fault is None
    assert not healthy.warnings
    for outcome in (faulty, healthy):
        assert_the_norm_is_that_of_the_program(outcome)


@pytest.mark.slow  # slow, because a CPU takes long for float16
def test_a_loss_that_overflows_lowers_the_scale_again_and_again(run: Run) -> None:
    faulty, healthy = run.faulty("scaler_overflow", "loss-scale-falling"), run.healthy("scaler_overflow")
    for outcome in (faulty, healthy):
        found, of_program = gradients_of(outcome), printed(outcome)
        assert found.fault is None  # A scaler skips a step that overflows, so this is not a fault.
        assert found.loss_scale is not None
        after = found.loss_scale.updates + 1  # The program prints the scale before it updates it.
        assert found.loss_scale.scale == of_program.get(after, [0.0, found.loss_scale.scale])[1]
        assert_the_norm_is_that_of_the_program(outcome)
    assert faulty.warnings == {"loss-scale-falling"}
    assert not healthy.warnings
