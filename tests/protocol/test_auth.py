"""Tests of keys over real TCP: authorised viewers receive everything. Others receive nothing and get the reason."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from cbtop.protocol import keys
from cbtop.protocol.auth import ZapAuthenticator
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import DecodeError, EndpointError, KeysError
from cbtop.protocol.keys import DaemonKeys, KeyPair, ViewerKeys
from cbtop.protocol.messages import Heartbeat, SourceGone
from cbtop.protocol.publisher import JOIN_PREFIX, LIVE, Publisher
from cbtop.protocol.subscriber import Subscriber
from tests.integration.hosts import DEADLINE_S, eventually
from tests.representatives import first_by_default

LOOPBACK = "tcp://127.0.0.1:0"


class Hosts:
    """Folders with the keys of a daemon and of viewers. One viewer is authorised."""

    def __init__(self, directory: Path) -> None:
        self.theirs, self.ours = directory / "daemon", directory / "viewers"
        for path in (self.theirs, self.ours):
            path.mkdir(mode=0o700)
        self.daemon = DaemonKeys(keys.make_pair(self.theirs, "daemon"), self.theirs)
        self.good = self.pair("good")
        keys.allow(self.theirs, "good", self.good.public)

    def pair(self, name: str) -> KeyPair:
        return keys.make_pair(self.ours, name)

    def viewer(self, own: KeyPair | None = None) -> ViewerKeys:
        return ViewerKeys(own or self.good, self.daemon.own.public)


@pytest.fixture
def hosts(runtime: Path) -> Hosts:
    return Hosts(runtime)


class Serving:
    """The part of a daemon that uses the network: a publisher, and a thread that runs the publisher's loop."""

    def __init__(self, keys: DaemonKeys | None, endpoint: str) -> None:
        self.publisher = Publisher(endpoint, keys)
        self.endpoint = self.publisher.endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.publisher.hear(10)
            self.publisher.answer(self.publisher.questions(JOIN_PREFIX), [SourceGone("all there is")])
            self.publisher.send(LIVE, [Heartbeat(1, ())])
            self.publisher.shut_out_revoked()
        self.publisher.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def serving(keys: DaemonKeys | None, endpoint: str = LOOPBACK) -> Iterator[Serving]:
    daemon = Serving(keys, endpoint)
    try:
        yield daemon
    finally:
        daemon.close()


@contextmanager
def listening(endpoint: str, keys: ViewerKeys | None = None) -> Iterator[Subscriber]:
    viewer = Subscriber(endpoint, keys)
    try:
        yield viewer
    finally:
        viewer.close()


