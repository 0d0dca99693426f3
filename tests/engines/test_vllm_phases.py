"""Phases, tokens and cached prefixes of a real vLLM, compared with vLLM's own counts."""

from __future__ import annotations

import json

import pytest

import cbtop
from cbtop.protocol.vocabulary import WARM_UP
from tests.engines.runs import Recorded, record

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("phases"), "vllm_phases.py")


def test_requests_of_vllm_have_its_own_counts_of_tokens(served: Recorded) -> None:
    own = json.loads(served.written.read_text())
    with cbtop.read(served.recording) as run:
        table = run.requests()
    columns = (table.column(name).tolist() for name in ("prompt_tokens", "cached_tokens", "output_tokens"))
    assert sorted(map(list, zip(*columns, strict=True))) == sorted(own)
    assert any(cached for _, cached, _ in own), "no prefix was cached"


def test_steps_of_vllm_have_all_phases_and_as_many_tokens_as_it_computed(served: Recorded) -> None:
    own = json.loads(served.written.read_text())
    with cbtop.read(served.recording) as run:
        steps = run.steps()
        bricks = set(run.bricks().column("brick"))
    phases = {phase.removesuffix(WARM_UP) for phase in steps.column("phase")}
    assert phases == {"prefill", "extend", "mixed", "decode"}
    # The last token of a request is not computed. Runs without requests, such as vLLM's own warm-up, are no steps.
    assert steps.column("tokens").sum() == sum(prompt - cached + output - 1 for prompt, cached, output in own)
    assert {"Embedding", "QkvProjection", "Attention (fused)", "LmHead"} <= bricks
