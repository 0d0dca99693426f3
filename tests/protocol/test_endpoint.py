"""Where things are, and which addresses and directories are refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cbtop.protocol import endpoint as endpoint_module
from cbtop.protocol.endpoint import default_endpoint, is_loopback, parse_endpoint, runtime_dir
from cbtop.protocol.errors import EndpointError


def test_the_runtime_directory_is_made_for_the_user_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBTOP_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert runtime_dir() == runtime / "cbtop"
    assert stat.S_IMODE((runtime / "cbtop").stat().st_mode) == 0o700


def test_without_xdg_it_lies_in_the_temporary_directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBTOP_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(runtime))
    assert runtime_dir() == runtime / f"cbtop-{os.getuid()}"


def test_a_directory_that_others_may_enter_is_refused_with_the_way_out(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(EndpointError, match="mode 0755, 0700 is wanted: chmod 700"):
        runtime_dir()
    runtime.chmod(0o700)


def test_a_link_is_no_directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime / "real").mkdir(mode=0o700)
    (runtime / "link").symlink_to(runtime / "real")
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(runtime / "link"))
    with pytest.raises(EndpointError, match="not a directory"):
        runtime_dir()


@pytest.fixture
def nowhere_named(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No directory is named; the temporary one, and the memory that processes share, lie in the one given."""
    monkeypatch.delenv("CBTOP_RUNTIME_DIR")
    monkeypatch.setattr(endpoint_module, "SHARED_MEMORY", runtime / "shm")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(runtime))
    return runtime


def test_where_files_are_copied_on_write_the_memory_that_processes_share_is_taken(
    nowhere_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "copies_on_write", lambda _descriptor: True)
    name = f"cbtop-{os.getuid()}"
    assert runtime_dir() == nowhere_named / name  # where there is no such memory: no ring can be made there
    (nowhere_named / "shm").mkdir()
    assert runtime_dir() == nowhere_named / "shm" / name
    assert (nowhere_named / "shm" / name).stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(nowhere_named))
    assert runtime_dir() == nowhere_named / "shm" / name
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(nowhere_named / "named"))
    assert runtime_dir() == nowhere_named / "named"


def test_where_no_temporary_directory_can_be_written_the_memory_that_processes_share_is_taken(
    nowhere_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(EndpointError, match="no temporary directory can be written; set CBTOP_RUNTIME_DIR"):
        runtime_dir()
    (nowhere_named / "shm").mkdir()
    assert runtime_dir() == nowhere_named / "shm" / f"cbtop-{os.getuid()}"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_is_none_is_named_with_the_way_out(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (runtime / "file").touch()
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(runtime / name))
    with pytest.raises(EndpointError, match=rf"{runtime / name} .*ot a directory; set CBTOP_RUNTIME_DIR to"):
        runtime_dir()


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
