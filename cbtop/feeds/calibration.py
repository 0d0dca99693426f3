"""Run `cbtop calibrate` to measure the roofs (speed limits) of the hardware that one process uses.

The command runs in a subprocess, so that the screen does not wait.
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
ENGINE = "numba"  # This package belongs to the extra `compute`. Without it, only the short measurement is possible.
GOES_ON = " …"  # A progress line ends with this text if the output is not a terminal.


def why_not_measured(source: SourceView) -> str:
    """Return the reason why this viewer cannot measure the roofs (speed limits of the hardware) of the source, or ""
    if it can.
    """
    if source.merged is not None:
        return "these are several processes, and a roof is of one machine: press m until one is shown"
    if source.host != socket.gethostname():
        return f"pid {source.pid} runs on {source.host or 'another machine'}: run `cbtop calibrate` there"
    return ""


class Calibration:
    """A running `cbtop calibrate` for `source`. Call `poll` until the command has ended. `close` ends the command
    early.

    The measured roofs are stored in the roofs file. Every viewer on this machine reads that file.
    """

    def __init__(self, source: SourceView) -> None:
        self.status = "measuring roofs"
        self.done: float | None = None  # always None, because calibrate does not report its progress
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
        """Return the lines that calibrate printed about the roofs, or None while it runs. Raises CbtopError if it
        fails.
        """
        exit_code = self._process.poll()
        # Use pread, which does not move the file position. Calibrate shares this position for writing.
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
        """End calibrate if it still runs. Nothing is stored in this case."""
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
    """Return the command-line arguments of `cbtop calibrate` for this source.

    For a CPU, the arguments are the number of threads and the size of the weights. A GPU needs no arguments, because
    the whole GPU is measured. Without the extra `compute`, only the short measurement is possible.
    """
    roofs = source.roofline.ceilings
    if source.threads is None or any(roof.gpu for roof in roofs):
        return []
    if find_spec(ENGINE) is None:
        return ["--short", "--threads", str(source.threads)]
    of_weights = any(roof.name == WEIGHTS for roof in roofs) and source.weights_bytes
    return ["--threads", str(source.threads), *(["--weights", str(source.weights_bytes)] if of_weights else [])]