def until(true: Callable[[], object], *viewers: Subscriber) -> None:
    """Let the viewers receive messages until `true()` is true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, [viewer.trouble for viewer in viewers]
        for viewer in viewers:
            with suppress(DecodeError):
                viewer.receive(5)


def nobody(hosts: Hosts) -> ViewerKeys | None:
    return None


def unknown(hosts: Hosts) -> ViewerKeys:
    return hosts.viewer(hosts.pair("unknown"))


def revoked(hosts: Hosts) -> ViewerKeys:
    pair = hosts.pair("revoked")
    keys.allow(hosts.theirs, "revoked", pair.public)
    keys.revoke(hosts.theirs, "revoked")
    return hosts.viewer(pair)


def mistaken(hosts: Hosts) -> ViewerKeys:
    return ViewerKeys(hosts.good, hosts.pair("other-daemon").public)


REFUSED = [
    (nobody, "lets in viewers with a key only: cbtop keys new viewer"),
    (unknown, "does not allow this viewer's key, or no longer does; its owner can: cbtop keys allow NAME "),
    (revoked, "does not allow this viewer's key, or no longer does; its owner can: cbtop keys allow NAME "),
    (mistaken, "has another key than --server-key says"),
]


@first_by_default(("who", "why"), REFUSED, 2)
def test_who_may_not_listen_receives_nothing_and_is_told_why(
    hosts: Hosts, who: Callable[[Hosts], ViewerKeys | None], why: str
) -> None:
    theirs = who(hosts)
    with (
        serving(hosts.daemon) as daemon,
        listening(daemon.endpoint, hosts.viewer()) as good,
        listening(daemon.endpoint, theirs) as refused,
    ):
        until(lambda: refused.is_refused, good, refused)
        assert why in refused.trouble
        assert "\n" not in refused.trouble
        if "its owner can" in why:
            assert theirs is not None
            assert refused.trouble.endswith(theirs.own.public.hex())
        before = good.received
        until(lambda: good.received > before + 50, good, refused)
        assert refused.received == 0
        assert refused.is_refused
        assert (good.trouble, good.is_refused) == ("", False)
        assert daemon.publisher.refused > 0


def null(_socket: zmq.Socket[bytes], _hosts: Hosts) -> None: ...


def plain(socket: zmq.Socket[bytes], _hosts: Hosts) -> None:
    socket.plain_username, socket.plain_password = b"good", b"good"


def curve_with_a_fresh_key(socket: zmq.Socket[bytes], hosts: Hosts) -> None:
    socket.curve_serverkey = hosts.daemon.own.public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def curve_with_the_public_key_of_a_good_one(socket: zmq.Socket[bytes], hosts: Hosts) -> None:
    socket.curve_serverkey = hosts.daemon.own.public
    socket.curve_secretkey = zmq.curve_keypair()[1]
    socket.curve_publickey = hosts.good.public


@first_by_default("attempt", [null, plain, curve_with_a_fresh_key, curve_with_the_public_key_of_a_good_one], 2)
def test_a_client_that_is_none_of_ours_receives_nothing_either(
    hosts: Hosts, attempt: Callable[[zmq.Socket[bytes], Hosts], None]
) -> None:
    context = zmq.Context()
    with serving(hosts.daemon) as daemon, listening(daemon.endpoint, hosts.viewer()) as good:
        intruder = context.socket(zmq.SUB)
        attempt(intruder, hosts)
        intruder.connect(daemon.endpoint)
        intruder.subscribe(b"")
        until(lambda: good.received > 50, good)
        assert not intruder.poll(0)
        context.destroy(linger=0)


def test_as_long_as_nobody_answers_at_the_door_nobody_gets_in(hosts: Hosts) -> None:
    publisher = Publisher(LOOPBACK, hosts.daemon)
    with listening(publisher.endpoint, hosts.viewer()) as good:
        for _ in range(50):
            publisher.send(LIVE, [Heartbeat(1, ())])
            assert good.receive(10) == []
        assert good.received == 0
    publisher.close()


@pytest.mark.slow
def test_revoking_ends_a_link_that_is_up_and_leaves_the_others(hosts: Hosts) -> None:
    bad = hosts.pair("bad")
    keys.allow(hosts.theirs, "bad", bad.public)
    with (
        serving(hosts.daemon) as daemon,
        listening(daemon.endpoint, hosts.viewer()) as good,
        listening(daemon.endpoint, hosts.viewer(bad)) as out,
    ):
        until(lambda: out.received > 20 and good.received > 20, good, out)
        keys.revoke(hosts.theirs, "bad")
        until(lambda: out.is_refused, good, out)
        assert "does not allow this viewer's key" in out.trouble
        heard, before = out.received, good.received
        until(lambda: good.received > before + 50, good, out)
        assert (out.received, good.trouble) == (heard, "")

        keys.allow(hosts.theirs, "again", bad.public)
        until(lambda: out.received > heard + 20, good, out)
        assert (out.trouble, out.is_refused) == ("", False)


@pytest.mark.slow
def test_who_is_let_in_later_needs_no_restart_and_disturbs_nobody(hosts: Hosts) -> None:
    late = hosts.pair("late")
    with serving(hosts.daemon) as daemon, listening(daemon.endpoint, hosts.viewer()) as good:
        until(lambda: good.received > 5, good)
        sockets = daemon.publisher
        with listening(daemon.endpoint, hosts.viewer(late)) as viewer:
            until(lambda: viewer.is_refused, good, viewer)
            keys.allow(hosts.theirs, "late", late.public)
            until(lambda: viewer.received > 20, good, viewer)
        assert daemon.publisher is sockets
        assert good.trouble == ""


def test_an_unreadable_allow_list_lets_nobody_in_and_cuts_off_viewers(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(hosts.daemon) as daemon, listening(daemon.endpoint, hosts.viewer()) as viewer:
        until(lambda: viewer.received > 5, viewer)
        (hosts.theirs / "allowed").chmod(0o777)
        until(lambda: viewer.is_refused, viewer)
        assert "until that is mended nobody is let in" in caplog.text
        assert caplog.text.count("0700 is wanted") == 1
        (hosts.theirs / "allowed").chmod(0o700)
        heard = viewer.received
        until(lambda: viewer.received > heard, viewer)


def test_other_hosts_are_served_only_with_keys_that_let_somebody_in(hosts: Hosts) -> None:
    keys.revoke(hosts.theirs, "good")
    for endpoint in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://gpu-box:0"):
        with pytest.raises(KeysError, match="not served without keys: cbtop keys new daemon"):
            Publisher(endpoint)
        with pytest.raises(KeysError, match=r"no viewer is allowed yet.*: cbtop keys allow NAME PUBLIC_KEY"):
            Publisher(endpoint, hosts.daemon)
        with pytest.raises(KeysError, match="only talked to with keys: pass --server-key"):
            Subscriber(endpoint)


def test_loopback_needs_no_keys_until_there_are_some(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(hosts.ours))
    assert keys.daemon_keys("tcp://127.0.0.1:1", None) is None
    with pytest.raises(KeysError, match="cbtop keys new daemon"):
        keys.daemon_keys("tcp://0.0.0.0:1", None)
    with pytest.raises(KeysError, match="cbtop keys new backup"):
        keys.daemon_keys("tcp://127.0.0.1:1", "backup")
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(hosts.theirs))
    assert keys.daemon_keys("tcp://127.0.0.1:1", None) == hosts.daemon
    assert keys.daemon_keys(default_endpoint(), None) is None
    with pytest.raises(KeysError, match="keys are for tcp"):
        keys.daemon_keys(default_endpoint(), "daemon")


def test_loopback_without_keys_needs_no_place_for_them(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(runtime / "keys"))
    assert keys.daemon_keys("tcp://127.0.0.1:1", None) is None
    assert not (runtime / "keys").exists()


def test_without_keys_on_loopback_everything_is_as_on_ipc() -> None:
    with serving(None) as daemon, listening(daemon.endpoint) as viewer:
        until(lambda: viewer.received > 20, viewer)
        assert viewer.trouble == ""


def test_over_ipv6_it_is_the_same(hosts: Hosts) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with (
        serving(hosts.daemon, "tcp://[::1]:0") as daemon,
        listening(daemon.endpoint, hosts.viewer()) as good,
        listening(daemon.endpoint, unknown(hosts)) as refused,
        listening(daemon.endpoint) as keyless,
    ):
        until(lambda: good.received > 20 and refused.is_refused and keyless.is_refused, good, refused, keyless)
        assert (refused.received, keyless.received) == (0, 0)
        assert "with a key only" in keyless.trouble


def test_a_viewer_with_a_key_is_told_when_the_daemon_uses_none(hosts: Hosts) -> None:
    with serving(None) as daemon, listening(daemon.endpoint, hosts.viewer()) as viewer:
        until(lambda: viewer.is_refused, viewer)
        assert viewer.trouble == "the daemon uses no keys: leave out --server-key"
        assert viewer.received == 0


@contextmanager
def stranger(says: bytes | None) -> Iterator[str]:
    """Run a server that is not a daemon. For each connection, it sends `says` (None: nothing) and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def run() -> None:
            server.settimeout(0.05)
            while not stop.is_set():
                with suppress(OSError):
                    peer, _address = server.accept()
                    with peer:
                        peer.settimeout(0.2)
                        if says is not None:
                            peer.recv(100)
                            peer.sendall(says)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


