"""CURVE key pairs and the allow-list, stored as files in a directory that only its owner may enter.

Rules
- A secret key is written once, with mode 0600 from the start, and only `load_pair` reads it. No error, log line, repr
  or listing contains a secret key.
- Users see a public key as 64 hexadecimal digits, which no shell, mail or option parser changes. The files contain
  keys as Z85, which is full of `$`, `&` and `<` and may begin with `-`.
- The files have the format of pyzmq's certificates, so that other ZeroMQ tools can read them.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from cbtop.protocol.endpoint import is_loopback
from cbtop.protocol.errors import KeysError
from cbtop.protocol.runtime_directory import make_private_directory
from cbtop.protocol.vocabulary import DAEMON_KEY

MAX_CERTIFICATE_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys that identify one end of a connection. The repr does not contain the secret key."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)  # both keys are in Z85, the encoding that libzmq expects


@dataclass(frozen=True, slots=True)
class ViewerKeys:
    """The key pair that identifies a viewer, and the public key that the daemon must have."""

    own: KeyPair
    server: bytes


@dataclass(frozen=True, slots=True)
class DaemonKeys:
    """The key pair that identifies a daemon, and the directory with the public keys of allowed viewers."""

    own: KeyPair
    directory: Path

    @property
    def as_viewer(self) -> ViewerKeys:
        """The daemon's own keys. The daemon accepts them without an entry on the allow-list."""
        return ViewerKeys(self.own, self.own.public)

    def allowed(self) -> dict[bytes, str]:
        """Return the viewers that are allowed now. Raises KeysError if the files of their keys cannot be read."""
        return allowed(self.directory)


def keys_dir() -> Path:
    """Return the directory of this user's keys. Creates it with mode 0700 if it does not exist.

    This is $CBTOP_KEYS_DIR, or cbtop/keys in $XDG_CONFIG_HOME or ~/.config. Raises EndpointError if other users may
    enter the directory.
    """
    return _private_directory(_keys_path(), "keys directory")


