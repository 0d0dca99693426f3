"""The runtime directory, the default address, and the valid forms of an address."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from cbtop.protocol.errors import EndpointError
from cbtop.protocol.runtime_directory import runtime_directory

# Number of file descriptors that one end of a connection needs: libzmq's threads and sockets, and our files.
WANTED_DESCRIPTORS = 24
MAX_IPC_PATH_BYTES = 107  # length of sun_path in sockaddr_un(7), without the terminating zero
_HOST = re.compile(r"[A-Za-z0-9_.:*-]+")


def runtime_dir() -> Path:
    """Return the directory of this user's rings, catalogs and socket (see `cbtop.protocol.runtime_directory`)."""
    return Path(runtime_directory())


def check_descriptors() -> None:
    """Raise EndpointError if too few files can still be opened, because libzmq would then abort the process."""
    opened: list[int] = []
    try:
        for _ in range(WANTED_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise EndpointError(
            f"{why}: {len(opened)} more can be, {WANTED_DESCRIPTORS} are wanted: raise the limit (ulimit -n 1024)"
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def default_endpoint() -> str:
    """Return the address of this user's daemon. It is an ipc socket in the runtime directory."""
    return f"ipc://{runtime_dir() / 'daemon.sock'}"


def parse_endpoint(text: str) -> str:
    """Return `text` if it is a valid address: ipc, or tcp with a host and a port.

    Otherwise raises EndpointError with `text` and the expected form.
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
    """Return the host and the port of a tcp address that `parse_endpoint` accepted."""
    parts = urlsplit(endpoint)
    return parts.hostname or "", parts.port or 0


def from_here(endpoint: str) -> str:
    """Return an address to which a process on this machine can connect. The socket is bound at `endpoint`."""
    for everywhere, here in (("tcp://0.0.0.0:", "tcp://127.0.0.1:"), ("tcp://[::]:", "tcp://[::1]:")):
        if endpoint.startswith(everywhere):
            return here + endpoint.removeprefix(everywhere)
    return endpoint


def is_loopback(endpoint: str) -> bool:
    """Whether a tcp address can be reached only from this host."""
    host = host_and_port(endpoint)[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # the host part of the address is a name and not an IP address


def lock_of(endpoint: str) -> Path:
    """Return the lock file next to an ipc socket. Only a process that holds its lock may serve at this socket."""
    return Path(endpoint.removeprefix("ipc://")).with_suffix(".lock")


def stopped_holder(endpoint: str) -> str:
    """Return text that says how to resume a stopped process that serves an ipc address.

    Returns "" if the process is not stopped.
    """
    if not endpoint.startswith("ipc://"):
        return ""
    try:
        file = lock_of(endpoint).stat()
        wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        pid = next((lock[4] for lock in locks if lock[1] == "FLOCK" and lock[5] == wanted), "")
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # the lock file or the process does not exist, or the system has no /proc
        return ""
    return f"pid {pid} serves it and is stopped: fg or kill -CONT {pid} resumes it" if state in "Tt" else ""
