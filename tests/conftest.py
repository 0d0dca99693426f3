"""What every test gets: places of its own, so that no test meets another, the user's own rings, keys or settings."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

# What a shell may have set and a test, or a process that it starts, would believe.
FOREIGN = (
    "CBTOP_KEYS_DIR", "CBTOP_VIEW", "CBTOP_WINDOW", "CBTOP_SORT", "CBTOP_FILTER", "CBTOP_THEME", "CBTOP_ASCII",
    "CBTOP_COLOR", "CBTOP_SILENCE", "COLORFGBG", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE",
    "COLUMNS", "LINES", "COLORTERM",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy",
    "ALL_PROXY", "LANGUAGE", "LC_MESSAGES", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "TZ",
    "PYTHONDONTWRITEBYTECODE",  # or each of the hundreds of processes started compiles every module anew
)  # fmt: skip
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # on a disk, a directory costs 4 ms
FOREIGN_PREFIXES = ("OTEL_", "TEXTUAL", "XDG_")

# An example may take as long as the machine pleases, and what one run found does not change the next. Every run draws
# other examples; `make soak` draws many.
settings.register_profile(
    "cbtop", max_examples=12, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", settings.get_profile("cbtop"), max_examples=400)
settings.load_profile("cbtop")


def _on_its_own() -> None:
    """Before anything that looks at the environment is imported, by another conftest.py, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job of the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name in FOREIGN or (name.startswith(FOREIGN_PREFIXES) and name != "TEXTUAL_SNAPSHOT_TEMPDIR"):
            del os.environ[name]
    sys.dont_write_bytecode = False  # nor do workers compile every test
    os.environ |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    # numpy and torch begin threads in each of the hundreds of processes started, which spin for a while.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # Compiling the kernels takes half a minute: what one run compiled serves the next, and no user's is touched.
    os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "home")


_on_its_own()
gc.disable()  # what is imported and collected stays: a quarter of that time went to looking for garbage in it


def pytest_collection_finish() -> None:
    """A screen makes so many objects that, by default, a quarter of its time goes to looking for garbage."""
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_is_no_garbage() -> None:
    """What was imported, and what the files before left in caches, stays: no test's collection looks through it."""
    _keep()


@pytest.fixture(autouse=True)
def _what_was_imported_is_no_garbage() -> None:
    """Nor through what a test of this file imported, as Dynamo is: a million objects."""
    if len(sys.modules) > _kept_modules + 100:
        _keep()


def pytest_sessionfinish() -> None:
    """As it ends, pytest looks five times through all there is for what was left unclosed."""
    _keep()


_kept_modules = 0


def _keep() -> None:
    global _kept_modules
    gc.collect()
    gc.freeze()
    _kept_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh runtime directory; short, because a socket's path may have only 107 bytes."""
    with (
        TemporaryDirectory(prefix="cbtop-test-", dir=IN_MEMORY) as directory,
        TemporaryDirectory(prefix="cbtop-home-", dir=IN_MEMORY) as home,
    ):
        monkeypatch.setenv("CBTOP_RUNTIME_DIR", directory)
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("CI", "true")  # no run measures roofs by itself: the tests of that ask for it
        yield Path(directory)
