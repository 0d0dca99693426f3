"""Run git, with its errors as one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cbtop.errors import UsageError


def git(*arguments: str, at: Path | None = None, of: str = "", text: str = "") -> bytes:
    """Run git in the directory `at` (default: the current one) with the input `text`, and return its output.

    Raises UsageError if git fails. `of` is the revision that the arguments name.
    """
    try:
        # in a session of its own, so that Ctrl-C in a terminal does not end git half way
        done = subprocess.run(
            ("git", *arguments), capture_output=True, check=False, cwd=at, input=text.encode(),
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"git: {error.strerror or error}; revisions need it") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        why = f"{of!r} is no revision here" if of else said.splitlines()[-1] if said else "failed"
        raise UsageError(f"git: {why}")
    return done.stdout


def commit_of(revision: str, at: Path | None = None) -> str:
    """Return the full hash of the commit that `revision` names. Raises UsageError if there is none."""
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", at=at, of=revision)
    return commit.decode().strip()
