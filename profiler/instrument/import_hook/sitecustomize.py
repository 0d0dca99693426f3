"""What every Python process under `cbtop run` begins with: it waits for torch to be imported, and does nothing else.

Python imports a `sitecustomize` at its start, and `cbtop run` puts this directory first on PYTHONPATH.

Rules
- It runs in whatever Python a program starts, from 3.6 on, with cbtop installed there or not: it imports only what
  Python has loaded by then, and nothing of ours before torch is there.
- The program finds sys.path, sys.modules and its own sitecustomize as it would without us. PYTHONPATH keeps this
  directory: that is how its children are reached. Children find it first there, see `stay_first`.
- Whatever of ours fails is one line on stderr; the program runs on.

CBTOP_RUN is the overhead allowed, in percent; 0 switches all of it off. CBTOP_RUN_ID is `PID:FILE`, later
`PID,PID:FILE`: the process that the command became, the first Python of this branch of its children, and a file that
is there until some process of the run has recorded a step of a model. In it stands, a line each, why those that have
imported torch did not. Next to FILE there may be a FIFO, FILE.end: a process waits there to print a summary.
"""

import atexit
import os
import sys

MYPY = False
if MYPY:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MAX_REASONS_BYTES = 4096
SUMMARY_WITHIN_MS = 300  # at most so much later does a process end because of its summary
NO_TORCH, NO_CALL = "torch was never imported", "no call of a model was seen"


