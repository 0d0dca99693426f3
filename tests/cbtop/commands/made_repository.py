"""A git repository. Each commit is a program that profiles itself, and the commit sets how slow the program is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The bricks run on a fake clock, so only the commit changes their duration.
BENCH = """\
from cbtop import BrickProfiler
now_ns = 1_000_000
profiler = BrickProfiler(clock_ns=lambda: now_ns)
for step in range(40):
    with profiler.step("decode", tokens=1):
        for layer in range(3):
            with profiler.layer(layer):
                for brick, us in (("RmsNorm", 10), ("Attention", 40), ("DownProjection", 80)):
                    slower = SLOWER.get((layer, brick), 1)
                    with profiler.brick(brick):
                        now_ns += round(us * 1000 * slower * (1 + 0.01 * ((step * 7) % 5)))
    now_ns += 20_000
profiler.close("done")
"""
GUILTY = "Attention in Layer 2"
SLOWER = "SLOWER = {(2, 'Attention'): 1.5}\n"
AS_FAST = "SLOWER = {}\n"


@dataclass(frozen=True)
class MadeRepository:
    """A git repository in the folder `at`."""

    at: Path

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(("git", *who, *words), cwd=self.at, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, subject: str, files: Mapping[str, str]) -> str:
        """Commit the files. Returns the hash."""
        for name, text in files.items():
            path = self.at / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            self.git("add", name)
        self.git("commit", "--allow-empty", "-m", subject)
        return self.git("rev-parse", "HEAD")

    def worktrees(self) -> int:
        """Return the number of worktrees, including the checkout itself."""
        return len(self.git("worktree", "list").splitlines())


def made_repository(at: Path) -> MadeRepository:
    """Create an empty repository without the settings of the user."""
    at.mkdir()
    found = MadeRepository(at)
    found.git("init", "--initial-branch=main")
    return found


def bench_repository(at: Path, programs: list[str]) -> tuple[MadeRepository, list[str]]:
    """Create a repository with one commit for each program. The content of a commit is the program and then BENCH.

    Returns the hashes.
    """
    found = made_repository(at)
    commits = [
        found.commit(f"commit {number}", {"bench.py": f"# {number}\n{program}{BENCH}"})
        for number, program in enumerate(programs)
    ]
    return found, commits


def state_of_checkout(repository: MadeRepository) -> dict[str, object]:
    """Return everything in the user's checkout that must not change: files, index, head, branches, worktrees."""
    files = {
        str(path.relative_to(repository.at)): path.read_bytes()
        for path in repository.at.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }
    refs = repository.git("for-each-ref", "--format=%(refname) %(objectname)")
    status = repository.git("status", "--porcelain=v2", "--branch", "--untracked-files=all")
    index = (repository.at / ".git" / "index").read_bytes()
    return {"files": files, "refs": refs, "status": status, "index": index, "worktrees": repository.worktrees(),
            "logs": os.listdir(repository.at / ".git" / "logs")}  # fmt: skip
