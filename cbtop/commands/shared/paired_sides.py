"""The two sides of `cbtop bench --paired`. A side is a setting, a git revision or a command."""

# Two settings are measured in this process, so that nothing else differs. A revision or command runs in a new process
# for each turn, with its output in a file, because a full pipe would block it.

from __future__ import annotations

import argparse
import io
import json
import os
import select
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from cbtop.commands.shared.git import commit_of, git, outside_environment
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.process_group import end_group
from cbtop.errors import CbtopError, UsageError
from cbtop.tuning.measuring import Bench, InterruptedTurnError, Setting, Test
from cbtop.tuning.paired import SIDES, Turn

SETTINGS, REVISION, COMMAND = "set", "git", "run"
KINDS = (SETTINGS, REVISION, COMMAND)
GRAMMAR = """\
A and B are two of one kind, which the word before the colon says:
  set:OPTIONS    settings of this command: -t N, --exact, --kv-cache TYPE; what is left out is as the rest of the
                 line says. 'set:' alone is all of that. What begins with a dash needs no set:, if it has a space
  git:REVISION   a commit of the cbtop checkout that you are in (HEAD~1, a tag, a branch), unpacked into a temporary
                 directory. It runs with this Python and its packages, and without the compiled recorder
  run:COMMAND    a line for the shell. What prints the JSON of cbtop bench or llama-bench has its tests compared by
                 tokens/s; of any other, the time from start to exit is\
"""
WHOLE = "whole"  # If a command reports no tests of its own, it counts as a single test with this name.
POLL_MS = 100
SHOWN_ERROR = 200
ShouldStop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the sides A and B: its kind, and the text after the colon on the command line."""

    kind: str
    what: str


def side(text: str) -> Side:
    """Parse the text of a side A or B, for argparse."""
    if text.startswith("-"):
        return Side(SETTINGS, text)
    kind, colon, what = text.partition(":")
    if not colon or kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither set:OPTIONS, git:REVISION nor run:COMMAND")
    if kind != SETTINGS and not what.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: nothing stands behind the colon")
    return Side(kind, what.strip())


class _SettingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"--paired: {message}; settings are -t N, --exact, --kv-cache f16 or f32")


def setting(text: str, otherwise: Setting) -> Setting:
    """Return a copy of the setting `otherwise` that is changed by the options in `text`. Raises UsageError for
    invalid options.
    """
    parser = _SettingParser(add_help=False, allow_abbrev=False, prog="--paired")
    parser.add_argument("-t", "--threads", type=count)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--kv-cache", choices=("f16", "f32"))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--paired {text!r}: {error}") from error
    found = parser.parse_args(words)
    return replace(
        otherwise,
        threads=found.threads or otherwise.threads,
        is_exact=found.exact or otherwise.is_exact,
        cache_type=found.kv_cache or otherwise.cache_type,
    )


def turns_of_settings(
    bench: Bench, settings: Sequence[Setting], tests: Sequence[Test], should_stop: ShouldStop
) -> list[tuple[Turn, Turn]]:
    """Run each test in one short turn per side, because the machine's speed changes with time. Return the pair of
    turns for each test.
    """

    def turn(of: Setting, test: Test) -> Turn:
        return lambda: {test.name: bench.took_ns(of, test, should_stop)}

    a, b = settings
    return [(turn(a, test), turn(b, test)) for test in tests]


@dataclass(frozen=True, slots=True)
class Process:
    """A command that is measured by running it in a directory. `title` is its name in errors."""

    command: Sequence[str]
    title: str
    directory: Path | None = None
    environment: Mapping[str, str] | None = None

    def turn(self, should_stop: ShouldStop) -> dict[str, tuple[int | None, int]]:
        """Run the command once. Return (number of tokens, mean time of one run in ns) for each test, by name.

        Raises CbtopError if the command fails. Raises InterruptedTurnError when `should_stop` returns true.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
            took_ns, code = self.run(out.fileno(), said.fileno(), should_stop)
            said.seek(0)
            if code:
                words = said.read().decode(errors="replace").strip().splitlines()
                why = f": {words[-1][:SHOWN_ERROR]}" if words else ""
                raise CbtopError(f"{self.title} ended with exit code {code}{why}")
            out.seek(0)
            return tests_in(out.read(), self.title) or {WHOLE: (None, took_ns)}

    def run(self, out: int, said: int, should_stop: ShouldStop) -> tuple[int, int]:
        """Run the command. Its stdout goes to the file `out`, and its stderr to the file `said`. Return its time (ns)
        and exit code.

        When `should_stop` returns true, ends the command and its descendants, and raises InterruptedTurnError.
        """
        begun_ns = time.perf_counter_ns()
        process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=said, cwd=self.directory,
            env=self.environment, start_new_session=True,
        )  # fmt: skip
        try:
            ends = select.poll()
            descriptor = os.pidfd_open(process.pid)
            try:
                ends.register(descriptor, select.POLLIN)
                while not ends.poll(POLL_MS):
                    if should_stop():
                        raise InterruptedTurnError
            finally:
                os.close(descriptor)
            took_ns = time.perf_counter_ns() - begun_ns
            return took_ns, process.wait()
        finally:
            end_group(process)


