"""Under `cbtop run`, a command keeps its terminal, signals, output, exit code and process id."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cbtop as package
from cbtop import cli
from cbtop.commands import run as run_command
from cbtop.commands.run import isolating_option, plain
from cbtop.errors import UsageError
from cbtop.feeds.replay import ReplayFeed
from tests.integration.hosts import CBTOP, DEADLINE_S, HOST, cbtop, daemon, eventually, host
from tests.integration.test_terminal import Terminal
from tests.profiler.instrument.under_run import fake_torch

RUN = [*CBTOP, "run"]


def run(*command: str, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*RUN, "--", *command], input=stdin, capture_output=True, timeout=DEADLINE_S, check=False,
        env=os.environ | variables,
    )  # fmt: skip


def test_input_output_descriptors_arguments_and_exit_code_are_of_the_command() -> None:
    read, write = os.pipe()
    os.write(write, b"more\n")
    os.close(write)
    script = f'cat; echo "$0 $*" >&2; cat /dev/fd/{read} >&2; exit 42'
    done = subprocess.run(
        [*RUN, "--", "sh", "-c", script, "me", "--", "-a", "1%"],
        input=b"\xff in\n", capture_output=True, timeout=DEADLINE_S, check=False, pass_fds=[read],
    )  # fmt: skip
    os.close(read)
    assert (done.returncode, done.stdout, done.stderr) == (42, b"\xff in\n", b"me -- -a 1%\nmore\n")


def test_the_command_is_this_process_and_finds_its_signals_as_they_were() -> None:
    script = "import signal; print([signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 15)])"
    shell = f"trap '' HUP; exec {' '.join(RUN)} -- {sys.executable} -S -c \"{script}; import os; print(os.getpid())\""
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        assert process.stdout.read() == f"[True, False, False]\n{process.pid}\n".encode()
    # `yes` must end with SIGPIPE when its reader ends. Python ignores SIGPIPE, and its children would inherit this
    # setting.
    with subprocess.Popen([*RUN, "--", "yes"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == -signal.SIGPIPE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_ends_it_as_without_us(number: signal.Signals) -> None:
    assert run("sh", "-c", f"kill -{number.value} $$").returncode == -number


def test_what_cannot_be_run_is_one_line_and_the_exit_code_of_a_shell(tmp_path: Path) -> None:
    for command, code, says in (
        ("gone-1", 127, "there is no command 'gone-1'"),
        ("", 127, "there is no command ''"),
        (str(tmp_path), 126, f"{tmp_path}: Permission denied"),
    ):
        done = run(command)
        assert (done.returncode, done.stderr.decode()) == (code, f"cbtop: {says}\n")
    assert cbtop("run").returncode == 2
    assert cbtop("run", "--overhead", "0", "true").returncode == 2


def test_a_script_that_does_not_say_what_runs_it_is_run_by_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text('echo "$0 $*"; exit 4')
    script.chmod(0o755)
    for name in (str(script), "serve"):
        done = run(name, "a b", PATH=f"{tmp_path}:{os.environ['PATH']}")
        assert (done.returncode, done.stdout, done.stderr) == (4, f"{script} a b\n".encode(), b"")


def test_the_environment_is_the_one_given_and_what_is_said_of_ours() -> None:
    """Start from a clean environment: Python may have set LC_CTYPE, and os.environ cannot hold every entry."""
    for variables in ([b"A=1"], [b"A=1", b"LC_CTYPE=C.UTF-8"], [b"A=1", b"A=2", b"=x=1", b"no more"]):
        variables.append(b"TMPDIR=" + os.fsencode(tempfile.gettempdir()))
        read, write = os.pipe()
        if not (child := os.fork()):
            os.dup2(write, 1)
            words = [os.fsencode(word) for word in (*RUN, "--", "/usr/bin/env")]
            both = [(ctypes.c_char_p * (len(each) + 1))(*each) for each in (words, variables)]
            ctypes.CDLL(None).execve(words[0], *both)
            os._exit(99)
        os.close(write)
        with open(read, "rb") as output:
            found = output.read().splitlines()
        assert os.waitpid(child, 0)[1] == 0
        assert [line for line in found if not line.startswith((b"CBTOP_RUN", b"PYTHONPATH="))] == variables


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_where_nobody_can_be_told_anything_the_command_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*RUN, "--", "sh", "-c", "exit 3"], stderr=full, timeout=DEADLINE_S, check=False,
            env=os.environ | {"CBTOP_RUNTIME_DIR": str(tmp_path / "file")},
        )  # fmt: skip
    assert done.returncode == 3


def test_where_nothing_can_be_recorded_the_command_runs_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("sh", "-c", "echo $CBTOP_RUN; exit 3", CBTOP_RUNTIME_DIR=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (3, b"\n")
    assert done.stderr.startswith(b"cbtop: this runs uninstrumented: ")
    assert done.stderr.count(b"\n") == 1


def test_where_no_recording_can_begin_nothing_runs_and_nothing_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [*RUN, "--record", str(tmp_path / "run.cbtop"), "--", "echo", "on"],
        capture_output=True, timeout=DEADLINE_S, check=False,
        env=os.environ | {"CBTOP_RUNTIME_DIR": str(tmp_path / "file")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"this runs" not in done.stderr


def test_pythons_options_that_keep_us_out_are_said(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable} -Es\nprint('on')")
    script.chmod(0o755)
    done = run(str(script))
    assert (done.returncode, done.stdout) == (0, b"on\n")
    assert done.stderr == b"cbtop: Python's -E keeps it from what lies on PYTHONPATH: this runs uninstrumented\n"
    for words, found in {
        "python3 -W error -uI x.py": "-I",
        "python3.11 -Xdev -S": "-S",
        "python -u x.py -I": "",
        "python -m pip -E": "",
        "python -c -S": "",
        "python -WE x.py": "",
        "python -": "",
        "ls -S": "",
        "gone -I": "",
        str(script): "-E",
        "env A=B nice -n 5 python3 -I x.py": "-I",
        "timeout 5 python x.py -I": "",
    }.items():
        assert isolating_option(words.split()) == found, words


def test_marks_of_runs_that_were_killed_go_with_the_next_one(runtime: Path) -> None:
    assert run("sh", "-c", "kill -9 $$").returncode == -9
    assert len(list(runtime.glob("run-*"))) == 1
    (runtime / "run-notes").touch()
    assert run("sh", "-c", 'test -e "${CBTOP_RUN_ID#*:}"').returncode == 0
    # the two files are a file of the last run, and run-notes; cbtop did not create run-notes and must not delete it
    assert len(list(runtime.glob("run-*"))) == 2


def test_a_run_is_recorded_from_first_to_last_step_by_no_child_of_its_own(tmp_path: Path, runtime: Path) -> None:
    program = """