@first_by_default("with_keys", [False, True], 2)
@first_by_default("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.9\r\n", b"\xff" * 64], 2)
def test_who_is_no_daemon_is_recognised(hosts: Hosts, says: bytes, with_keys: bool) -> None:
    keys = hosts.viewer() if with_keys else None
    with stranger(says) as endpoint, listening(endpoint, keys) as viewer:
        until(lambda: viewer.is_refused, viewer)
        assert "no cbtop daemon" in viewer.trouble


def test_a_tunnel_with_nothing_behind_it_is_told_and_may_yet_lead_somewhere() -> None:
    with stranger(None) as endpoint, listening(endpoint) as viewer:
        until(lambda: viewer.trouble, viewer)
        assert "closed at once" in viewer.trouble
        assert not viewer.is_refused


def test_a_port_without_a_listener_is_reported_and_a_later_daemon_is_heard(hosts: Hosts) -> None:
    with serving(hosts.daemon) as first, listening(first.endpoint, hosts.viewer()) as viewer:
        until(lambda: viewer.received > 5, viewer)
        first.close()
        until(lambda: viewer.trouble, viewer)
        assert (viewer.trouble, viewer.is_refused) == ("connection refused", False)
        second, heard = Publisher(first.endpoint, hosts.daemon), viewer.received
        while viewer.received == heard:
            second.hear(5)
            second.send(LIVE, [Heartbeat(1, ())])
            viewer.receive(5)
        assert viewer.trouble == ""
        second.close()


