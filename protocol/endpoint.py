"""Where things are: the runtime directory, the default address, and what an address may look like."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from cbtop.protocol.errors import EndpointError

MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un(7), less the closing zero
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def runtime_dir() -> Path:
    """The directory of this user's rings, catalogs and socket; made with mode 0700 when it is not there.

    $CBTOP_RUNTIME_DIR, else $XDG_RUNTIME_DIR/cbtop, else cbtop-$UID in the system's temporary directory.
    Raises EndpointError when it belongs to somebody else or others may write into it.
    """
    if named := os.environ.get("CBTOP_RUNTIME_DIR"):
        path = Path(named)
    elif xdg := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(xdg) / "cbtop"
    else:
        try:
            path = Path(tempfile.gettempdir()) / f"cbtop-{os.getuid()}"
        except FileNotFoundError as error:
            raise EndpointError("no temporary directory can be written; set CBTOP_RUNTIME_DIR") from error
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise EndpointError(f"runtime directory {path}: {error.strerror}; set CBTOP_RUNTIME_DIR") from error
    if not stat.S_ISDIR(status.st_mode):
        raise EndpointError(f"runtime directory {path} is not a directory; set CBTOP_RUNTIME_DIR")
    if status.st_uid != os.getuid():
        raise EndpointError(f"runtime directory {path} belongs to uid {status.st_uid}; set CBTOP_RUNTIME_DIR")
    if status.st_mode & 0o077:
        raise EndpointError(
            f"runtime directory {path} has mode {stat.S_IMODE(status.st_mode):04o}, 0700 is wanted: "
            f"chmod 700 {path}, or set CBTOP_RUNTIME_DIR"
        )
    return path


def default_endpoint() -> str:
    """The address of this user's daemon: an ipc socket in the runtime directory."""
    return f"ipc://{runtime_dir() / 'daemon.sock'}"


def parse_endpoint(text: str) -> str:
    """`text` when it is an address a daemon of this version may use: ipc, or tcp on loopback.

    Raises EndpointError, saying what was met and what is wanted.
    """
    if text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        if not path or len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
            raise EndpointError(
                f"{text}: a socket path of 1 to {MAX_IPC_PATH_BYTES} bytes is wanted; "
                "set CBTOP_RUNTIME_DIR to a shorter directory"
            )
        return text
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path or parts.query or parts.fragment:
        raise EndpointError(f"{text}: ipc:///path/to.sock or tcp://127.0.0.1:PORT is wanted")
    if parts.hostname not in LOOPBACK:
        raise EndpointError(f"{text}: only loopback (127.0.0.1) is served; use ssh -L to reach another host")
    return text
