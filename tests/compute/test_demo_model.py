"""Tests of the demo model's file: the file is written completely or not at all, and is always the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.compute import demo_model
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.demo_model import DEMO, TINY, write_model
from cbtop.compute.errors import ModelError
from cbtop.protocol.cache import cache_dir


def silent(text: str, fraction: float | None) -> None:
    pass


def test_the_same_seed_writes_the_same_file(tmp_path: Path, model_files: dict[str, Path]) -> None:
    write_model(tmp_path / "again.gguf", TINY, silent)
    assert (tmp_path / "again.gguf").read_bytes() == model_files["qwen2"].read_bytes()


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(text: str, fraction: float | None) -> None:
        if fraction is not None and fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "model.gguf", TINY, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_runs_from_nothing_to_all(tmp_path: Path) -> None:
    seen: list[float] = []
    write_model(tmp_path / "model.gguf", TINY, lambda text, fraction: seen.append(fraction or 0.0))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


def test_it_is_written_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "DEMO", TINY)
    calls: list[str] = []
    path = demo_model.demo_model(lambda text, fraction: calls.append(text))
    assert path.parent == tmp_path / "cbtop"
    calls.clear()
    assert demo_model.demo_model(lambda text, fraction: calls.append(text)) == path
    assert calls == []


WITHOUT_ROOM = """
import resource
from cbtop.compute import demo_model
demo_model.DEMO = demo_model.TINY
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    demo_model.demo_model(lambda text, fraction: None)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_named_with_the_way_out(tmp_path: Path) -> None:
    variables = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", WITHOUT_ROOM], env=variables, text=True)
    assert said.startswith(f"ModelError {tmp_path / 'cbtop' / 'demo-'}")
    assert "cannot be written (File too large (ulimit -f allows " in said
    assert "the demo's model of 82 MB; give another directory as" in said
    assert list((tmp_path / "cbtop").glob("demo-*")) == []


def test_a_cache_that_is_no_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cbtop").write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"cbtop/demo-.* cannot be written"):
        demo_model.demo_model(silent)


def test_the_mix_is_that_of_q4_k_m(model_files: dict[str, Path]) -> None:
    model = read_model(model_files["qwen2"], FAMILIES)
    assert [layer.down.weight.format.name for layer in model.layers] == ["Q6_K", "Q4_K"]
    assert model.lm_head.format.name == "Q6_K"
    assert model.lm_head is model.embedding


def test_the_demo_shape_is_a_whole_number_of_blocks() -> None:
    assert DEMO.hidden % 256 == DEMO.feed_forward % 256 == DEMO.hidden % DEMO.heads == 0


@pytest.mark.parametrize("value", ["", "relative/cache"])
def test_a_cache_home_that_is_not_absolute_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_dir() == Path.home() / ".cache" / "cbtop"
