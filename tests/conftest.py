"""Give every test its own folders, apart from other tests and from the user's rings, keys and settings."""

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

# Variables of the user's shell that would change a test or its processes.
FOREIGN = (
    "CBTOP_KEYS_DIR", "CBTOP_VIEW", "CBTOP_WINDOW", "CBTOP_SORT", "CBTOP_FILTER", "CBTOP_THEME", "CBTOP_ASCII",
    "CBTOP_COLOR", "CBTOP_SILENCE", "COLORFGBG", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE",
    "COLUMNS", "LINES", "COLORTERM",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy",
    "ALL_PROXY", "LANGUAGE", "LC_MESSAGES", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "TZ",
    "PYTHONDONTWRITEBYTECODE",  # With this variable, hundreds of processes would compile every module again.
)  # fmt: skip
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # creating a directory on disk takes 4 ms
FOREIGN_PREFIXES = ("OTEL_", "TEXTUAL", "XDG_")

# Settings of hypothesis: examples have no deadline because the machine may be busy. Each run draws new examples and
# stores none. `make soak` draws more.
settings.register_profile(
    "cbtop", max_examples=6, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", settings.get_profile("cbtop"), max_examples=400)
settings.load_profile("cbtop")


def _on_its_own() -> None:
    """Clean up the environment before any module reads it during its import.

    This includes other conftest.py files.
    """
    # SIGINT is ignored in a background job. Tests need the usual behaviour.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name in FOREIGN or (name.startswith(FOREIGN_PREFIXES) and name != "TEXTUAL_SNAPSHOT_TEMPDIR"):
            del os.environ[name]
    sys.dont_write_bytecode = False  # Write bytecode, so that the workers of pytest do not compile every test again.
    os.environ |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    # Limit numpy and torch to one thread. Otherwise they start threads in hundreds of processes, and these threads
    # spin for a while.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # Compiling the kernels takes 30 s. The cache is shared by test runs but not with the user.
    os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "home")
    os.environ["CUPY_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "cupy")


_on_its_own()
# Imported objects live until the end. The search for garbage among them took a quarter of the import time.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage less often.

    A screen creates so many objects that the default spends 25 % of its time on that.
    """
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_is_no_garbage() -> None:
    """Exclude imported modules and the cached data of earlier test files from later garbage collections."""
    _keep()


@pytest.fixture(autouse=True)
def _what_was_imported_is_no_garbage() -> None:
    """Exclude the modules that a test has imported from garbage collection. Dynamo alone has a million objects."""
    if len(sys.modules) > _kept_modules + 100:
        _keep()


def pytest_sessionfinish() -> None:
    """Exclude all objects from garbage collection, because pytest collects garbage five times at its end."""
    _keep()


_kept_modules = 0


def _keep() -> None:
    global _kept_modules
    gc.collect()
    gc.freeze()
    _kept_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a runtime directory.

    The path of the directory is short, because a socket path may have only 107 bytes.
    """
    with (
        TemporaryDirectory(prefix="cbtop-test-", dir=IN_MEMORY) as directory,
        TemporaryDirectory(prefix="cbtop-home-", dir=IN_MEMORY) as home,
    ):
        monkeypatch.setenv("CBTOP_RUNTIME_DIR", directory)
        monkeypatch.setenv("HOME", home)
        # With CI set, no run measures peak rates by itself. Tests of these measurements change the variable.
        monkeypatch.setenv("CI", "true")
        yield Path(directory)
