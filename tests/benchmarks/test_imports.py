"""Every module of the benchmarks can be imported. No other test imports all of them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

import pytest

import benchmarks

MODULES = [found.name for found in walk_packages(benchmarks.__path__, "benchmarks.") if not found.name.endswith("__")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_finds_all_that_it_is_made_of(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] in ("benchmarks", "cbtop"):
            raise
        pytest.skip(f"{error.name} is not installed")
