"""Tests of claims in module docstrings that import contracts cannot check."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
import tomllib
from importlib import import_module
from pathlib import Path

import cbtop.viewmodels
from cbtop.version import __version__

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"sched_getaffinity", "cpu_count", "set_num_threads", "get_num_threads", "threading_layer"}


def names_in(path: Path) -> set[str]:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.attr for node in tree if isinstance(node, ast.Attribute)}


def test_viewmodels_are_frozen() -> None:
    for module in pkgutil.iter_modules(cbtop.viewmodels.__path__, "cbtop.viewmodels."):
        for _, found in inspect.getmembers(import_module(module.name), dataclasses.is_dataclass):
            if found.__module__ == module.name:
                assert found.__dataclass_params__.frozen, found


def test_backends_is_the_only_file_of_compute_that_asks_what_the_machine_has() -> None:
    asking = {path.name for path in (ROOT / "compute").rglob("*.py") if names_in(path) & MACHINE}
    assert asking == {"backends.py"}


def test_the_version_is_read_without_importing_anything() -> None:
    tree = ast.parse((ROOT / "cbtop/version.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_a_secret_key_is_read_by_load_pair_alone() -> None:
    tree = ast.parse((ROOT / "protocol/keys.py").read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    asking = {f.name for f in functions for n in ast.walk(f) if isinstance(n, ast.Name) and n.id == "_secret_path"}
    assert asking == {
        "make_pair",
        "load_pair",
        "daemon_keys",
    }  # The three functions that use the file of the daemon's key: to write it, read it, or check whether it exists.


def test_the_changelog_has_the_version_with_its_date() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections[0] == "## [Unreleased]"
    assert re.fullmatch(rf"## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", sections[1])


def test_every_guarantee_has_tests_and_every_one_of_them_exists() -> None:
    held_by = tomllib.loads((ROOT / "tests/guarantees.toml").read_text(encoding="utf-8"))
    page = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    assert re.findall(r"^- \*\*(\w+)\*\* ", page, re.MULTILINE) == list(held_by)
    for guarantee, tests in held_by.items():
        assert tests, guarantee
        for path, _, test in (name.partition("::") for name in tests):
            code = (ROOT / path).read_text(encoding="utf-8")
            assert (f"def {test}(" if test else "def test_") in code, f"{guarantee}: {path}::{test}"
