"""Tests of latency verdicts that are withheld: a wait for a processor or a growing cache explains the latency."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.verdicts import judged
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run
from tests.representatives import first_by_default

# 30 % of the steps take 1.5 times as long. The additional time is 13 % of all time.
TWO_KINDS = Decoding(step_factor=lambda step: 1.5 if step * 7_919 % 100 < 30 else 1.0)
# Each hundredth step takes 20 times as long. The additional time is 16 % of all time.
OUTLIERS = Decoding(step_factor=lambda step: 20.0 if step % 100 == 50 else 1.0)
# The first six steps take 30 times as long. The additional time is 29 % of all time.
SLOW_START = Decoding(step_factor=lambda step: 30.0 if step < 6 else 1.0)


@first_by_default(
    ("plan", "id"), [(TWO_KINDS, "bimodal-latency"), (OUTLIERS, "outlier-mean"), (SLOW_START, "warm-up")], 3
)
@first_by_default(("waited", "is_explained"), [(19.0, True), (3.0, False)], 3)
def test_longer_steps_are_no_verdict_if_waits_explain_half_of_them(
    tmp_path: Path, plan: Decoding, id: str, waited: float, is_explained: bool
) -> None:
    view = judged(with_parts(run(tmp_path, plan).one(), waiting_percent=waited))
    assert [verdict.id for verdict in view.verdicts] == ([] if is_explained else [id])


def test_steps_that_grow_with_their_cache_are_not_of_two_kinds(tmp_path: Path) -> None:
    plan = Decoding(
        cached=lambda step: 100 + step,
        brick_factor={"AttentionScore": lambda step: 1 + 4 * (step > 250) + step / 150},
        seconds=15,
    )
    found = {}
    for each in (plan, replace(plan, cached=None)):
        directory = tmp_path / str(len(found))
        directory.mkdir()
        found[each.cached is not None] = [verdict.id for verdict in run(directory, each).one().verdicts]
    assert found[True] == ["grows-with-cache"]
    assert "bimodal-latency" in found[False]
