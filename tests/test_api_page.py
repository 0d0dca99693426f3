"""docs/api.md has every public name, and each of them and its methods have a docstring."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import cbtop
import cbtop.trackers

PAGE = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)
# The package of each name that not every environment has.
NEEDED = {
    "cbtop.trackers.TransformersCallback": "transformers",
    "cbtop.trackers.LightningCallback": "lightning",
    "cbtop.trackers.AccelerateTracker": "accelerate",
    "cbtop.profiler.instrument.model_handle.ModelHandle": "torch",
}


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_the_page_has_every_public_name_once() -> None:
    public = {f"cbtop.{name}" for name in cbtop.__all__} - {"cbtop.__version__"}
    public |= {f"cbtop.trackers.{name}" for name in cbtop.trackers.__all__}
    assert public <= {*NAMES}
    assert len(NAMES) == len({*NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_and_its_methods_have_docstrings(name: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"{NEEDED[name]} is not installed: make torch")
    one = found(name)
    assert inspect.getdoc(one)
    members = vars(one).items() if inspect.isclass(one) else ()
    public = [
        (key, value)
        for key, value in members
        if not key.startswith("_") and isinstance(value, property | staticmethod | classmethod | type(lambda: 0))
    ]
    assert [key for key, value in public if not inspect.getdoc(getattr(one, key))] == []
