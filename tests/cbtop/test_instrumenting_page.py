"""The Python code in README.md and docs/instrumenting.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cbtop.compute import ceilings
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, TIER
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import record_of, source_of

ROOT = Path(__file__).parents[2]


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_python_of_the_readme_records_a_brick(runtime: Path) -> None:
    names: dict[str, Any] = {"x": [1.0], "rms_norm": lambda x: x}
    for snippet in snippets("README.md"):
        exec(snippet, names)
    names["profiler"].close()
    assert [row.name for row in source_view(record_of(source_of(runtime))).bricks] == ["RmsNorm"]


def test_the_torch_model_of_the_page_is_attached_and_reported(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (snippet,) = [text for text in snippets("docs/instrumenting.md") if "import torch" in text]
    exec(snippet, {})
    assert "UpProjection" in capsys.readouterr().out


def test_the_pages_own_process_has_its_model_and_its_brick_on_the_roofline(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measure the peak rate with a small buffer, which is fast. The result does not matter here.
    monkeypatch.setattr(ceilings, "dram_buffer_bytes", lambda: 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 1)
    names: dict[str, Any] = {"x": [1.0], "rms_norm": lambda x: x}
    for snippet in snippets("docs/instrumenting.md"):
        if "import torch" not in snippet and "wgpu" not in snippet:
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
