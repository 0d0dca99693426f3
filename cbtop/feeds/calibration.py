"""Run `cbtop calibrate` to measure the roofs (speed limits) of the hardware of one process. It is a subprocess, so
that the screen does not wait.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from typing import Self

from cbtop.client.kept_roofs import WEIGHTS
from cbtop.errors import CbtopError
from cbtop.viewmodels.source import SourceView

END_WITHIN_S = 5.0
MAX_SAID_BYTES = 1 << 16
ENGINE = "numba"  # Without this package, of the extra `compute`, only the short measurement is possible.
GOES_ON = " …"  # Progress lines end like this outside of a terminal.


def why_not_measured(source: SourceView) -> str:
    """Return why this viewer cannot measure the source's roofs (speed limits of the hardware), or "" if it can."""
    if source.merged is not None:
        return "these are several processes, and a roof is of one machine: press m until one is shown"
    if source.host != socket.gethostname():
        return f"pid {source.pid} runs on {source.host or 'another machine'}: run `cbtop calibrate` there"
    return ""


class Calibration:
    """A running `cbtop calibrate` for `source`. Call `poll` until it has ended. `close` ends it early.

    The roofs are stored in the roofs file, which every viewer on this machine reads.
    """

    def __init__(self, source: SourceView) -> None:
        self.status = "measuring roofs"
        self.done: float | None = None  # always None, because calibrate reports no progress
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed in `close`
        command = [sys.executable, "-m", "cbtop", "calibrate", *arguments(source)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT
            )
        except BaseException:
            self._said.close()
            raise

    def poll(self) -> list[str] | None:
        """Return what calibrate printed about the roofs, or None while it runs. Raises CbtopError if it fails."""
        exit_code = self._process.poll()
        # pread does not move the file position, which calibrate uses for writing.
        lines = os.pread(self._said.fileno(), MAX_SAID_BYTES, 0).decode("utf-8", "replace").splitlines()
        steps = [line for line in lines if line.endswith(GOES_ON)]
        if exit_code is None:
            self.status = f"measuring roofs: {steps[-1].removesuffix(GOES_ON)}" if steps else self.status
            return None
        found = [line for line in lines if line not in steps]
        if exit_code:
            raise CbtopError(found[-1].removeprefix("cbtop: ") if found else f"it ended with {exit_code}")
        return found

    def close(self) -> None:
        """End calibrate if it still runs. Then nothing is stored."""
        self._process.terminate()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def arguments(source: SourceView) -> list[str]:
    """Return the arguments of `cbtop calibrate` for this source.

    For a CPU they are the number of threads and the size of the weights. A GPU is measured as a whole, without
    arguments. Without the extra `compute`, only the short measurement is possible.
    """
    roofs = source.roofline.ceilings
    if source.threads is None or any(roof.gpu for roof in roofs):
        return []
    if find_spec(ENGINE) is None:
        return ["--short", "--threads", str(source.threads)]
    of_weights = any(roof.name == WEIGHTS for roof in roofs) and source.weights_bytes
    return ["--threads", str(source.threads), *(["--weights", str(source.weights_bytes)] if of_weights else [])]
