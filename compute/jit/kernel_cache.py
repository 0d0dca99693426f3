"""The directory of our compiled kernels, and the removal of unused directories.

Each version of Numba has a directory.
"""

# Rules
# - A process that uses a directory touches it and holds a shared lock on it (flock(2)) until it ends.
# - Other directories are removed if no process has used them for UNUSED_S and no process holds the lock. Files, and
#   directories with a different form of name, are not ours and are never removed.
# - Unused directories are searched for only when a new directory is created, because compiling its kernels takes a
#   minute anyway.
# - A file in a directory is removed if no process has loaded or written it for UNUSED_S. Such files belong to earlier
#   forms of functions. Loading a file touches it. A process searches for such files once, after it has compiled
#   something.
# - If an existing directory cannot be written to, as in a container's image, the process uses a copy (2 MB), and
#   compiles missing kernels into the copy.
# - The files of a directory are executed. So it and its parent must belong to this user, to root, or to the owner of
#   our sources, and other users may not write there. They may write to the parent if it has the sticky bit, like
#   /tmp.
# - After a file system error, kernels are compiled at each start. The caller gets no error.

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
CODE = ".nbc"
_NAME = re.compile(r"numba-[0-9a-f]{16}")
_LOOKED_AFTER: set[Path] = set()
_IN_USE: list[int] = []  # open files; their locks are held until this process ends


def use_directory(root: Path, digest: str) -> Path | None:
    """Return the directory for `digest` (16 hexadecimal digits) in `root`, or None if it cannot be used.

    Creates the directory if it does not exist.
    """
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
            raise FileNotFoundError(directory)  # another process has just removed the directory
        os.utime(descriptor)
    except OSError:
        os.close(descriptor)
        return None
    _IN_USE.append(descriptor)
    if is_new:
        remove_unused(root, time.time())
    return directory


def is_believed(directory: Path) -> bool:
    """Return whether only trusted users can write to the files of `directory`.

    Raises OSError if it does not exist.
    """
    owners = {os.geteuid(), 0, os.stat(__file__).st_uid}
    for place, is_enough in ((directory, 0), (directory.parent, stat.S_ISVTX)):
        status = place.stat()
        # On some systems, the user's own group may write to new files. A group with the user's number has only this
        # user as a member. A group such as `users` has other members.
        is_own_group = status.st_gid == os.getegid() == os.geteuid()
        others = status.st_mode & (stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP)
        if status.st_uid not in owners or (others and not status.st_mode & is_enough):
            return False
    return True


def _copied(directory: Path) -> Path | None:
    """Return a copy of the directory, or None if the disk has no room for a copy.

    The copy is removed when this process ends.
    """
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
                shutil.copyfile(found, target)  # do not copy the mode of the file, because it may be read-only
    except OSError:
        return None
    return copy


def _remove_copy(copy: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process must not remove the copy, because its parent may still use it
        shutil.rmtree(copy, ignore_errors=True)


def remove_unused(root: Path, now_s: float) -> None:
    """Remove directories that no process has used for UNUSED_S, given the time `now_s` (seconds since the epoch)."""
    try:
        found = [entry for entry in root.iterdir() if _NAME.fullmatch(entry.name) and not entry.is_symlink()]
    except OSError:
        return
    for directory in found:
        try:
            if now_s - directory.stat().st_mtime > UNUSED_S:
                _remove(directory)
        except OSError:
            continue  # the directory is in use by a process, belongs to another user, or was already removed


def remove_unused_files(directory: Path, now_s: float) -> None:
    """Remove files of `directory` that no process has used for UNUSED_S, given the time `now_s`.

    A process does this only once for each directory.
    """
    if directory in _LOOKED_AFTER:
        return
    _LOOKED_AFTER.add(directory)
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False) and now_s - entry.stat().st_mtime > UNUSED_S:
                with suppress(OSError):
                    # The file belongs to another user, or was already removed. A process that needs it compiles
                    # again.
                    os.unlink(entry)


def _remove(directory: Path) -> None:
    """Remove a directory. Raises OSError if a process uses it, or if it does not belong to us."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(descriptor)
