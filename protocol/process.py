"""The identity of a process. A pid may be used again, but pid, start time and boot id together are unique.

A pid is only valid in its own pid namespace. A process in a container has a different pid outside. A start time is
only valid in its own time namespace, because clocks that count from boot may have an offset (time_namespaces(7)).
"""

from __future__ import annotations

import errno
import io
import os

from cbtop.protocol.signals import reraise_host_error

TYPE_CHECKING = False  # `typing` loads slowly, so it is not imported; see `cbtop.protocol.runtime_directory`
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PROC = "/proc"  # this file of Linux is missing on other systems and in some sandboxes
MAX_THREADS = 256
RUN_ID = "CBTOP_RUN_ID"  # in the environment of the processes of `cbtop run`; begins with the pid of the command
_MAX_PID_DIGITS = 7  # the largest pid of Linux is 2**22
# Field numbers of proc_pid_stat(5), from 1; the start time is in clock ticks since boot.
_STATE_FIELD, _STARTTIME_FIELD = 3, 22


def pid_namespace() -> int | None:
    """Return the inode number of this process's pid namespace, or None if the kernel does not report it."""
    try:
        return os.stat(f"{_PROC}/self/ns/pid").st_ino
    except OSError as error:
        reraise_host_error(error)
        return None


def command_pid(environment: Mapping[str, str]) -> int | None:
    """Return the pid of the command of `cbtop run`, or None if the environment does not have a valid one."""
    pid = environment.get(RUN_ID, "").partition(":")[0].partition(",")[0]
    return int(pid) if pid.isascii() and pid.isdecimal() and len(pid) <= _MAX_PID_DIGITS else None


def boot_id() -> str:
    """Return the kernel's id of the current boot, or "" if /proc does not exist."""
    try:
        with io.open(f"{_PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        reraise_host_error(error)
        return ""


def has_mapped(pid: int, path: Path) -> bool:
    """Whether the process `pid` has mapped the file at `path`. True if the kernel does not report it."""
    try:
        with io.open(f"{_PROC}/{pid}/maps", "rb") as file:
            return os.fsencode(path) in file.read()
    except OSError as error:
        reraise_host_error(error)
        return True


def running_pids() -> set[int]:
    """Return the pids of all running processes, or an empty set if the kernel does not list them."""
    try:
        return {int(name) for name in os.listdir(_PROC) if name.isdecimal()}
    except OSError:
        return set()


def processor_times(pid: int) -> dict[str, tuple[int, int]]:
    """Return the running time and the waiting time of each thread of process `pid`, in ns.

    Waiting means being ready to run without a processor. Returns {} if the kernel does not report these times. Reads
    at most MAX_THREADS threads.
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
        # The thread has ended, or the kernel writes this file in a different format.
        except (OSError, ValueError) as error:
            reraise_host_error(error)
    return found


def busiest_wait_ns(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> int | None:
    """Return how long the busiest thread waited for a processor between two `processor_times`, in ns.

    The busiest thread is the thread with the longest sum of running and waiting in this time. Returns None if
    `before` and `now` have no thread in common.
    """
    grown = [(ran - before[one][0], waited - before[one][1]) for one, (ran, waited) in now.items() if one in before]
    return max((ran + waited, waited) for ran, waited in grown)[1] if grown else None


def process_start(pid: int) -> int | None:
    """Return the start time of the process `pid` in clock ticks since boot, or None if no such process runs.

    A zombie counts as ended. Without /proc, returns 0 for every living process. Raises OSError if no descriptor is
    left to read the file with.
    """
    try:
        fields = _stat_from_state(pid)
    except FileNotFoundError:
        return None if os.path.exists(f"{_PROC}/self/stat") else _start_without_proc(pid)
    except OSError as error:
        reraise_host_error(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        # The process ended between the open and the read of its file (ESRCH), or belongs to another user and is
        # hidden.
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_STARTTIME_FIELD - _STATE_FIELD])


def is_running(pid: int, start: int) -> bool:
    """Whether `pid` is running and may be the process that reported `start` as its `process_start`.

    Only the pid counts for a process of a different time namespace, because its start time cannot be compared. Raises
    OSError if no descriptor is left to read the start time with.
    """
    found = process_start(pid)
    if found is None or found == start:
        return found is not None
    theirs = _time_namespace(str(pid))
    return theirs is not None and theirs != _time_namespace("self")


def is_suspended(pid: int) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped `pid`. False if the kernel does not report it."""
    try:
        return _stat_from_state(pid)[0] in (b"T", b"t")
    except OSError as error:
        reraise_host_error(error)
        return False


def _time_namespace(process: str) -> int | None:
    """Return the inode number of the time namespace of `process`.

    Returns None if the kernel hides it or does not have time namespaces (before Linux 5.6).
    """
    try:
        return os.stat(f"{_PROC}/{process}/ns/time").st_ino
    except OSError as error:
        reraise_host_error(error)
        return None


def _stat_from_state(pid: int) -> list[bytes]:
    with io.open(f"{_PROC}/{pid}/stat", "rb") as file:
        text = file.read()
    # The command name may contain spaces and parentheses, so the fields are counted from the last parenthesis.
    return text[text.rindex(b")") + 2 :].split()


def _start_without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
