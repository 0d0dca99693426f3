"""`cbtop keys` writes and prints public keys, and never prints a secret key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.protocol import keys


@pytest.fixture(autouse=True)
def directory(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(runtime / "keys"))
    return runtime / "keys"


def secret_of(directory: Path, name: str) -> str:
    return keys.load_pair(directory, name).secret.decode()


def test_new_makes_a_pair_and_prints_the_command_that_lets_it_in(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "viewer"]) == 0
    printed, pair = capsys.readouterr(), keys.load_pair(directory, "viewer")
    assert f"cbtop keys allow NAME {pair.public.hex()}\n" in printed.out
    assert main(["keys", "new", "daemon"]) == 0
    daemon = keys.load_pair(directory, "daemon").public.hex()
    assert f"cbtop --connect tcp://HOST:PORT --server-key {daemon}\n" in capsys.readouterr().out


def test_what_new_prints_lets_the_viewer_in_and_list_shows_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["keys", "new", "viewer"])
    command = capsys.readouterr().out.rpartition("cbtop ")[2].replace("NAME", "laptop").split()
    assert main(command) == 0
    assert main(["keys", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    public = keys.load_pair(directory, "viewer").public.hex()
    assert document == {
        "schema": "cbtop.keys/1",
        "directory": str(directory),
        "pairs": [{"name": "viewer", "public_key": public}],
        "allowed": [{"name": "laptop", "public_key": public}],
    }
    assert main(["keys", "list"]) == 0
    assert capsys.readouterr().out.count(public) == 2
    assert main(["keys", "revoke", "laptop"]) == 0
    assert main(["keys", "list"]) == 0
    assert capsys.readouterr().out.count(public) == 1


def test_an_empty_list_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list"]) == 0
    printed = capsys.readouterr().out
    assert "cbtop keys new NAME" in printed
    assert "cbtop keys allow NAME PUBLIC_KEY" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["new", "../up"], "cannot be a name"),
        (["new", "viewer"], "exists, and is not overwritten"),
        (["allow", "laptop", "12345"], "64 hexadecimal digits or a NAME.key file is wanted"),
        (["revoke", "laptop"], "no viewer 'laptop' is allowed"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["keys", "new", "viewer"])
    capsys.readouterr()
    assert main(["keys", *arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_without_an_action_the_actions_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["keys"])
    assert "ACTION" in capsys.readouterr().err


def test_nothing_it_prints_holds_a_secret(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "new", "viewer"])
    file = str(directory / "viewer.key_secret")
    for arguments in (
        ["new", "viewer"], ["list"], ["list", "--json"], ["allow", "x", file], ["allow", "viewer", file[:-7]],
        ["allow", "again", file[:-7]], ["list"], ["revoke", "viewer"], ["revoke", "viewer"],
    ):  # fmt: skip
        main(["keys", *arguments])
    (directory / "viewer.key_secret").chmod(0o644)
    main(["--headless", "--connect", "tcp://127.0.0.1:1", "--server-key", str(directory / "viewer.key")])
    printed = capsys.readouterr()
    secret = secret_of_any_mode(directory)
    assert len(secret) == 40
    assert secret not in printed.out + printed.err


def secret_of_any_mode(directory: Path) -> str:
    (directory / "viewer.key_secret").chmod(0o600)
    return secret_of(directory, "viewer")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--key", "viewer"], "--key needs --server-key, the daemon's public key"),
        (["--server-key", "0" * 64], "--server-key needs --connect tcp://HOST:PORT"),
        (["--connect", "ipc:///tmp/x", "--server-key", "0" * 64], "--server-key needs --connect tcp://HOST:PORT"),
        (["--connect", "tcp://127.0.0.1:1", "--server-key", "0" * 63], "64 hexadecimal digits"),
        (["--connect", "tcp://127.0.0.1:1", "--server-key", "0" * 64], "cbtop keys new viewer"),
        (["--connect", "tcp://10.0.0.1:1"], "pass --server-key, or go through ssh -L"),
    ],
)
def test_a_viewer_without_what_it_needs_is_told_at_once(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--headless", "--once", *arguments]) == 2
    assert complaint in capsys.readouterr().err
