"""The directory of our compiled kernels, one for each version of Numba, and the end of what nobody uses."""

# Rules
# - Whoever uses a directory touches it and holds a shared lock on it (flock(2)) for as long as the process lives.
# - Others go when nobody has used them for UNUSED_S and nobody holds the lock. What has not our form of name, or is
#   no directory, is not ours and stays.
# - That is looked after only when a directory is made: kernels are compiled then, which takes a minute anyway. To use
#   one that is there costs 30 µs.
# - In a directory files go that no process has loaded or written for UNUSED_S: those of functions as they were once.
#   A file is touched as it is loaded. That is looked after once a process, when it has compiled something.
# - A directory that is there and cannot be written to, such as that of a container's image, is copied for the process
#   (2 MB): what it lacks is compiled beside what it has, where Numba would refuse all of it.
# - What is in a directory is run. One is used where it, and what it lies in, belong to this user, to root, or to who
#   owns our sources, and no other user may write there; where it lies, a sticky bit (/tmp) is enough.
# - No error of the file system goes on to the caller. Without a directory kernels are compiled at each start.

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

UNUSED_S = 30 * 24 * 3600
CODE = ".nbc"  # what a compiled function's file ends with
_NAME = re.compile(r"numba-[0-9a-f]{16}")
_LOOKED_AFTER: set[Path] = set()
_IN_USE: list[int] = []  # descriptors, which hold the locks: the process's end closes them


def use_directory(root: Path, digest: str) -> Path | None:
    """The directory for `digest` (16 hexadecimal digits) in `root`, made where it is not there; None without one."""
    directory = root / f"numba-{digest}"
    try:
        if directory.is_dir() and not os.access(directory, os.W_OK):
            return _copied(directory) if is_believed(directory) else None
        is_new = not directory.is_dir()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        if not is_believed(directory):
            return None
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise FileNotFoundError(directory)  # another process has just removed it
        os.utime(descriptor)
    except OSError:
        os.close(descriptor)
        return None
    _IN_USE.append(descriptor)
    if is_new:
        remove_unused(root, time.time())
    return directory


def is_believed(directory: Path) -> bool:
    """Whether no other user may write to what is in it. OSError where it is not there."""
    owners = {os.geteuid(), 0, os.stat(__file__).st_uid}
    for place, is_enough in ((directory, 0), (directory.parent, stat.S_ISVTX)):
        status = place.stat()
        is_own_group = status.st_gid == os.getegid()  # a user's own, where files are made for it to write to
        others = status.st_mode & (stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP)
        if status.st_uid not in owners or (others and not status.st_mode & is_enough):
            return False
    return True


def _copied(directory: Path) -> Path | None:
    """A copy that ends with this process; None where there is no room for one."""
    try:
        copy = Path(tempfile.mkdtemp(prefix="cbtop-kernels-"))
    except OSError:
        return None
    atexit.register(_remove_copy, copy, os.getpid())
    try:
        for found in directory.rglob("*"):
            target = copy / found.relative_to(directory)
            if found.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found, target)  # without its mode, which may be as read-only
    except OSError:
        return None
    return copy


def _remove_copy(copy: Path, pid: int) -> None:
    if os.getpid() == pid:  # a fork's end is not that of who uses it
        shutil.rmtree(copy, ignore_errors=True)


def remove_unused(root: Path, now_s: float) -> None:
    """Remove what nobody has used for UNUSED_S at `now_s` (seconds since the epoch)."""
    try:
        found = [entry for entry in root.iterdir() if _NAME.fullmatch(entry.name) and not entry.is_symlink()]
    except OSError:
        return
    for directory in found:
        try:
            if now_s - directory.stat().st_mtime > UNUSED_S:
                _remove(directory)
        except OSError:
            continue  # in use, another's, or gone already


def remove_unused_files(directory: Path, now_s: float) -> None:
    """Remove files of `directory` that nobody has used for UNUSED_S at `now_s`; once a process."""
    if directory in _LOOKED_AFTER:
        return
    _LOOKED_AFTER.add(directory)
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False) and now_s - entry.stat().st_mtime > UNUSED_S:
                with suppress(OSError):  # another's, or gone already: whoever looks for it compiles
                    os.unlink(entry)


def _remove(directory: Path) -> None:
    """Raises OSError where somebody uses it, or it is no directory of ours to remove."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(descriptor)
