"""Tests of the addresses of daemons: valid addresses are found, and invalid ones are rejected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.protocol.endpoint import default_endpoint, is_loopback, parse_endpoint
from cbtop.protocol.errors import EndpointError


def test_without_descriptors_no_socket_is_made_and_the_limit_is_named() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "from cbtop.protocol.errors import EndpointError\n"
        "from cbtop.protocol.publisher import Publisher\n"
        "from cbtop.protocol.subscriber import Subscriber\n"
        "for make in Publisher, Subscriber:\n"
        "    try: make('tcp://127.0.0.1:0')\n"
        "    except EndpointError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout.count("24 are wanted") == done.stdout.count("ulimit -n 1024") == 2


def test_the_default_address_is_an_ipc_socket_in_it(runtime: Path) -> None:
    assert default_endpoint() == f"ipc://{runtime}/daemon.sock"


@pytest.mark.parametrize(
    "good",
    ["ipc:///tmp/x.sock", "tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5", "tcp://gpu-box.lan:5555"],
)
def test_ipc_and_tcp_are_taken(good: str) -> None:
    assert parse_endpoint(good) == good


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("tcp://10.0.0.7:5555;127.0.0.1:1", "is wanted"),
        ("tcp://me@10.0.0.7:5555", "is wanted"),
        ("tcp://[::1:5555", "is wanted"),
        ("tcp://a b:5555", "is wanted"),
        ("tcp://127.0.0.1", "is wanted"),
        ("tcp://127.0.0.1:99999", "is wanted"),
        ("http://127.0.0.1:5555", "is wanted"),
        ("tcp://127.0.0.1:5555/path", "is wanted"),
        ("", "is wanted"),
        ("ipc://", "1 to 107 bytes"),
        ("ipc:///" + "x" * 107, "1 to 107 bytes"),
    ],
)
def test_other_addresses_are_refused_and_say_what_is_wanted(bad: str, complaint: str) -> None:
    with pytest.raises(EndpointError, match=complaint):
        parse_endpoint(bad)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.7:1", False),
        ("tcp://localhost.evil.example:1", False),
        ("tcp://127.0.0.1.evil.example:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_only_what_no_other_host_can_reach_is_loopback(endpoint: str, expected: bool) -> None:
    assert is_loopback(parse_endpoint(endpoint)) is expected