import os, torch
for _ in range(3): torch.forward()
try: os.wait()
except ChildProcessError: print("no child", flush=True)
if os.fork(): os.wait()
else:
    for _ in range(2): torch.forward()
    os._exit(0)
raise SystemExit(6)
"""
    file = tmp_path / "run.cbtop"
    recorded = [*RUN, "--quiet", "--overhead", "100%", "--record", str(file), "--", sys.executable, "-c", program]
    with_torch = os.environ | {"PYTHONPATH": str(fake_torch(tmp_path))}
    done = subprocess.run(recorded, env=with_torch, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (6, b"no child\n")
    assert b"2 processes" in done.stderr
    assert done.stderr.count(b"\n") == 1
    with ReplayFeed(file) as feed:
        feed.seek(feed.duration_s)
        views = [feed.view(source.key) for source in feed.sources()]
    assert sorted(view.steps.count for view in views if view and view.steps) == [2, 3]
    again = subprocess.run(recorded, env=with_torch, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (again.returncode, again.stdout) == (2, b"")
    assert b"run.cbtop" in again.stderr


@pytest.mark.slow
def test_a_sitecustomize_that_prints_empties_no_recording(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('begun', flush=True)")
    file = tmp_path / "run.cbtop"
    recorded = [*RUN, "--record", str(file), "--", sys.executable, "-c", HOST, "5"]
    with_site = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(recorded, env=with_site, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr.count(b", 1 process, ")) == (0, 1), done.stderr
    with ReplayFeed(file) as feed:
        feed.seek(feed.duration_s)
        (source,) = feed.sources()
        view = feed.view(source.key)
    assert view
    assert view.steps
    assert view.steps.count == 5


@pytest.mark.slow
def test_what_ran_before_or_has_ended_is_not_in_the_recording_of_a_run(tmp_path: Path, runtime: Path) -> None:
    subprocess.run([sys.executable, "-c", HOST, "1"], check=True)
    file = tmp_path / "run.cbtop"
    with daemon(), host() as before:
        eventually(lambda: [*runtime.glob(f"{before.pid}-*.catalog")])
        recorded = [*RUN, "--record", str(file), "--", sys.executable, "-c", HOST, "20"]
        done = subprocess.run(recorded, capture_output=True, timeout=DEADLINE_S, check=False)
        assert before.poll() is None
    assert (done.returncode, done.stderr.count(b", 1 process, ")) == (0, 1), done.stderr
    with ReplayFeed(file) as feed:
        feed.seek(feed.duration_s)
        (source,) = feed.sources()
        view = feed.view(source.key)
    assert view
    assert view.steps
    assert view.steps.count == 20


LOADED = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
before = set(sys.modules)
def begins(*_):
    print(*sorted(sys.modules.keys() - before))
    raise SystemExit
os.execvp = begins
from cbtop.__main__ import main
main()
"""


