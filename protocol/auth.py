"""Access to the daemon's socket: the authenticator, and the reasons why a viewer was refused.

CURVE proves that a viewer owns the key that it presents, but it accepts any key. To restrict keys, libzmq sends a
request over ZAP (ZeroMQ RFC 27) to an inproc address of the context. The authenticator answers it.

Only the socket's monitor reports failed handshakes, and it does not say which viewer failed.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Callable

import zmq

from cbtop.protocol.endpoint import host_and_port, is_loopback
from cbtop.protocol.errors import EndpointError, KeysError
from cbtop.protocol.keys import DaemonKeys, ViewerKeys

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # RFC 27
ZAP_DOMAIN = b"cbtop"
SAY_AGAIN_S = 60.0
MAX_PEERS = 256  # within SAY_AGAIN_S seconds, at most this many different peers are logged
PROBE_S = 0.3

_WRONG_SERVER_KEY = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_GREETING_BYTES = 64
# The start of a ZMTP 3.1 greeting (RFC 37). A peer that receives this start and a version number sends its whole
# greeting.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_log = logging.getLogger("cbtop.daemon")


class ZapAuthenticator:
    """Lets a viewer into the daemon's socket if its key is on the allow-list. Without `keys`, lets in every viewer.

    It is needed even without keys, because it makes libzmq refuse peers with a ZMTP version before 3. Messages of
    such peers do not identify their sender.

    pyzmq's own Authenticator is not enough, for two reasons. It does not read its list again for each viewer. It also
    does not remember which keys it has let in, so it cannot tell whether a viewer's key was revoked.
    """

    def __init__(self, keys: DaemonKeys | None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.refused = 0
        self._keys = keys
        self._clock_s = clock_s
        self._inside: set[bytes] = set()  # keys of all viewers that were let in since the socket was opened
        self._said_s: dict[str, float] = {}

    def guard(self, door: zmq.Socket[bytes]) -> None:
        """Control who may connect to the socket `door`. Call it before `door` binds.

        No viewer is let in before the first call of `answer`.
        """
        self._inside.clear()
        self.questions = door.context.socket(zmq.REP)  # Poll this socket, and call `answer` when a request arrives.
        self.questions.bind(ZAP_ENDPOINT)
        door.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        door.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._keys:
            door.setsockopt(zmq.CURVE_SERVER, 1)
            door.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret)

    def answer(self) -> None:
        """Answer the next viewer that waits to be let in, if any."""
        if self.questions.poll(0):
            self._answer(self.questions.recv_multipart())

    def failed(self, reason: int) -> None:
        """Count a handshake that failed before it reached the authenticator.

        `reason` is the value of the monitor's event.
        """
        if not self._keys:
            return
        if reason == _WRONG_SERVER_KEY:
            self._refuse("who took us for another", "a viewer that expects another key of this daemon")
        else:  # libzmq does not report the address of this viewer
            self._refuse("who has no key", "a peer that shows no key, or is no viewer")

    def has_revoked(self) -> bool:
        """Whether a key was revoked after a viewer with this key was let in."""
        return not self._inside <= self._allowed()

    def leave(self) -> None:
        """Stop answering. Call this before the socket's context ends."""
        self.questions.close(linger=0)

    def _answer(self, question: list[bytes]) -> None:
        _version, request, _domain, address, _routing_id, mechanism, *credentials = question
        key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if key in self._allowed():
            self._inside.add(key)
            reply = [b"200", b"OK", key.hex().encode(), b""]
        else:
            peer = address.decode("ascii", "replace")
            self._refuse(
                peer,
                f"a viewer from {peer}, whose key is not allowed; to let it in: cbtop keys allow NAME {key.hex()}",
            )
            reply = [b"400", b"not allowed", b"", b""]
        self.questions.send_multipart([b"1.0", request, *reply])

    def _allowed(self) -> set[bytes]:
        if not self._keys:
            return {b""}
        try:
            return {*self._keys.allowed(), self._keys.own.public}
        except (KeysError, EndpointError) as error:
            self.log_once("the allow-list", f"{error}; until that is mended nobody is let in")
            return {self._keys.own.public}

    def _refuse(self, peer: str, what: str) -> None:
        self.refused += 1
        self.log_once(peer, f"refused {what} ({self.refused} refused so far)")

    def log_once(self, about: str, line: str) -> None:
        """Log `line`, unless a line with the same `about` was logged in the last SAY_AGAIN_S seconds."""
        now_s = self._clock_s()
        self._said_s = {who: at_s for who, at_s in self._said_s.items() if now_s - at_s < SAY_AGAIN_S}
        if about not in self._said_s and len(self._said_s) < MAX_PEERS:
            self._said_s[about] = now_s
            _log.warning("%s", line)


def monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event of a socket's monitor and the value of the event."""
    head, _endpoint = monitor.recv_multipart()
    event, value = struct.unpack("=Hi", head)
    return event, value


def not_allowed(keys: ViewerKeys) -> str:
    """Return the message for a viewer if the daemon's authenticator refused the viewer's key."""
    return (
        "the daemon does not allow this viewer's key, or no longer does; its owner can: "
        f"cbtop keys allow NAME {keys.own.public.hex()}"
    )


def why_not(endpoint: str, keys: ViewerKeys | None) -> tuple[str, bool]:
    """Return why a viewer with `keys` cannot connect to `endpoint`, and whether waiting is useless.

    Waiting is useless if a person must change something first. The result may be wrong while a daemon restarts.
    """
    try:
        mechanism = _mechanism(endpoint)
    except TimeoutError:
        return "no answer", False
    except OSError as error:
        return (error.strerror or str(error)).lower(), False
    match mechanism:
        case None:
            return (
                "the connection is closed at once: the daemon has no room for more viewers, or, through ssh -L, "
                "does not run at the other end",
                False,
            )
        case b"CURVE" if keys is None:
            return (
                "the daemon lets in viewers with a key only: cbtop keys new viewer, have its owner allow the key, "
                "and pass --server-key",
                True,
            )
        case b"CURVE":
            return "the daemon has another key than --server-key says; its owner sees it with cbtop keys list", True
        case b"NULL" if keys and is_loopback(endpoint):
            return "the daemon uses no keys: leave out --server-key", True
        case _:
            return "what answers there is not the daemon: no cbtop daemon, or one without keys", True


def _mechanism(endpoint: str) -> bytes | None:
    """Return the security mechanism of the listener at `endpoint`: CURVE or NULL.

    Returns b"" if the listener does not speak ZMTP, and None if the listener closed the connection at once. Raises
    OSError.
    """
    deadline_s = time.monotonic() + PROBE_S
    said = b""
    with socket.create_connection(host_and_port(endpoint), PROBE_S) as peer:
        peer.sendall(_SIGNATURE + b"\x03")
        while len(said) < _GREETING_BYTES and (not said or said[0] == 0xFF):
            peer.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                more = peer.recv(_GREETING_BYTES - len(said))
            except ConnectionResetError:
                more = b""
            if not more:
                break
            said += more
    if not said:
        return None
    return said[12:32].rstrip(b"\0") if len(said) == _GREETING_BYTES and said[0] == 0xFF else b""
