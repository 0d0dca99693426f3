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
from cbtop.protocol.filesystem import copies_on_write, in_words

WANTED_DESCRIPTORS = 24  # by one end of a link: libzmq's threads and sockets, and ours
SHARED_MEMORY = Path("/dev/shm")  # a tmpfs on Linux
MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un(7), less the closing zero
_HOST = re.compile(r"[A-Za-z0-9_.:*-]+")


def runtime_dir() -> Path:
    """The directory of this user's rings, catalogs and socket; made with mode 0700 when it is not there.

    $CBTOP_RUNTIME_DIR, else $XDG_RUNTIME_DIR/cbtop, else cbtop-$UID in the system's temporary directory. Where that
    copies on write, so that no ring can be made there, or where there is no temporary directory, cbtop-$UID in
    SHARED_MEMORY. Raises EndpointError when it belongs to somebody else or others may write into it.
    """
    if named := os.environ.get("CBTOP_RUNTIME_DIR"):
        return _runtime_directory(Path(named))
    name = f"cbtop-{os.getuid()}"
    try:
        xdg = os.environ.get("XDG_RUNTIME_DIR")
        path = _runtime_directory(Path(xdg) / "cbtop" if xdg else Path(tempfile.gettempdir()) / name)
    except FileNotFoundError as error:
        if SHARED_MEMORY.is_dir():
            return _runtime_directory(SHARED_MEMORY / name)
        raise EndpointError("no temporary directory can be written; set CBTOP_RUNTIME_DIR") from error
    if SHARED_MEMORY.is_dir() and is_copied_on_write(path):
        return _runtime_directory(SHARED_MEMORY / name)
    return path


def _runtime_directory(path: Path) -> Path:
    return private_directory(path, "runtime directory", "CBTOP_RUNTIME_DIR")


def is_copied_on_write(path: Path) -> bool:
    """Whether no ring can be made in this directory of ours, see `cbtop.protocol.ring`. Raises EndpointError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EndpointError(f"runtime directory {path}: {in_words(error)}") from error
    try:
        return copies_on_write(descriptor)
    finally:
        os.close(descriptor)


def private_directory(path: Path, what: str, variable: str) -> Path:
    """`path`, a directory of this user alone; made with mode 0700 when it is not there.

    Raises EndpointError, calling it `what`, when it belongs to somebody else or others may enter; `variable` is the
    environment's way to another place.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
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
    return path


def check_descriptors() -> None:
    """Raises EndpointError where too few files can be opened still: libzmq would end the process over it."""
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


def lock_of(endpoint: str) -> Path:
    """The file beside an ipc socket whose lock is the right to serve there."""
    return Path(endpoint.removeprefix("ipc://")).with_suffix(".lock")


def stopped_holder(endpoint: str) -> str:
    """Which stopped process serves an ipc address of this machine, and the way out; empty where that is not so."""
    if not endpoint.startswith("ipc://"):
        return ""
    try:
        file = lock_of(endpoint).stat()
        wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        pid = next((lock[4] for lock in locks if lock[1] == "FLOCK" and lock[5] == wanted), "")
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # no such file or process, or no /proc
        return ""
    return f"pid {pid} serves it and is stopped: fg or kill -CONT {pid} resumes it" if state in "Tt" else ""