def test_before_the_command_begins_little_is_loaded(runtime: Path) -> None:
    """Python alone starts in 12 ms.

    Imports add to it: argparse 10 ms, typing 11 ms, re 8 ms, enum (needed by signal) 4 ms.
    """
    variables = {name: value for name, value in os.environ.items() if name != "CBTOP_RUNTIME_DIR"}
    root = str(Path(package.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOADED, root, "run", "--overhead", "2%", "--", "python"],
        env=variables | {"XDG_RUNTIME_DIR": str(runtime)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("cbtop")} == {
        "cbtop", "cbtop.__main__", "cbtop.version", "cbtop.errors", "cbtop.commands", "cbtop.commands.run",
        "cbtop.profiler", "cbtop.protocol", "cbtop.protocol.errors", "cbtop.protocol.filesystem",
            "cbtop.protocol.packing",
        "cbtop.protocol.process", "cbtop.protocol.runtime_directory", "cbtop.protocol.signals",
    }  # fmt: skip
    assert {name for name in loaded if not name.startswith(("cbtop", "_"))} <= {"errno", "fcntl", "struct"}


@pytest.mark.parametrize(("has_gpu", "of_a_recording"), [(False, 100), (True, 3)])
def test_a_recording_has_every_step_unless_there_is_a_gpu_or_a_given_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, of_a_recording: int
) -> None:
    driver = tmp_path if has_gpu else tmp_path / "none"
    monkeypatch.setattr(run_command, "NVIDIA_DRIVERS", (str(driver),))
    for words, allowed in {
        "-- python": 3,
        "--record r.cbtop -- python": of_a_recording,
        "--record r.cbtop --overhead 2% -- python": 2,
        "--overhead 1% -- python": 1,
    }.items():
        understood = plain(words.split())
        assert understood is not None
        assert understood[1] == allowed
        assert understood == understood_by_argparse(words.split())


OPTIONS = st.sampled_from(
    [
        "--quiet",
        "--overhead 2%",
        "--overhead=0.5",
        "--record r.cbtop",
        "--record=",
        "--record a.b",
        "--guard=stop",
        "--libraries numpy",
        "--libraries=scipy --residuals",
        "--counters",
    ]
)
WORDS = st.sampled_from(
    ["--", "--overhead", "--overhead=", "--over", "--record", "--record=r", "--quiet", "--qui", "--watch", "-V",
     "--debug", "--guard", "--guard=log", "--guard=", "--guard=odd", "0", "1%", "-1", "", "python", "-c", "a b",
     "--residuals"]
)  # fmt: skip


