"""The directory in which processes, daemons and viewers of one user find each other.

`cbtop run` uses this module before its command begins, so every import delays the command. This module and its
imports therefore load few other modules. `typing` alone takes as long to load as Python takes to start.
"""

from __future__ import annotations

import os
import stat

from cbtop.protocol.errors import EndpointError
from cbtop.protocol.filesystem import copies_on_write, in_words

SHARED_MEMORY = "/dev/shm"  # /dev/shm: a file system in memory (tmpfs) on Linux
TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")


def runtime_directory() -> str:
    """Return the directory of this user's rings, catalogs and socket. Creates it with mode 0700 if it does not exist.

    This is $CBTOP_RUNTIME_DIR, or else $XDG_RUNTIME_DIR/cbtop, or else cbtop-$UID in the system's temporary
    directory. It is cbtop-$UID in SHARED_MEMORY in two cases: there is no temporary directory, or its file system
    copies on write, so that no ring can be created there.

    Raises EndpointError if the directory belongs to a different user or others may write into it.
    """
    if named := os.environ.get("CBTOP_RUNTIME_DIR"):
        return _private(named)
    name = f"cbtop-{os.getuid()}"
    in_memory = os.path.join(SHARED_MEMORY, name) if os.path.isdir(SHARED_MEMORY) else ""
    if xdg := os.environ.get("XDG_RUNTIME_DIR"):
        path = _private(os.path.join(xdg, "cbtop"))
    elif temporary := _temporary_directory():
        path = _private(os.path.join(temporary, name))
    elif in_memory:
        return _private(in_memory)
    else:
        raise EndpointError("no temporary directory can be written; set CBTOP_RUNTIME_DIR")
    return _private(in_memory) if in_memory and is_copied_on_write(path) else path


def _temporary_directory() -> str:
    """Return the first writable directory in the list of Python's tempfile, or "". Skips the current directory."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    for path in (*named, *TEMPORARY):
        if path and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return os.path.abspath(path)
    return ""


def _private(path: str) -> str:
    make_private_directory(path, "runtime directory", "CBTOP_RUNTIME_DIR")
    return path


def is_copied_on_write(path: str) -> bool:
    """Whether the directory's file system copies on write. No ring can be created in such a directory.

    See `cbtop.protocol.ring`. Raises EndpointError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EndpointError(f"runtime directory {path}: {in_words(error)}") from error
    try:
        return copies_on_write(descriptor)
    finally:
        os.close(descriptor)


def make_private_directory(path: str, what: str, variable: str) -> None:
    """Make `path` a directory with mode 0700, only for this user, if it does not exist.

    Raises EndpointError if the directory belongs to a different user or others may enter it. The error calls the
    directory `what`, and says that the environment's `variable` can name a different one.
    """
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        status = os.lstat(path)
    except FileExistsError as error:
        raise EndpointError(f"{what} {path} is not a directory; set {variable} to one of yours") from error
    except OSError as error:
        raise EndpointError(
            f"{what} {path} cannot be made: {error.strerror}; set {variable} to a directory of yours"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise EndpointError(f"{what} {path} is not a directory; set {variable}")
    if status.st_uid != os.getuid():
        raise EndpointError(f"{what} {path} belongs to uid {status.st_uid}; set {variable}")
    if status.st_mode & 0o077:
        raise EndpointError(
            f"{what} {path} has mode {stat.S_IMODE(status.st_mode):04o}, 0700 is wanted: "
            f"chmod 700 {path}, or set {variable}"
        )
