"""Run small real programs under `cbtop run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cbtop.client.replay import ReplayFeed
from cbtop.viewmodels.model import SourceView
from tests.integration.hosts import CBTOP, DEADLINE_S


def view_of(program: str, directory: Path, overhead: str = "3%") -> SourceView:
    """Return what is shown of `program` when it has ended; by default with the default overhead."""
    directory.mkdir(exist_ok=True)
    file = directory / "run.cbtop"
    command = [*CBTOP, "run", "--overhead", overhead, "--record", str(file), "--", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    with ReplayFeed(file) as feed:
        feed.seek(feed.duration_s)
        (source,) = feed.sources()
        view = feed.view(source.key)
    assert view is not None
    return view
