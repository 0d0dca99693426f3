"""Run git, and report its errors in one line."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from cbtop.errors import UsageError


def git(*arguments: str, at: Path | None = None, of: str = "", text: str = "") -> bytes:
    """Run git in the directory `at` (default: the current one) with the input `text`, and return its output.

    Git looks for the repository only in this directory and its parents, and ignores environment variables. `of` is
    the user's revision for error messages. Raises UsageError if git fails.
    """
    done = _run(arguments, outside_environment(), at, text)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        why = f"{of!r} is no revision here" if of else said.splitlines()[-1] if said else "failed"
        raise UsageError(f"git: {why}")
    return done.stdout


def commit_of(revision: str, at: Path | None = None) -> str:
    """Return the full hash of the commit that `revision` names. Raises UsageError if the commit does not exist."""
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", at=at, of=revision)
    return commit.decode().strip()


def outside_environment() -> dict[str, str]:
    """Return the environment without the variables that select a repository. A git hook sets these variables to the
    user's repository.
    """
    local = local_variables()
    return {name: value for name, value in os.environ.items() if name not in local}


@cache
def local_variables() -> frozenset[str]:
    """Return the names of the environment variables that tell git its repository, index and settings."""
    return frozenset(_run(("rev-parse", "--local-env-vars"), None).stdout.decode().split())


def _run(
    arguments: tuple[str, ...], environment: dict[str, str] | None, at: Path | None = None, text: str = ""
) -> subprocess.CompletedProcess[bytes]:
    try:
        # Run git in a session of its own, because Ctrl-C in a terminal must not end it half way.
        return subprocess.run(
            ("git", *arguments), capture_output=True, check=False, cwd=at, input=text.encode(), env=environment,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"git: {error.strerror or error}; revisions need it") from error
