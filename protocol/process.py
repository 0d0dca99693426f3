"""Which process is which: a pid alone is reused, a pid with its start time and boot id is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_STARTTIME_FIELD = 22  # proc_pid_stat(5), counted from 1, in clock ticks since boot


def boot_id() -> str:
    """The kernel's id of this boot; empty where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_start(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when no such process runs.

    Where there is no /proc the start is not known and every living process has start 0. A zombie has ended.
    Raises OSError when there is no descriptor left to look with.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None  # the process ended between open and read (ESRCH), or is not ours to see
    # The command name may hold spaces and parentheses: fields are counted from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[_STARTTIME_FIELD - 3])


def _start_without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