def _keys_path() -> Path:
    if named := os.environ.get("CBTOP_KEYS_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "cbtop" / "keys"


def make_pair(directory: Path, name: str) -> KeyPair:
    """Write a new pair to NAME.key and NAME.key_secret.

    Raises KeysError if NAME.key exists or the name is invalid.
    """
    _check_name(name)
    _require_curve()
    if (taken := directory / f"{name}.key").exists():
        raise KeysError(f"{taken} exists, and is not overwritten")
    encoded, secret = zmq.curve_keypair()
    text = _certificate(encoded.decode())
    _write_new(_secret_path(directory, name), f'{text}    secret-key = "{secret.decode()}"\n')
    _write_new(directory / f"{name}.key", text)
    return KeyPair(name, _decoded(encoded), secret)


def load_pair(directory: Path, name: str) -> KeyPair:
    """Return the pair `name`. Raises KeysError if the pair does not exist or other users can read the secret."""
    _check_name(name)
    _require_curve()
    path = _secret_path(directory, name)
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise KeysError(f"there is no key pair {name!r} in {directory}: cbtop keys new {name}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise KeysError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and uid {status.st_uid}, 0600 and yours is wanted: "
            f"if others may have read it, delete it and {name}.key, and make a new pair; else chmod 600 {path}"
        )
    _public, secret = _read(path)
    if secret is None:
        raise KeysError(f"{path} holds no secret key: delete it and {name}.key, and make a new pair")
    try:
        encoded = zmq.curve_public(secret)
    except (zmq.ZMQError, ValueError):
        # Do not chain this exception, because its traceback contains the secret.
        raise KeysError(f"{path} is damaged: delete it and {name}.key, and make a new pair") from None
    return KeyPair(name, _decoded(encoded), secret)


def pairs(directory: Path) -> dict[str, bytes]:
    """Return a dict from the name of each pair to its public key. Reads no secret. Raises KeysError."""
    names = sorted(path.stem for path in directory.glob("*.key_secret"))
    return {name: read_public_key(directory / f"{name}.key") for name in names}


def allow(directory: Path, name: str, public: bytes) -> None:
    """Put a viewer on the allow-list. Raises KeysError if the list already contains the name or the key."""
    _check_name(name)
    known = allowed(directory)
    if public in known:
        raise KeysError(f"that key is allowed already, as {known[public]}")
    _write_new(_allowed_dir(directory) / f"{name}.key", _certificate(z85.encode(public).decode()))


def revoke(directory: Path, name: str) -> None:
    """Take a viewer off the allow-list. Raises KeysError if the viewer is not on the list."""
    _check_name(name)
    path = _allowed_dir(directory) / f"{name}.key"
    try:
        path.unlink()
    except FileNotFoundError as error:
        names = ", ".join(sorted(allowed(directory).values())) or "none"
        raise KeysError(f"no viewer {name!r} is allowed; there are: {names}") from error
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error


def allowed(directory: Path) -> dict[bytes, str]:
    """Return a dict from public keys to names of allowed viewers. Raises KeysError if a file is not a certificate."""
    return {read_public_key(path): path.stem for path in sorted(_allowed_dir(directory).glob("[!.]*.key"))}


def parse_public_key(text: str) -> bytes:
    """Return the public key given by 64 hexadecimal digits or by the path of a file.

    Raises KeysError. The error never contains a key.
    """
    if _HEX_KEY.fullmatch(text):
        return bytes.fromhex(text)
    path = Path(text)
    if not os.path.exists(path):
        raise KeysError("64 hexadecimal digits or a NAME.key file is wanted, and this is neither")
    if path.name.endswith(".key_secret"):
        raise KeysError(f"{path} is a secret and stays where it is: {path.stem}.key is the file to pass on")
    return read_public_key(path)


def read_public_key(path: Path) -> bytes:
    """Return the public key in a certificate file. Raises KeysError if the file is not a certificate."""
    return _decoded(_read(path)[0], path)


def daemon_keys(endpoint: str, name: str | None) -> DaemonKeys | None:
    """Return the keys that a daemon at `endpoint` must use, or None if it may serve without keys.

    On ipc, no keys are needed. On loopback, keys are used only if `name` is given or the pair "daemon" exists. Raises
    KeysError, with the commands that help, if the daemon must not serve.
    """
    if not endpoint.startswith("tcp://"):
        if name is not None:
            raise KeysError(f"{endpoint}: keys are for tcp; ipc is guarded by the file system")
        return None
    if name is None and is_loopback(endpoint) and not os.path.lexists(_secret_path(_keys_path(), DAEMON_KEY)):
        return None  # do not create the directory of the keys if it is not needed
    directory, name = keys_dir(), name or DAEMON_KEY
    if not os.path.lexists(_secret_path(directory, name)):
        raise KeysError(
            f"{endpoint}: no key pair {name!r}, and without one other hosts are not served: "
            f"cbtop keys new {name}, then for each viewer cbtop keys allow NAME PUBLIC_KEY"
        )
    return DaemonKeys(load_pair(directory, name), directory)


def _certificate(public: str) -> str:
    return f'#   CURVE certificate of cbtop\nmetadata\ncurve\n    public-key = "{public}"\n'


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key and the secret key (or None) in a certificate, both in Z85."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CERTIFICATE_BYTES:
            raise KeysError(f"{path} is no CURVE certificate")
        return load_certificate(path)
    except ValueError as error:
        raise KeysError(f"{path} is no CURVE certificate") from error
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error


def _decoded(encoded: bytes, path: Path | str = "the key") -> bytes:
    try:
        key = z85.decode(encoded)
    except (ValueError, KeyError, struct.error):
        key = b""
    if len(key) != 32:
        raise KeysError(f"{path} holds no public key")
    return key


def _write_new(path: Path, text: str) -> None:
    """Write a new file of mode 0600, either completely or not at all. Never overwrites an existing file."""
    try:
        # the function mkstemp creates the file with O_EXCL and mode 0600
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    except OSError as error:
        raise KeysError(f"{path.parent}: {error.strerror}") from error
    try:
        with io.open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        os.link(temporary, path)
    except FileExistsError as error:
        raise KeysError(f"{path} exists, and is not overwritten") from error
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    finally:
        os.unlink(temporary)


def _secret_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.key_secret"


def _allowed_dir(directory: Path) -> Path:
    return _private_directory(directory / "allowed", "allow-list")


def _private_directory(path: Path, what: str) -> Path:
    make_private_directory(str(path), what, "CBTOP_KEYS_DIR")
    return path


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KeysError(f"{name!r:.80} cannot be a name: 1 to 64 letters, digits, and . _ @ - inside are wanted")


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise KeysError("this pyzmq was built without CURVE: install the one from PyPI (pip install pyzmq)")
