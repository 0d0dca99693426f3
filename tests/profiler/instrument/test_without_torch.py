"""Without torch, tests that need it are skipped with the reason. The test command in the README does not need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_TORCH = """
import sys
import pytest
sys.modules["torch"] = sys.modules["transformers"] = None
sys.exit(pytest.main(["--collect-only", "-n", "0", "-p", "no:cacheprovider", "-m", "", "tests/profiler/instrument"]))
"""


@pytest.mark.slow  # The default run skips this test, because it tests the test suite and not cbtop.
def test_tests_that_need_torch_are_skipped_at_collection_if_it_is_missing() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "torch is not installed" in done.stdout
