"""Which process is which: a pid alone is reused, a pid with its start time and boot id is not.

A pid means something in its own pid namespace only: a process in a container goes by another one outside.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cbtop.protocol.signals import let_through

_PROC = Path("/proc")  # Linux has it; elsewhere, and in some sandboxes, there is none
_STARTTIME_FIELD = 22  # proc_pid_stat(5), counted from 1, in clock ticks since boot
MAX_RANKS = 1 << 20

# Rank, local rank and world size as launchers say them; the one that is nearest to the process comes first.
_RANK_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun, deepspeed, accelerate
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # mpirun of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),  # srun
)


class Ranks(NamedTuple):
    """Which of how many a process is; None is what its launcher did not say."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """What the first launcher that named a rank said. What makes no sense was not said."""
    for names in _RANK_VARIABLES:
        rank, local_rank, world_size = (_small_number(environment.get(name, "")) for name in names)
        world_size = world_size or None
        if rank is not None and (world_size is None or rank < world_size):
            return Ranks(rank, local_rank, world_size)
    return Ranks()


def _small_number(text: str) -> int | None:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else MAX_RANKS + 1
    return value if value <= MAX_RANKS else None


def pid_namespace() -> int | None:
    """The inode number of this process's pid namespace; None where the kernel does not say."""
    try:
        return os.stat(_PROC / "self/ns/pid").st_ino
    except OSError as error:
        let_through(error)
        return None


def boot_id() -> str:
    """The kernel's id of this boot; empty where there is no /proc."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        let_through(error)
        return ""


def has_mapped(pid: int, path: Path) -> bool:
    """Whether the process `pid` has the file at `path` in its memory; True where the kernel does not say."""
    try:
        return os.fsencode(path) in (_PROC / f"{pid}/maps").read_bytes()
    except OSError as error:
        let_through(error)
        return True


def running_pids() -> set[int]:
    """The pids of all processes that run; empty where the kernel does not list them."""
    try:
        return {int(name) for name in os.listdir(_PROC) if name.isdecimal()}
    except OSError:
        return set()


def process_start(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when no such process runs.

    Where there is no /proc the start is not known and every living process has start 0. A zombie has ended.
    Raises OSError when there is no descriptor left to look with.
    """
    try:
        text = (_PROC / f"{pid}/stat").read_bytes()
    except FileNotFoundError:
        return None if (_PROC / "self/stat").exists() else _start_without_proc(pid)
    except OSError as error:
        let_through(error)
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
