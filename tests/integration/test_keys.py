"""Tests of who may connect to a daemon, and what everyone else sees.

Daemons and viewers are real processes that use TCP, on one host and on two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cbtop.protocol.keys import make_pair
from tests.integration.hosts import CBTOP, DEADLINE_S, PATIENTLY, SEEING, cbtop, eventually, host, wait_until_seen
from tests.integration.test_terminal import terminal

ONCE = ("--headless", "--once", "--window=all", *PATIENTLY, "--format", "json")


class Machine:
    """A user's keys on one machine. `prefix` is put before a command to run it on that machine."""

    def __init__(self, directory: Path, prefix: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.prefix = prefix
        self.said: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"CBTOP_KEYS_DIR": str(self.directory), "PYTHONWARNINGS": "error"}

    def keys(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `cbtop keys` with this machine's keys in this process."""
        return self.cbtop_here("keys", *arguments)

    def cbtop_here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line with this machine's keys in this process. A new process would take half a second."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CBTOP_KEYS_DIR", str(self.directory))
            done = cbtop(*arguments)
        self.said += [done.stdout, done.stderr]
        return done

    def cbtop(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line in a new process on that machine, with the user's keys."""
        done = subprocess.run(
            [*self.prefix, *CBTOP, *arguments],
            env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        self.said += [done.stdout, done.stderr]
        return done

    def new(self, name: str) -> str:
        """Create a pair of keys. Returns the public key."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        return make_pair(self.directory, name).public.hex()

    def secrets(self) -> list[str]:
        files = list(self.directory.glob("*.key_secret"))
        return [path.read_text().partition('secret-key = "')[2].partition('"')[0] for path in files]

    @contextmanager
    def daemon(self, *arguments: str) -> Iterator[str]:
        """Run a daemon. Yields its address."""
        with subprocess.Popen(
            [*self.prefix, *CBTOP, "daemon", *arguments], env=self.environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr
            line = process.stderr.readline()
            try:
                assert "serving" in line, line + process.stderr.read()
                yield line.split()[3].rstrip(";")
            finally:
                process.send_signal(signal.SIGTERM)
                self.said.append(line + process.stderr.read())


@pytest.fixture
def theirs(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "theirs")


@pytest.fixture
def ours(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "ours")


def test_four_commands_admit_a_viewer_and_nobody_else_hears_data_or_a_secret(theirs: Machine, ours: Machine) -> None:
    for machine, name in ((theirs, "daemon"), (ours, "viewer")):
        assert machine.keys("new", name).returncode == 0
    server, viewer = (
        json.loads(machine.keys("list", "--json").stdout)["pairs"][0]["public_key"] for machine in (theirs, ours)
    )
    ours.new("other")
    wrong = ours.new("wrong-daemon")
    revoked = ours.new("revoked")
    for name, key in (("laptop", viewer), ("revoked", revoked)):
        assert theirs.keys("allow", name, key).returncode == 0
    assert theirs.keys("revoke", "revoked").returncode == 0
    with host() as process, theirs.daemon("--bind", "tcp://127.0.0.1:0", "--debug") as endpoint:
        let_in = ours.cbtop_here(*ONCE, "--connect", endpoint, "--server-key", server)
        assert let_in.returncode == 0, let_in.stderr
        assert json.loads(let_in.stdout)["sources"][0]["pid"] == process.pid
        for arguments, why in (
            ((), "lets in viewers with a key only"),
            (("--server-key", server, "--key", "other"), "does not allow this viewer's key"),
            (("--server-key", server, "--key", "revoked"), "does not allow this viewer's key"),
            (("--server-key", wrong), "has another key than --server-key says"),
        ):
            refused = ours.cbtop_here(*ONCE, "--connect", endpoint, *arguments)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert refused.stderr.startswith("cbtop: the daemon ")
            assert why in refused.stderr
            assert refused.stderr.count("\n") == 1
        ours.cbtop("--debug", *ONCE, "--connect", endpoint)
    said = "".join(theirs.said + ours.said)
    assert "Traceback" in said  # --debug prints tracebacks
    assert "refused a viewer from 127.0.0.1, whose key is not allowed" in said
    secrets = theirs.secrets() + ours.secrets()
    assert len(secrets) == 5
    assert all(len(secret) == 40 and secret not in said for secret in secrets)


@pytest.mark.slow
def test_other_hosts_are_not_served_until_the_commands_named_were_run(theirs: Machine) -> None:
    bind = ("daemon", "--bind", "tcp://0.0.0.0:0")
    first = theirs.cbtop(*bind)
    assert (first.returncode, first.stderr.count("\n")) == (2, 1)
    assert "cbtop keys new daemon" in first.stderr
    key = theirs.new("daemon")
    second = theirs.cbtop(*bind)
    assert (second.returncode, second.stderr.count("\n")) == (2, 1)
    assert "cbtop keys allow NAME PUBLIC_KEY" in second.stderr
    theirs.keys("allow", "laptop", key)
    with theirs.daemon(*bind[1:]) as endpoint:
        assert endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.slow
def test_without_keys_loopback_is_served_and_it_is_said_who_can_listen(theirs: Machine, ours: Machine) -> None:
    with host() as process, theirs.daemon("--bind", "tcp://127.0.0.1:0") as endpoint:
        done = ours.cbtop_here(*ONCE, "--connect", endpoint)
        assert json.loads(done.stdout)["sources"][0]["pid"] == process.pid
    assert "every user of this machine can listen" in theirs.said[-1]


@pytest.mark.slow
def test_who_is_revoked_while_watching_is_told_on_the_spot(theirs: Machine, ours: Machine) -> None:
    server, viewer = theirs.new("daemon"), ours.new("viewer")
    theirs.keys("allow", "laptop", viewer)
    with host(), theirs.daemon("--bind", "tcp://127.0.0.1:0") as endpoint:
        ours.cbtop_here(*ONCE, "--connect", endpoint, "--server-key", server)
        with subprocess.Popen(
            [sys.executable, "-c", SEEING, "--headless", *PATIENTLY, "--connect", endpoint, "--server-key", server],
            env=ours.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as watching:  # fmt: skip
            wait_until_seen(watching)
            theirs.keys("revoke", "laptop")
            out, err = watching.communicate(timeout=DEADLINE_S)
        assert (watching.returncode, out) == (1, "")
        assert "does not allow this viewer's key, or no longer does" in err


# The default run skips this test, because a test below also refuses and admits a viewer, without a screen.
@pytest.mark.slow
def test_the_screen_says_why_it_is_refused_and_opens_once_it_is_let_in(
    theirs: Machine, ours: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, viewer = theirs.new("daemon"), ours.new("viewer")
    theirs.keys("allow", "somebody-else", server)
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(ours.directory))
    with host(), theirs.daemon("--bind", "tcp://127.0.0.1:0") as endpoint:
        with terminal("--connect", endpoint, "--server-key", server) as screen:
            screen.wait_for("✗ refused: ", "does not allow this viewer's key", viewer)
            theirs.keys("allow", "laptop", viewer)
            screen.wait_for("LIVE", "DownProjection")
            eventually(lambda: "refused" not in screen.read())
            theirs.keys("revoke", "laptop")
            screen.wait_for("✗ refused: ")
            screen.send("q")
            assert screen.exit_code() == 0
            assert screen.is_clean
        with terminal("--connect", endpoint) as screen:
            screen.wait_for("✗ refused: ", "with a key only")
            screen.send("q")
            assert screen.exit_code() == 0


# A program that connects without a key, which our viewers never do. The program prints whether a message arrived
# within two seconds.
KNOCK = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
print(socket.poll(2000))
"""


@contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield two command prefixes. Each prefix runs a command in one of two connected network namespaces.

    Skip the test if the namespaces cannot be created.
    """

    def run(*command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"two hosts need {error.filename}")
        if done.returncode:
            pytest.skip(f"two hosts need what this machine refuses: {' '.join(command)}: {done.stderr.strip()}")

    run("unshare", "--map-root-user", "--net", "true")
    with ExitStack() as stack:

        def start(*command: str) -> int:
            process = stack.enter_context(
                subprocess.Popen([*command, "sh", "-c", "echo; exec sleep 3600"], stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout
            process.stdout.readline()
            return process.pid

        def inside(pid: int) -> tuple[str, ...]:
            return ("nsenter", "--preserve-credentials", "--user", "--net", "--target", str(pid))

        near_pid = start("unshare", "--map-root-user", "--net")
        near = inside(near_pid)
        far_pid = start(*near, "unshare", "--net")
        far = inside(far_pid)
        run(*near, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "elbac", "netns", str(far_pid))
        for place, device, address in ((near, "cable", "10.99.0.1/24"), (far, "elbac", "10.99.0.2/24")):
            run(*place, "ip", "address", "add", address, "dev", device)
            run(*place, "ip", "link", "set", device, "up")
        yield near, far


@pytest.mark.slow  # The default run skips this test, because the other tests do the same on one host.
def test_between_two_hosts_only_who_is_allowed_hears_anything(tmp_path: Path) -> None:
    with two_hosts() as (near, far):
        theirs, ours = Machine(tmp_path / "theirs", near), Machine(tmp_path / "ours", far)
        server, viewer = theirs.new("daemon"), ours.new("viewer")
        ours.new("other")
        theirs.keys("allow", "laptop", viewer)
        with host() as process, theirs.daemon("--bind", "tcp://10.99.0.1:0") as endpoint:
            assert endpoint.startswith("tcp://10.99.0.1:")
            let_in = ours.cbtop(*ONCE, "--connect", endpoint, "--server-key", server)
            assert let_in.returncode == 0, let_in.stderr
            assert json.loads(let_in.stdout)["sources"][0]["pid"] == process.pid
            refused = ours.cbtop(*ONCE, "--connect", endpoint, "--server-key", server, "--key", "other")
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "does not allow this viewer's key" in refused.stderr
            knock = subprocess.run(
                [*far, sys.executable, "-c", KNOCK, endpoint],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert (knock.returncode, knock.stdout) == (0, "0\n")
        assert "refused a viewer from 10.99.0.2" in theirs.said[-1]
