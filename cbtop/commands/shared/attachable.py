"""Decides, from the outside, whether `cbtop attach` may attach to a process. Nothing here stops the process."""

from __future__ import annotations

import os
import platform
import pwd
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cbtop.commands.shared.elf_symbols import ExportedSymbols, MappedFile, exported_symbols, mapped_files
from cbtop.errors import CbtopError, UsageError
from cbtop.protocol.ended import rings_of_latest, runs
from cbtop.protocol.endpoint import runtime_dir

# The functions that an attachment calls, in Python and in the C library.
OF_PYTHON = ("Py_IsInitialized", "Py_AddPendingCall", "PyRun_SimpleString")
OF_LIBC = "mmap"
LIBCS = ("libc.so.", "libc-2.", "ld-musl-")
TORCH = "libtorch_python"
# The Python versions that cbtop supports, as in pyproject.toml.
OLDEST, BELOW = (3, 11), (3, 14)
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
NAMESPACES = ("mnt", "pid")


@dataclass(frozen=True, slots=True)
class AttachableProcess:
    """A process that cbtop may attach to, with the addresses of the functions to call in it."""

    pid: int
    functions: Mapping[str, int]


def attachable(pid: int) -> AttachableProcess:
    """Check the process `pid`. Raises CbtopError with the reason and the way out if cbtop cannot attach to it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CbtopError("cbtop attaches on Linux for x86-64 only; start the program by `cbtop run` instead")
    if pid == os.getpid():
        raise UsageError(f"{pid} is this cbtop")
    _check_status(pid, _status(pid))
    try:
        _check_namespaces(pid)
        files = mapped_files(pid)
    except OSError as error:
        raise CbtopError(not_permitted(pid)) from error
    python = _python_of(pid, files)
    libc = next((file for file in files if file.name.startswith(LIBCS)), None)
    if libc is None or libc.is_replaced:
        raise CbtopError(f"process {pid} has no C library that cbtop can read; start it by `cbtop run` instead")
    _check_not_watched(pid)
    if not any(file.name.startswith(TORCH) for file in files):
        raise CbtopError(f"process {pid} has not loaded torch; attach once it has, or start it by `cbtop run`")
    functions = {name: python.addresses[name] for name in OF_PYTHON}
    return AttachableProcess(pid, functions | {OF_LIBC: exported_symbols(libc).addresses[OF_LIBC]})


def not_permitted(pid: int) -> str:
    """Return why the kernel does not let this process trace `pid`, and how to change that."""
    try:
        scope = SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        scope = "0"
    if scope in ("1", "2"):
        return (
            f"the kernel does not let cbtop trace process {pid} (ptrace_scope is {scope}): "
            "sudo sysctl kernel.yama.ptrace_scope=0, or start it by `cbtop run`"
        )
    if scope == "3":
        return "the kernel lets no process trace another (ptrace_scope is 3); start the program by `cbtop run`"
    return (
        f"the kernel does not let cbtop trace process {pid}; a container needs --cap-add SYS_PTRACE, or start it by "
        "`cbtop run`"
    )


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CbtopError(f"there is no process {pid}; `cbtop --view devices` lists what is busy") from error
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _check_status(pid: int, status: Mapping[str, str]) -> None:
    state = status.get("State", "?")[:1]
    if status.get("Tgid", str(pid)) != str(pid):
        raise UsageError(f"{pid} is a thread of process {status['Tgid']}: cbtop attach {status['Tgid']}")
    if state in "ZX":
        raise CbtopError(f"process {pid} has ended; `cbtop ls` lists what runs")
    if tracer := int(status.get("TracerPid", "0")):
        raise CbtopError(f"process {tracer} (a debugger?) traces process {pid}: detach it first")
    if state == "T":
        raise CbtopError(f"process {pid} is suspended: kill -CONT {pid}, then try again")
    uids = set(status.get("Uid", "").split())
    if uids != {str(os.geteuid())}:
        user = _user_name(int(max(uids - {str(os.geteuid())})))
        raise CbtopError(f"process {pid} belongs to user {user}: sudo -u {user} cbtop attach {pid}")
    faults = 1 << (signal.SIGSEGV - 1)
    if (int(status.get("SigBlk", "0"), 16) | int(status.get("SigIgn", "0"), 16)) & faults:
        raise CbtopError(f"process {pid} blocks or ignores SIGSEGV, which attaching needs; start it by `cbtop run`")
    if "shstk" in status.get("x86_Thread_features", ""):
        raise CbtopError(f"process {pid} has a shadow stack, which allows no call from outside; use `cbtop run`")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _check_namespaces(pid: int) -> None:
    for name in NAMESPACES:
        if os.stat(f"/proc/{pid}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            raise CbtopError(f"process {pid} runs in a container of its own: run cbtop attach inside that container")


def _python_of(pid: int, files: list[MappedFile]) -> ExportedSymbols:
    """Return the symbols of the process's interpreter. Raises CbtopError if cbtop does not support it."""
    executable = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    for file in files:
        if file.path != executable and not file.name.startswith("libpython"):
            continue
        if file.is_replaced:
            raise CbtopError(f"{file.path} was replaced after process {pid} started: restart the process")
        symbols = exported_symbols(file)
        if all(name in symbols.addresses for name in OF_PYTHON):
            _check_version(pid, symbols.number("Py_Version"))
            return symbols
    raise CbtopError(f"process {pid} ({os.path.basename(executable)}) is no Python process that cbtop can attach to")


def _check_version(pid: int, word: int | None) -> None:
    version = (0, 0) if word is None else (word >> 24, word >> 16 & 0xFF)
    if not OLDEST <= version < BELOW:
        said = "older than 3.11" if word is None else f"{version[0]}.{version[1]}"
        raise CbtopError(f"process {pid} runs Python {said}; cbtop supports CPython 3.11 to 3.13")


def _check_not_watched(pid: int) -> None:
    directory = runtime_dir()
    if any(runs(directory / ring) for ring in rings_of_latest(os.listdir(directory), pid)):
        raise CbtopError(f"process {pid} is watched already: cbtop {pid}")