def tests_in(output: bytes, title: str) -> dict[str, tuple[int | None, int]]:
    """Return the tests in the JSON output of `cbtop bench` or `llama-bench`. The result has the form of
    `Process.turn`.

    Returns an empty dictionary for other output. Raises CbtopError if a test occurs twice.
    """
    try:
        document = json.loads(output)
        found = [
            (int(one["n_prompt"]), int(one["n_gen"]), [int(each) for each in one["samples_ns"]]) for one in document
        ]
    except (ValueError, KeyError, TypeError):
        return {}
    tests: dict[str, tuple[int | None, int]] = {}
    for n_prompt, n_gen, samples_ns in found:
        name = "+".join(f"{what}{of}" for what, of in (("pp", n_prompt), ("tg", n_gen)) if of)
        if name in tests:
            raise CbtopError(f"{title} prints {name} twice; let it measure each test once")
        if not samples_ns or min(samples_ns) <= 0 or not name:
            raise CbtopError(f"{title} prints a test without tokens or times")
        tests[name] = n_prompt + n_gen, round(sum(samples_ns) / len(samples_ns))
    return tests


@contextmanager
def processes(sides: Sequence[Side], arguments: Sequence[str]) -> Iterator[list[Process]]:
    """Yield a list with one process for each side.

    If a side is a revision, `arguments` are passed to its `cbtop bench`. Unpacked revisions are removed at the end.
    """
    with ExitStack() as stack:
        found = []
        for name, one in zip(SIDES, sides, strict=True):
            if one.kind == COMMAND:
                found.append(Process(("/bin/sh", "-c", one.what), f"{name}, {one.what!r},"))
                continue
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cbtop-paired-")))
            _unpack(one.what, directory / "checkout")
            environment = {key: value for key, value in outside_environment().items() if key != "PYTHONSAFEPATH"}
            # Give Numba a temporary cache folder. It caches kernels by the path of their source, and this checkout's
            # path is never used again.
            environment |= {"PYTHONPATH": str(directory / "checkout"), "NUMBA_CACHE_DIR": str(directory / "kernels")}
            command = (sys.executable, "-m", "cbtop", "bench", *arguments)
            found.append(Process(command, f"{name}, revision {one.what},", directory / "checkout", environment))
        yield found


def _unpack(revision: str, directory: Path) -> None:
    """Unpack a revision of cbtop from the git checkout that contains this file. Raises UsageError if this file is not
    in a git checkout.
    """
    root = git("rev-parse", "--show-toplevel").decode().strip()
    packed = git("archive", "--format=tar", commit_of(revision), at=Path(root))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
    if not (directory / "cbtop" / "commands" / "bench.py").exists():
        raise UsageError(f"revision {revision} of {root} has no `cbtop bench`")
