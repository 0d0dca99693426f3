"""An unedited program with a real vLLM under `cbtop run`.

The recorded times of its requests equal the times that vLLM measured.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import cbtop
from tests.engines.runs import Recorded, record

pytestmark = pytest.mark.engines
REQUESTS, TOKENS = 12, 24
LATER_S = 0.5  # the longest time from the scheduler to the front end for a token, also on a busy machine
DECODES_AGREE_S = 0.1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a run that writes a row (TTFT in s, decode time in s, tokens) for each request."""
    return record(tmp_path_factory.mktemp("engines"), "vllm_requests.py")


def test_each_request_of_vllm_has_the_times_that_vllm_measured(recorded: Recorded) -> None:
    own = np.array(json.loads(recorded.written.read_text()))
    with cbtop.read(recorded.recording) as run:
        table = run.requests()
    assert len(table) == len(own) == REQUESTS
    assert table.column("output_tokens").tolist() == [TOKENS] * REQUESTS
    assert set(table.column("reason")) == {"length"}
    first_s = np.sort(table.column("first_token_us") / 1e6)
    assert (np.sort(own[:, 0]) - first_s >= 0).all()
    assert (np.sort(own[:, 0]) - first_s <= LATER_S).all()
    decode_s = np.sort((table.column("duration_us") - table.column("first_token_us")) / 1e6)
    np.testing.assert_allclose(decode_s, np.sort(own[:, 1]), atol=DECODES_AGREE_S)


def test_the_summary_of_vllm_has_its_latencies(recorded: Recorded) -> None:
    assert any("cbtop: engine TTFT p50 " in line for line in recorded.lines())


def test_steps_of_vllm_prepare_inputs_and_sample(recorded: Recorded) -> None:
    with cbtop.read(recorded.recording) as run:
        bricks, steps = set(run.bricks().column("brick")), run.steps()
    assert {"PrepareInputs", "Sampling", "Detokenize"} <= bricks
    assert np.isin(["decode"], steps.column("phase")).all()
