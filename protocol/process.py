"""The identity of a process: a pid alone is reused, a pid with its start time and boot id is not.

A pid is valid in its own pid namespace only: a process in a container has a different one outside. A start is valid
in its own time namespace: clocks that count from boot may be offset there (time_namespaces(7)).
"""

from __future__ import annotations

import errno
import io
import os

from cbtop.protocol.signals import reraise_host_error

TYPE_CHECKING = False  # see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from pathlib import Path

_PROC = "/proc"  # Linux has it; other systems, and some sandboxes, do not
MAX_THREADS = 256
_STATE_FIELD, _STARTTIME_FIELD = 3, 22  # proc_pid_stat(5), counted from 1; the latter in clock ticks since boot


def pid_namespace() -> int | None:
    """Return the inode number of this process's pid namespace, or None if the kernel does not give it."""
    try:
        return os.stat(f"{_PROC}/self/ns/pid").st_ino
    except OSError as error:
        reraise_host_error(error)
        return None


def boot_id() -> str:
    """Return the kernel's id of this boot, or "" if there is no /proc."""
    try:
        with io.open(f"{_PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        reraise_host_error(error)
        return ""


def has_mapped(pid: int, path: Path) -> bool:
    """Whether the process `pid` has the file at `path` in its memory. True if the kernel does not tell."""
    try:
        with io.open(f"{_PROC}/{pid}/maps", "rb") as file:
            return os.fsencode(path) in file.read()
    except OSError as error:
        reraise_host_error(error)
        return True


def running_pids() -> set[int]:
    """Return the pids of all running processes; empty if the kernel does not list them."""
    try:
        return {int(name) for name in os.listdir(_PROC) if name.isdecimal()}
    except OSError:
        return set()


def processor_times(pid: int) -> dict[str, tuple[int, int]]:
    """Return, for each thread of process `pid`, how many ns it ran and how many ns it waited for a processor.

    Empty if the kernel does not count them. At most MAX_THREADS threads are read.
    """
    found = {}
    try:
        threads = os.listdir(f"{_PROC}/{pid}/task")[:MAX_THREADS]
    except OSError as error:
        reraise_host_error(error)
        return {}
    for thread in threads:
        try:
            with io.open(f"{_PROC}/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                ran_ns, waited_ns, _ = file.read().split()
            found[thread] = int(ran_ns), int(waited_ns)
        except (OSError, ValueError) as error:  # it has ended, or this kernel has a different format
            reraise_host_error(error)
    return found


def busiest_wait_ns(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> int | None:
    """Return how long the busiest thread waited for a processor between two `processor_times`, in ns.

    The busiest is the one that ran or could run the longest.
    """
    grown = [(ran - before[one][0], waited - before[one][1]) for one, (ran, waited) in now.items() if one in before]
    return max((ran + waited, waited) for ran, waited in grown)[1] if grown else None


def process_start(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot, or None if no such process runs.

    If there is no /proc the start is not known and every living process has start 0. A zombie has ended. Raises
    OSError if there is no descriptor left to look with.
    """
    try:
        fields = _stat_from_state(pid)
    except FileNotFoundError:
        return None if os.path.exists(f"{_PROC}/self/stat") else _start_without_proc(pid)
    except OSError as error:
        reraise_host_error(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None  # the process ended between open and read (ESRCH), or is hidden from us
    return None if fields[0] in (b"Z", b"X") else int(fields[_STARTTIME_FIELD - _STATE_FIELD])


def is_running(pid: int, start: int) -> bool:
    """Whether `pid` is running and may be the process that reported `start` as its `process_start`.

    A different time namespace has different numbers for the same moment, so such a process is matched by pid only.
    Raises OSError if there is no descriptor left to look with.
    """
    found = process_start(pid)
    if found is None or found == start:
        return found is not None
    theirs = _time_namespace(str(pid))
    return theirs is not None and theirs != _time_namespace("self")


def is_suspended(pid: int) -> bool:
    """Whether `pid` is stopped by a signal (SIGSTOP) or a debugger. False if the kernel does not tell."""
    try:
        return _stat_from_state(pid)[0] in (b"T", b"t")
    except OSError as error:
        reraise_host_error(error)
        return False


def _time_namespace(process: str) -> int | None:
    """Return its time namespace's inode number, or None if the kernel hides it, or has none (before Linux 5.6)."""
    try:
        return os.stat(f"{_PROC}/{process}/ns/time").st_ino
    except OSError as error:
        reraise_host_error(error)
        return None


def _stat_from_state(pid: int) -> list[bytes]:
    with io.open(f"{_PROC}/{pid}/stat", "rb") as file:
        text = file.read()
    # The command name may contain spaces and parentheses, so fields are counted from the last one.
    return text[text.rindex(b")") + 2 :].split()


def _start_without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