def understood_by_argparse(arguments: list[str]) -> object:
    """Return the arguments with which argparse would call `become`."""
    options, unknown = cli._parser(run_command, "run").parse_known_args(arguments)
    assert not unknown
    options.signals = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_command, "become", lambda *given: given)
        return run_command.run(options)


@given(st.lists(OPTIONS, max_size=4), st.lists(WORDS, max_size=4))
def test_the_plain_form_is_understood_without_argparse_as_with_it(options: list[str], more: list[str]) -> None:
    arguments = [word for option in options for word in option.split()] + ["--", "python", *more]
    understood = plain(arguments)
    assert understood is not None
    assert understood[0] == ["python", *more]
    assert understood == understood_by_argparse(arguments)


def test_a_guard_without_a_value_logs_and_an_odd_one_is_refused() -> None:
    *_, settings = understood_by_argparse(["--guard", "--", "python"])  # type: ignore[misc]
    assert settings == {"CBTOP_GUARD": "log"}
    with pytest.raises(UsageError, match="--guard: 'odd' is not known; expected log, stop"):
        understood_by_argparse(["--guard=odd", "--", "python"])


def test_libraries_are_named_to_the_hook_and_an_unknown_one_is_refused() -> None:
    *_, settings = understood_by_argparse(["--libraries", "numpy,scipy", "--", "python"])  # type: ignore[misc]
    assert settings == {"CBTOP_LIBRARIES": "numpy,scipy"}
    with pytest.raises(UsageError, match="--libraries: 'pandas' has no table of functions; expected numpy, scipy"):
        understood_by_argparse(["--libraries=numpy,pandas", "--", "python"])


@given(st.lists(WORDS, max_size=8))
def test_what_is_not_plain_is_left_to_argparse(arguments: list[str]) -> None:
    if understood := plain(arguments):
        assert understood == understood_by_argparse(arguments)


AT_THE_TERMINAL = r"""
import os, signal, sys, time
print("size", *os.get_terminal_size(), os.isatty(0), os.tcgetpgrp(0) == os.getpgrp(), flush=True)
signal.signal(signal.SIGWINCH, lambda *_: print("resized", *os.get_terminal_size(), flush=True))
print("said", input(), flush=True)
if len(sys.argv) > 1: signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
print("ready", flush=True)
while True: time.sleep(0.05)
"""


@contextmanager
def at_the_terminal(*arguments: str) -> Iterator[Terminal]:
    screen = Terminal([*RUN, "--", sys.executable, "-c", AT_THE_TERMINAL, *arguments])
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        screen.close()


def test_on_a_terminal_keys_size_and_signals_are_the_commands_own() -> None:
    with at_the_terminal() as screen:
        screen.wait_for("size 120 34 True True")
        fcntl.ioctl(screen.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        screen.wait_for("resized 90 30")
        screen.send("hello\r")
        screen.wait_for("said hello", "ready")
        screen.send("\x03")
        assert screen.exit_code() == -signal.SIGINT
        assert "KeyboardInterrupt" in screen.read()
    with at_the_terminal("catches") as screen:
        screen.send("\r")
        screen.wait_for("ready")
        screen.send("\x03")
        assert screen.exit_code() == 9


def test_ctrl_z_stops_it_and_a_shell_brings_it_back() -> None:
    program = "import signal, time; signal.signal(signal.SIGCONT, lambda *_: print('back')); print('be' + 'gun')"
    screen = Terminal(["bash", "--norc", "-i"])
    try:
        screen.send(f'{" ".join(RUN)} -- {sys.executable} -uc "{program}; time.sleep(1e4)"; echo code $?\r')
        screen.wait_for("begun")
        screen.send("\x1a")
        screen.wait_for("Stopped", "code 148")
        screen.send("fg\r")
        screen.wait_for("\nback")
        screen.send("\x03")
        screen.wait_for("KeyboardInterrupt")
        screen.send("echo ended $?\r")
        screen.wait_for("ended 130")
    finally:
        screen.process.kill()
        screen.process.wait()
        screen.close()