class TorchFinder:
    """Stands before the other finders until torch has been imported, and finds nothing itself."""

    def __init__(self, overhead_percent: float, run_id: str) -> None:
        self._overhead_percent = overhead_percent
        self._pid = os.getpid()
        pids, _, self._nothing_yet = run_id.partition(":")
        launched_pid, _, first_pid = pids.partition(",")
        if not first_pid:
            os.environ["CBTOP_RUN_ID"] = f"{launched_pid},{self._pid}:{self._nothing_yet}"
        self._is_launched = launched_pid == str(self._pid)
        self._is_first = first_pid in ("", str(self._pid))
        self._saw_torch = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """What those behind it find. The loader of torch is made to tell us that it has been imported."""
        if name != "torch" or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)  # older ones have none
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if "exec_module" not in getattr(spec.loader, "__dict__", {"exec_module"}):
                    self._follow(spec.loader)
                return spec
        return None

    def torch_is_imported(self) -> None:
        """Instrument it before its first module is called."""
        self._saw_torch = True
        self._note(NO_CALL)
        try:
            from cbtop.profiler.instrument.first_call import await_first_call

            await_first_call(self._instrument)
        except Exception as error:  # noqa: BLE001 - see the rules
            self._failed(error)

    def at_exit(self) -> None:
        """One line where nothing was instrumented: by the process that was launched, or the first one with torch."""
        if self._saw_torch and os.path.exists(self._nothing_yet):
            self._note_why()
        if os.getpid() == self._pid and (self._is_launched or (self._is_first and self._saw_torch)):
            why = self._reason()
            has_a_profiler = "cbtop.profiler.profiler" in sys.modules and not self._saw_torch  # of its own
            if why and not has_a_profiler:
                say("nothing was instrumented: " + why)
            elif self._is_launched and self._nothing_yet:
                self._await_summary()

    def _instrument(self) -> None:
        try:
            from cbtop.profiler.instrument.launched import instrument

            instrument(self._overhead_percent, self._nothing_yet)
        except Exception as error:  # noqa: BLE001 - see the rules
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        let_through(error)
        self._nothing_yet = ""  # why nothing is instrumented is said here
        say(f"{sys.executable} (process {os.getpid()}) runs uninstrumented: {error}")

    def _note_why(self) -> None:
        try:
            from cbtop.profiler.instrument import unseen

            self._note(unseen.why())
        except Exception as error:  # noqa: BLE001 - see the rules
            let_through(error)

    def _await_summary(self) -> None:
        """Have the summary of the run printed while this process is still there, and a shell shows no prompt yet."""
        try:
            fifo = os.open(self._nothing_yet + ".end", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:  # with --quiet there is none
            let_through(error)
            return
        try:
            os.write(fifo, b"end\n")
            import select  # a program that ends with its torch has loaded it

            waiting = select.poll()
            waiting.register(fifo, 0)  # an error, reported without being asked for: the reader has closed it
            waiting.poll(SUMMARY_WITHIN_MS)
        except Exception as error:  # noqa: BLE001 - see the rules
            let_through(error)
        finally:
            os.close(fifo)

    def _follow(self, loader: "Any") -> None:
        real = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            real(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.torch_is_imported()

        loader.exec_module = exec_module

    def _note(self, why: str) -> None:
        """Add a reason to the file, if it is there: nothing was recorded so far."""
        try:
            file = os.open(self._nothing_yet, os.O_WRONLY | os.O_APPEND)
            try:
                if why and os.fstat(file).st_size < MAX_REASONS_BYTES:
                    os.write(file, ascii(why)[1:-1][:400].encode() + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            let_through(error)

    def _reason(self) -> str:
        """Why nothing was recorded; "" where something was, or it has been said."""
        try:
            file = os.open(self._nothing_yet, os.O_RDONLY)
            try:
                said = os.read(file, 2 * MAX_REASONS_BYTES).decode("ascii", "replace").splitlines()
            finally:
                os.close(file)
            os.unlink(self._nothing_yet)
        except OSError as error:
            let_through(error)
            return ""
        if said or self._saw_torch:  # a full disk holds no reason
            return [NO_CALL, *(why for why in said if why != NO_CALL)][-1]
        times = os.times()
        if times.children_user + times.children_system > 0:
            return (
                f"{NO_TORCH}, nor in a child that was reached (not one with an environment of its own, -I, -E or -S)"
            )
        return NO_TORCH


def let_through(error: Exception) -> None:
    """Raise what a signal handler of the program raised while we were at work."""
    if error.__traceback__ is None or error.__traceback__.tb_next is None:
        return  # it was raised right there, and in no handler
    try:
        from cbtop.protocol import signals
    except (ImportError, SyntaxError):  # it is not installed for this Python
        return
    signals.let_through(error)


def say(line: str) -> None:
    """One line on stderr, where there is one."""
    try:
        sys.stderr.write(f"cbtop: {line}\n")
        sys.stderr.flush()
    except Exception as error:  # noqa: BLE001 - closed, or the program's own, which may do as it likes
        let_through(error)


def begin() -> None:
    """Wait for torch, unless it is switched off."""
    overhead_percent = float(os.environ.get("CBTOP_RUN", "0"))
    if overhead_percent > 0:
        stay_first(os.path.dirname(__file__))
        finder = TorchFinder(overhead_percent, os.environ.get("CBTOP_RUN_ID", ""))
        atexit.register(finder.at_exit)
        if "torch" in sys.modules:  # a .pth file has imported it
            finder.torch_is_imported()
        else:
            sys.meta_path.insert(0, finder)


def stay_first(directory: str) -> None:
    """Keep `directory` first on the PYTHONPATH that children are given.

    Python imports the first sitecustomize alone. A wrapper such as opentelemetry-instrument puts another one before
    it and becomes Python. The program reads from os.environ what it has stored there: only the environment of the C
    library, which children inherit, has the other order.
    """
    own, real = os.fsencode(directory), os.putenv

    def putenv(name: "Any", value: "Any") -> None:
        if os.fsencode(name) == b"PYTHONPATH":
            entries = os.fsencode(value).split(os.fsencode(os.pathsep))
            if own in entries:
                others = [entry for entry in entries if entry != own]
                value = os.fsencode(os.pathsep).join([own, *others])
        real(name, value)

    os.putenv = putenv


def leave(directory: str) -> None:
    """Take this file out of the program's sight."""
    sys.path[:] = [entry for entry in sys.path if entry != directory]
    sys.path_importer_cache.pop(directory, None)
    if (
        getattr(sys.modules.get("sitecustomize"), "__file__", None) == __file__
    ):  # else another one has called this one
        del sys.modules["sitecustomize"]


if __name__ == "sitecustomize":
    try:
        leave(os.path.dirname(__file__))
        begin()
    except Exception as error:  # noqa: BLE001 - see the rules
        let_through(error)
        say(f"process {os.getpid()} runs uninstrumented: {error}")
    # The program's own. Where there is none, this raises what Python expects of a file that is not there.
    __import__("sitecustomize")