def test_closing_never_hangs_whatever_the_link_is_like(hosts: Hosts) -> None:
    with serving(hosts.daemon) as daemon:
        for theirs in (None, hosts.viewer(), mistaken(hosts)):
            for timeout_ms in (0, 1, 20, 200):
                viewer = Subscriber(daemon.endpoint, theirs)
                viewer.receive(timeout_ms)
                viewer.close()


def test_every_refusal_counts_and_is_logged_once_a_peer_and_minute(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    authenticator = ZapAuthenticator(hosts.daemon, clock_s=lambda: now_s[0])
    context = zmq.Context()
    door = context.socket(zmq.XPUB)
    authenticator.guard(door)
    door.bind(LOOPBACK)
    port = door.last_endpoint.decode().rpartition(":")[2]
    secrets = []

    def knock(address: str) -> None:
        viewer = context.socket(zmq.SUB)
        viewer.curve_serverkey = hosts.daemon.own.public
        viewer.curve_publickey, secret = zmq.curve_keypair()
        viewer.curve_secretkey = secret
        secrets.append(secret)
        before = authenticator.refused
        viewer.connect(f"tcp://{address}:0;127.0.0.1:{port}")
        eventually(lambda: authenticator.answer() or authenticator.refused > before)
        viewer.close(linger=0)

    with caplog.at_level(logging.WARNING, "cbtop.daemon"):
        for address in ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.2"):
            knock(address)
        now_s[0] = 61.0
        knock("127.0.0.2")
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in said] == [
        "refused a viewer from 127.0.0.2",
        "refused a viewer from 127.0.0.3",
        "refused a viewer from 127.0.0.2",
    ]
    assert said[-1].endswith("(5 refused so far)")
    assert not any(secret.decode() in caplog.text for secret in secrets)
    authenticator.leave()
    context.destroy(linger=0)


def test_a_socket_file_is_for_its_owner_alone_whatever_the_umask(runtime: Path) -> None:
    before = os.umask(0)
    try:
        publisher = Publisher(default_endpoint())
        assert os.umask(0) == 0  # the umask is unchanged
    finally:
        os.umask(before)
    assert stat.S_IMODE((runtime / "daemon.sock").stat().st_mode) == 0o600
    publisher.close()


def test_an_unconnectable_address_is_an_error_and_leaves_nothing_open(hosts: Hosts) -> None:
    with pytest.raises(EndpointError, match="tcp://"):
        Subscriber("tcp://*:5555", hosts.viewer())
