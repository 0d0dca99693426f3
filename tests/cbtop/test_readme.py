"""What the README says of instrumenting one's own process, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cbtop.compute import ceilings
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, TIER
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import record_of, source_of

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_own_process_has_its_model_in_the_header_and_its_brick_on_the_roofline(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "dram_buffer_bytes", lambda: 1 << 20)  # nobody asks here how fast this machine is
    monkeypatch.setattr(ceilings, "ROUNDS", 1)
    section = README.read_text(encoding="utf-8").split("## Instrument your own process")[1].split("\n## ")[0]
    names: dict[str, Any] = {"x": [1.0], "rms_norm": lambda x: x}
    for snippet in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(snippet, names)
    names["profiler"].close()
    view = source_view(record_of(source_of(runtime)))
    assert (view.model, view.architecture, view.layers) == ("my-model", "llama", 32)
    assert {row.name for row in view.roofline.ceilings if row.kind != "cache"} == {
        "dram_read", "fma_float32", *["dot_int8"] * (TIER != "generic"), *["dot_bfloat16"] * BF16_PAYS,
        *["tiles_bfloat16"] * HAS_TILES,
    }  # fmt: skip
    assert [point.name for point in view.roofline.points] == ["DownProjection"]
    assert view.roofline.points[0].percent_of_roof is not None
    assert {row.name: row.budget_us_per_token for row in view.bricks} == {
        "RmsNorm": None,
        "Expert": None,
        "Experts": None,
        "DownProjection": 12.2,
    }
    assert view.books is not None
    assert view.books.adopted is not None
    assert (view.books.close, view.books.adopted.calls, view.outside) == (True, 2, None)
