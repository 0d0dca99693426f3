"""Find NVIDIA's `ptxas`, `nvdisasm` and `cuobjdump`, and run them with limits of time and output.

Each run has a new temporary folder, with file names chosen by cbtop. No text from a file becomes an argument.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SECONDS = 60.0  # time limit of one run
MAX_OUTPUT_BYTES = 1 << 26
VERSION_SECONDS = 10.0
FILES = {  # name of a tool -> possible file names
    "ptxas": ("ptxas", "ptxas-blackwell"),  # Triton contains a second ptxas, for newer GPUs
    "nvdisasm": ("nvdisasm",),
    "cuobjdump": ("cuobjdump",),  # cbtop does not run it, but users can extract a program's PTX with it
}
HOW_TO_GET = {
    "ptxas": "pip install nvidia-cuda-nvcc",
    "nvdisasm": "pip install nvidia-cuda-nvdisasm",
    "cuobjdump": "pip install nvidia-cuda-cuobjdump",
}


class ToolError(Exception):
    """A tool failed, took too long or wrote too much. The message has the first line of its output."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A program of NVIDIA's CUDA toolkit on this machine."""

    name: str
    path: str
    version: tuple[int, ...]  # version such as (13, 5, 37); empty if the program did not print it

    @property
    def label(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class ToolRun:
    """The output of a tool, and the file that it wrote."""

    output: bytes
    notes: bytes  # standard error
    written: bytes | None


def tools(name: str, environment: Mapping[str, str] | None = None, path: Sequence[str] | None = None) -> list[Tool]:
    """Return all programs on this machine for the tool `name` (a key of FILES), newest first.

    Searches the folders of PATH, the CUDA toolkit in CUDA_HOME or CUDA_PATH, and the packages of NVIDIA and Triton in
    `path` (default: the folders that Python imports from).
    """
    environment = os.environ if environment is None else environment
    folders = [*_toolkits(environment), *_packages(sys.path if path is None else path)]
    found: dict[str, Tool] = {}
    for file in FILES[name]:
        for folder in folders:
            program = shutil.which(file, path=folder)
            if program is not None and (real := os.path.realpath(program)) not in found:
                found[real] = Tool(name, real, _version(real))
    return sorted(found.values(), key=lambda tool: tool.version, reverse=True)


def missing(name: str) -> str:
    """Return a line for the user: this tool is missing, and how to get it."""
    return f"{name} was not found on the PATH, in CUDA_HOME, or in Python's packages: {HOW_TO_GET[name]}"


def run(
    tool: Tool,
    arguments: Sequence[str],
    content: bytes,
    *,
    writes: str | None = None,
    max_seconds: float = MAX_SECONDS,
) -> ToolRun:
    """Run a tool on a temporary file "input" with this content. Returns its output, and the content of the file
    `writes`, if given.

    Raises ToolError if the tool fails, exceeds `max_seconds` or writes more than MAX_OUTPUT_BYTES.
    """
    with tempfile.TemporaryDirectory(prefix="cbtop-") as folder:
        (Path(folder) / "input").write_bytes(content)
        code, output, notes = _run([tool.path, *arguments, "input"], folder, max_seconds)
        if code != 0:
            raise ToolError(_first_problem(tool, code, output + notes))
        if writes is None:
            return ToolRun(output, notes, None)
        written = Path(folder) / writes
        if not written.is_file() or written.stat().st_size > MAX_OUTPUT_BYTES:
            raise ToolError(f"{tool.label} wrote no result, or more than {MAX_OUTPUT_BYTES >> 20} MiB")
        return ToolRun(output, notes, written.read_bytes())


def _toolkits(environment: Mapping[str, str]) -> Iterator[str]:
    # An empty entry of PATH is the current folder, where anybody may have put a program. So it is left out.
    yield from (folder for folder in environment.get("PATH", "").split(os.pathsep) if os.path.isabs(folder))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(variable):
            yield os.path.join(environment[variable], "bin")


def _packages(path: Sequence[str]) -> Iterator[str]:
    for folder in map(Path, path):
        if folder.is_absolute():
            yield str(folder / "triton" / "backends" / "nvidia" / "bin")
            yield from map(str, sorted(folder.glob("nvidia/*/bin")))


def _version(program: str) -> tuple[int, ...]:
    try:
        _, output, _ = _run([program, "--version"], os.path.dirname(program), VERSION_SECONDS)
    except (OSError, ToolError):
        return ()
    match = re.search(rb"\bV(\d+)\.(\d+)\.(\d+)\b", output)
    return tuple(map(int, match.groups())) if match else ()


def _run(command: Sequence[str], folder: str, max_seconds: float) -> tuple[int, bytes, bytes]:
    """Run a command, and return its exit code, output and errors. Kills it and its child processes at a limit."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            output, notes = _read(process, os.path.basename(command[0]), time.monotonic() + max_seconds)
            return process.wait(), output, notes
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[bytes], name: str, deadline: float) -> tuple[bytes, bytes]:
    assert process.stdout is not None
    assert process.stderr is not None
    read = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for file in read:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                raise ToolError(f"{name} took longer than its limit of time, and was stopped")
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                read[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
            if sum(map(len, read.values())) > MAX_OUTPUT_BYTES:
                raise ToolError(f"{name} wrote more than {MAX_OUTPUT_BYTES >> 20} MiB, and was stopped")
    output, notes = read.values()
    return bytes(output), bytes(notes)


def _first_problem(tool: Tool, code: int, output: bytes) -> str:
    lines = output.decode("utf-8", "replace").splitlines()
    problem = next((line for line in lines if "fatal" in line or "error" in line), lines[0] if lines else "no output")
    return f"{tool.label} failed (exit code {code}): {problem[:200]}"
