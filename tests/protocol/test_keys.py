"""Tests of key files: only their owner can read them. Key files are never overwritten."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol import keys
from cbtop.protocol.errors import EndpointError, KeysError


@pytest.fixture
def directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(runtime / "keys"))
    return keys.keys_dir()


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_whatever_the_umask_only_the_owner_reads_keys_and_lists(directory: Path) -> None:
    pair = keys.make_pair(directory, "daemon")
    keys.allow(directory, "laptop", pair.public)
    assert {mode(path) for path in directory.rglob("*") if path.is_file()} == {0o600}
    assert {mode(path) for path in (directory, *directory.rglob("*")) if path.is_dir()} == {0o700}
    # The folder has the pair of keys, the list and its one key, but no temporary files.
    assert len(list(directory.rglob("*"))) == 4


def test_they_lie_where_the_environment_says(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CBTOP_KEYS_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(runtime / "config"))
    assert keys.keys_dir() == runtime / "config/cbtop/keys"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(runtime / "home"))
    assert keys.keys_dir() == runtime / "home/.config/cbtop/keys"


def test_a_directory_that_others_may_enter_is_refused_with_the_way_out(directory: Path) -> None:
    directory.chmod(0o750)
    with pytest.raises(EndpointError, match="mode 0750, 0700 is wanted: chmod 700"):
        keys.keys_dir()


def test_a_pair_is_read_back_and_other_zeromq_tools_read_it_too(directory: Path) -> None:
    pair = keys.make_pair(directory, "viewer")
    assert keys.load_pair(directory, "viewer") == pair
    assert keys.pairs(directory) == {"viewer": pair.public}
    public, secret = zmq.auth.load_certificate(directory / "viewer.key_secret")
    assert (public, secret) == (zmq.curve_public(pair.secret), pair.secret)
    assert zmq.auth.load_certificate(directory / "viewer.key") == (public, None)


@pytest.mark.parametrize("left", ["viewer.key", "viewer.key_secret"])
def test_a_pair_is_never_overwritten(directory: Path, left: str) -> None:
    keys.make_pair(directory, "viewer")
    for path in directory.glob("viewer.*"):
        if path.name != left:
            path.unlink()
    before = (directory / left).read_bytes()
    with pytest.raises(KeysError, match="exists, and is not overwritten"):
        keys.make_pair(directory, "viewer")
    assert (directory / left).read_bytes() == before
    assert [path.name for path in directory.iterdir()] == [left]


def test_a_link_planted_for_the_secret_is_not_followed(directory: Path, runtime: Path) -> None:
    (directory / "viewer.key_secret").symlink_to(runtime / "elsewhere")
    with pytest.raises(KeysError, match="exists"):
        keys.make_pair(directory, "viewer")
    assert not (runtime / "elsewhere").exists()


def test_a_secret_that_others_may_read_is_not_used(directory: Path) -> None:
    keys.make_pair(directory, "viewer")
    (directory / "viewer.key_secret").chmod(0o640)
    with pytest.raises(KeysError, match="mode 0640") as caught:
        keys.load_pair(directory, "viewer")
    assert "chmod 600" in str(caught.value)


def test_a_pair_that_is_not_there_is_named_with_the_command_that_makes_it(directory: Path) -> None:
    with pytest.raises(KeysError, match="cbtop keys new viewer"):
        keys.load_pair(directory, "viewer")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "x" * 65, "a b", "a\n", "\x1b[31m", "é"])
def test_a_name_that_could_be_a_path_or_an_option_is_refused(directory: Path, name: str) -> None:
    for refused in (
        lambda: keys.make_pair(directory, name),
        lambda: keys.load_pair(directory, name),
        lambda: keys.allow(directory, name, bytes(32)),
        lambda: keys.revoke(directory, name),
    ):
        with pytest.raises(KeysError, match="cannot be a name") as caught:
            refused()
        assert "\x1b" not in str(caught.value)
    assert not [path for path in directory.rglob("*") if path.is_file()]


def test_who_is_allowed_is_on_the_list_until_revoked(directory: Path) -> None:
    one, two = bytes(range(32)), bytes(32)
    keys.allow(directory, "one", one)
    keys.allow(directory, "two", two)
    assert keys.allowed(directory) == {one: "one", two: "two"}
    keys.revoke(directory, "one")
    assert keys.allowed(directory) == {two: "two"}
    with pytest.raises(KeysError, match="no viewer 'one' is allowed; there are: two"):
        keys.revoke(directory, "one")


def test_a_name_and_a_key_stand_on_the_list_once(directory: Path) -> None:
    keys.allow(directory, "one", bytes(32))
    with pytest.raises(KeysError, match="allowed already, as one"):
        keys.allow(directory, "other", bytes(32))
    with pytest.raises(KeysError, match="exists"):
        keys.allow(directory, "one", bytes(range(32)))
    assert keys.allowed(directory) == {bytes(32): "one"}


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b'public-key = "short"', b'public-key = "' + b"\xff" * 40 + b'"', b"x" * 5000],
    ids=["empty", "words", "short", "not Z85", "long"],
)
def test_a_damaged_file_on_the_list_is_named_and_lets_nobody_in(directory: Path, content: bytes) -> None:
    keys.allow(directory, "good", bytes(32))
    (directory / "allowed" / "bad.key").write_bytes(content)
    with pytest.raises(KeysError, match=r"bad\.key"):
        keys.allowed(directory)


def test_a_public_key_is_64_digits_or_a_file_and_never_a_secret(directory: Path) -> None:
    pair = keys.make_pair(directory, "viewer")
    assert keys.parse_public_key(pair.public.hex()) == pair.public
    assert keys.parse_public_key(pair.public.hex().upper()) == pair.public
    assert keys.parse_public_key(str(directory / "viewer.key")) == pair.public
    with pytest.raises(KeysError, match=r"viewer\.key is the file to pass on"):
        keys.parse_public_key(str(directory / "viewer.key_secret"))


@given(text=st.text(max_size=100))
def test_what_is_no_public_key_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(KeysError) as caught:
        keys.parse_public_key("nobody may see this" + text)
    assert "nobody may see" not in str(caught.value)


def test_a_pair_shows_its_secret_to_nobody(directory: Path) -> None:
    pair = keys.make_pair(directory, "viewer")
    shown = f"{pair!r} {pair} {keys.ViewerKeys(pair, bytes(32))!r} {keys.DaemonKeys(pair, directory)!r}"
    assert pair.secret.decode() not in shown
    assert repr(pair.secret) not in shown
