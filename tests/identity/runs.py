"""Run a program bare and under `cbtop run`, and compare what it prints and saves.

`python -m tests.identity.runs [--quick] [PROGRAM...]` prints one line for each program. It runs each program bare
twice. With `--quick` it does not run with the default overhead, only with every step recorded.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fcntl import LOCK_EX, LOCK_NB, flock
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PROGRAMS = {path.stem: path for path in sorted((HERE / "programs").glob("*.py"))}
LIBRARY = HERE / "lib"
TIMEOUT_S = 240
PARALLEL = 2  # number of programs that run at the same time on this machine, in all pytest workers together
RECORDING = "steps.cbtop"
UNDER_RUN = (sys.executable, "-m", "cbtop", "run")
COMMANDS = {
    "bare": (),
    "default": (*UNDER_RUN, "--"),
    "every step": (*UNDER_RUN, "--overhead", "100%", "--record", RECORDING, "--"),
    "guarded": (*UNDER_RUN, "--overhead", "100%", "--record", RECORDING, "--guard", "--"),
}


class Result(NamedTuple):
    """What a program did: its exit code, its output, the files that it saved, and the lines of cbtop on stderr."""

    exit_code: int
    stdout: str
    stderr: str
    files: dict[str, bytes]
    notices: list[str]
    is_recorded: bool
    seconds: float


def missing_packages(program: Path) -> list[str]:
    """Return the imported packages of a program that are not installed."""
    tree = ast.parse(program.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    own = {path.stem for path in LIBRARY.glob("*.py")}
    return sorted(name for name in names - own - sys.stdlib_module_names if find_spec(name) is None)


# Matches torch's own frame of a module call in a traceback. This frame differs under cbtop: torch has two lines that
# call a module.
_CALL_IN_TORCH = re.compile(r'  File ".*", line \d+, in _wrapped_call_impl\n    return self\._.*\n +\^+\n')


def run(program: Path, kind: str) -> Result:
    """Run a program in a new empty directory."""
    with _slot(), tempfile.TemporaryDirectory(prefix="cbtop-identity-") as scratch:
        saved, runtime = Path(scratch, "saved"), Path(scratch, "run")
        saved.mkdir()
        runtime.mkdir(mode=0o700)
        command = [part.replace(RECORDING, str(Path(scratch, RECORDING))) for part in COMMANDS[kind]]
        began = time.monotonic()
        done = subprocess.run(
            [*command, sys.executable, str(program)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="surrogateescape", timeout=TIMEOUT_S, check=False, cwd=saved, env=_environment(scratch, runtime),
        )  # fmt: skip
        seconds = time.monotonic() - began
        lines = done.stderr.splitlines(keepends=True)
        notices = [line for line in lines if line.startswith("cbtop:")]
        others = _CALL_IN_TORCH.sub("", "".join(line for line in lines if not line.startswith("cbtop:")))
        files = {str(path.relative_to(saved)): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
        is_recorded = Path(scratch, RECORDING).exists()
        return Result(done.returncode, done.stdout, others, files, notices, is_recorded, seconds)


def run_all(program: Path, kinds: Sequence[str]) -> list[Result]:
    """Run a program in several ways, at most `PARALLEL` at once."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(lambda kind: run(program, kind), kinds))


def differences(bare: Result, watched: Result) -> list[str]:
    """Return the differences between the two runs as lines. The list is empty if there are none."""
    found = []
    if bare.exit_code != watched.exit_code:
        found.append(f"exit code: bare {bare.exit_code}, watched {watched.exit_code}")
    for name in ("stdout", "stderr"):
        before, after = getattr(bare, name), getattr(watched, name)
        if before != after:
            both = before.splitlines(), after.splitlines()
            lines = [line[:300] for line in difflib.unified_diff(*both, lineterm="", n=0)][2:]
            if len(lines) > 12:
                lines[6:-6] = ["..."]
            found.append(f"{name}:\n" + "\n".join(lines))
    for name in sorted(bare.files.keys() | watched.files.keys()):
        before, after = bare.files.get(name), watched.files.get(name)
        if before is None or after is None:
            found.append(f"file {name}: only {'watched' if before is None else 'bare'} has it")
        elif before != after:
            where = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), -1)
            names_us = " and names cbtop" if b"cbtop" in after and b"cbtop" not in before else ""
            found.append(f"file {name}: differs from byte {where}, {len(before)} and {len(after)} bytes{names_us}")
    return found


def repeated_notices(watched: Result) -> list[str]:
    """Return the lines that cbtop printed more than once. Numbers in them are ignored."""
    texts = [re.sub(r"\d+", "N", line) for line in watched.notices]
    return sorted({text for text in texts if texts.count(text) > 1})


def _environment(scratch: str, runtime: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CBTOP_", "PYTEST_"))}
    return kept | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((str(LIBRARY), str(HERE.parents[1]))),
        "CBTOP_RUNTIME_DIR": str(runtime),
        "HOME": scratch,
        "HF_HOME": str(Path(scratch, "hub")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


class _slot:  # noqa: N801 - it is called like a function
    """Wait until fewer than `PARALLEL` programs run on this machine.

    Inside the context, the caller counts as one of these programs.
    """

    def __enter__(self) -> None:
        while True:
            for number in range(PARALLEL):
                self._file = open(Path(tempfile.gettempdir(), f"cbtop-identity-{os.getuid()}-{number}.lock"), "w")
                try:
                    flock(self._file, LOCK_EX | LOCK_NB)
                except BlockingIOError:
                    self._file.close()
                else:
                    return
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def survey(names: Sequence[str], quick: bool) -> Iterator[str]:
    """Yield a line about each program: whether it is deterministic, how long it takes, and how its runs differ."""
    for name in names or PROGRAMS:
        missing = missing_packages(PROGRAMS[name])
        if missing:
            yield f"skipped {name}: {', '.join(missing)} not installed"
            continue
        kinds = ["bare", "bare", *(["default"] if not quick else []), "every step"]
        bare, again, *watched = run_all(PROGRAMS[name], kinds)
        times = " ".join(f"{result.seconds:.1f}" for result in (bare, again, *watched))
        if differences(bare, again):
            yield f"UNSTABLE {name} ({times} s):\n" + "\n".join(differences(bare, again))
            continue
        if bare.exit_code:
            yield f"note {name}: exit code {bare.exit_code}: {bare.stderr[-300:]}"
        failures = {kind: differences(bare, result) for kind, result in zip(kinds[2:], watched, strict=True)}
        not_recorded = "" if watched[-1].is_recorded else " NOT RECORDED"
        if any(failures.values()):
            yield f"FAIL {name} ({times} s){not_recorded}"
            for kind, lines in failures.items():
                yield from (f"    {kind}: {line}" for line in lines)
        else:
            yield f"ok {name} ({times} s){not_recorded}"
        notices = dict.fromkeys(line for result in watched for line in result.notices)
        yield from (f"    notice: {line.rstrip()[:220]}" for line in notices)
        repeated = {text for result in watched for text in repeated_notices(result)}
        yield from (f"FAIL {name}: printed more than once: {text.rstrip()[:220]}" for text in repeated)


if __name__ == "__main__":
    chosen = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for text in survey(chosen, "--quick" in sys.argv):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
