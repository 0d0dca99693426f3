"""Draws screenshots/web.png: the overview of a recording in a headless Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.integration.browser import chromium

HERE = Path(__file__).parent
RECORDING = HERE.parent / "tests" / "cbtop" / "imperfect.cbtop"
SERVE = [sys.executable, "-m", "cbtop", "replay", str(RECORDING), "--at", "20", "--web", "0"]


def main() -> int:
    if shutil.which("chromedriver") is None:
        print("web.png stays as it is: Chromium is not installed")
        return 0
    with tempfile.TemporaryDirectory() as home:  # where the user's own settings are not
        environment = os.environ | {"HOME": home, "XDG_CONFIG_HOME": home}
        with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True, env=environment) as server, chromium() as tab:
            assert server.stdout
            tab.open(server.stdout.readline().strip())
            tab.wait_for("costliest bricks")
            (HERE / "web.png").write_bytes(tab.picture())
            server.terminate()
    print("web.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
