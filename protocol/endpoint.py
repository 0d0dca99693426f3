"""Where things are: the runtime directory, the default address, and what an address may look like."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from cbtop.protocol.errors import EndpointError

MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un(7), less the closing zero
SPARE_DESCRIPTORS = 32  # a viewer with a daemon inside takes 20, and two for each process it watches
_HOST = re.compile(r"[A-Za-z0-9_.:*-]+")


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
    return private_directory(path, "runtime directory", "CBTOP_RUNTIME_DIR")


def check_descriptors() -> None:
    """Raises EndpointError where too few files may be opened: libzmq, which finds none left, aborts the process."""
    held: list[int] = []
    try:
        while len(held) < SPARE_DESCRIPTORS:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        wanted = f"{SPARE_DESCRIPTORS} are wanted beside those that are open"
        raise EndpointError(f"only {len(held)} more files can be opened, {wanted}: raise ulimit -n") from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def private_directory(path: Path, what: str, variable: str) -> Path:
    """`path`, a directory of this user alone; made with mode 0700 when it is not there.

    Raises EndpointError, calling it `what`, when it belongs to somebody else or others may enter; `variable` is the
    environment's way to another place.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise EndpointError(f"{what} {path}: {error.strerror}; set {variable}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise EndpointError(f"{what} {path} is not a directory; set {variable}")
    if status.st_uid != os.getuid():
        raise EndpointError(f"{what} {path} belongs to uid {status.st_uid}; set {variable}")
    if status.st_mode & 0o077:
        raise EndpointError(
            f"{what} {path} has mode {stat.S_IMODE(status.st_mode):04o}, 0700 is wanted: "
            f"chmod 700 {path}, or set {variable}"
        )
    return path


def default_endpoint() -> str:
    """The address of this user's daemon: an ipc socket in the runtime directory."""
    return f"ipc://{runtime_dir() / 'daemon.sock'}"


def parse_endpoint(text: str) -> str:
    """`text` when it is an address: ipc, or tcp with a host and a port.

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
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if (
        parts.scheme != "tcp"
        or not _HOST.fullmatch(parts.hostname or "")
        or port is None
        or text != f"tcp://{parts.netloc}"
        or "@" in parts.netloc
    ):
        raise EndpointError(f"{text}: ipc:///path/to.sock or tcp://HOST:PORT is wanted")
    return text


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The two halves of a tcp address that `parse_endpoint` took."""
    parts = urlsplit(endpoint)
    return parts.hostname or "", parts.port or 0


def from_here(endpoint: str) -> str:
    """The address by which this machine itself reaches what is bound at `endpoint`."""
    for everywhere, here in (("tcp://0.0.0.0:", "tcp://127.0.0.1:"), ("tcp://[::]:", "tcp://[::1]:")):
        if endpoint.startswith(everywhere):
            return here + endpoint.removeprefix(everywhere)
    return endpoint


def is_loopback(endpoint: str) -> bool:
    """Whether a tcp address cannot be reached from another host."""
    host = host_and_port(endpoint)[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name
