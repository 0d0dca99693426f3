"""Tests of modules that have children and also run operations themselves.

These operations are one row, with the name of the module's class.
"""

from __future__ import annotations

import pytest

from tests.real.programs import Run

pytest.importorskip("torch", reason="torch is not installed: make torch")
# The default run skips this file: test_planning.py and test_training_calls.py of the instrumentation test the names.
pytestmark = pytest.mark.slow


def test_operations_of_a_block_have_its_name_and_calls_of_children_have_not(run: Run) -> None:
    faulty, healthy = run("own_operations", "faulty"), run("own_operations", "healthy")
    assert faulty.view.bricks[0].name == "ScanBlock"
    assert healthy.view.bricks[0].name == "Decay"
    share = {outcome: outcome.view.bricks[0].percent or 0 for outcome in (faulty, healthy)}
    assert min(share.values()) > 50
    assert "ScanBlock" not in {row.name for row in healthy.view.bricks if (row.percent or 0) > 25}
    for outcome in (faulty, healthy):
        books = outcome.view.books
        assert books is not None
        assert books.close
        assert "not instrumented" not in outcome.text


def test_the_backward_of_a_blocks_operations_has_its_name(run: Run) -> None:
    outcome = run("own_operations", "faulty_train")
    assert {row.name for row in outcome.view.bricks[:2]} == {"ScanBlock", "ScanBlock backward"}
