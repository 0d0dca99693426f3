"""What every Python process under `cbtop run` begins with: it waits for torch to be imported, and does nothing else.

Python imports a `sitecustomize` at its start, and `cbtop run` puts this directory first on PYTHONPATH.

Rules
- It runs in whatever Python a program starts, from 3.6 on, with cbtop installed there or not: it imports only what
  Python has loaded by then, and nothing of ours before torch is there.
- The program finds sys.path, sys.modules and its own sitecustomize as it would without us. PYTHONPATH keeps this
  directory: that is how its children are reached.
- Whatever of ours fails is one line on stderr; the program runs on.

CBTOP_RUN is the overhead allowed, in percent; 0 switches all of it off. CBTOP_RUN_ID is `PID:FILE`, later
`PID,PID:FILE`: the process that the command became, the first Python of this branch of its children, and a file that
is there until some process of the run has recorded a step of a model.
"""

import atexit
import os
import sys

MYPY = False
if MYPY:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


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
        """What the others find. The loader of torch is made to tell us that it has been imported."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                if "exec_module" not in getattr(spec.loader, "__dict__", {"exec_module"}):
                    self._follow(spec.loader)
                return spec
        return None

    def say_at_exit(self) -> None:
        """One line where nothing was instrumented: by the process that was launched, or the first one with torch."""
        if os.getpid() != self._pid or not (self._is_launched or (self._is_first and self._saw_torch)):
            return
        try:
            os.unlink(self._nothing_yet)
        except OSError:
            return  # something was, or it has been said
        why = "no call of a model was seen" if self._saw_torch else "torch was never imported"
        say("nothing was instrumented: " + why)

    def _follow(self, loader: "Any") -> None:
        real = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            real(module)
            self._saw_torch = True
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._instrument()

        loader.exec_module = exec_module

    def _instrument(self) -> None:
        try:
            from cbtop.profiler.instrument.launched import instrument

            instrument(self._overhead_percent, self._nothing_yet)
        except Exception as error:
            if is_of_the_program(error):
                raise
            self._nothing_yet = ""  # why it is not instrumented has been said
            say(f"{sys.executable} (process {self._pid}) runs uninstrumented: {error}")


def is_of_the_program(error: Exception) -> bool:
    """Whether it was raised by a signal handler of the program, while we were at work."""
    try:
        from cbtop.protocol.signals import is_of_a_signal_handler
    except ImportError:
        return False
    return is_of_a_signal_handler(error)


def say(line: str) -> None:
    """One line on stderr, where there is one."""
    try:
        sys.stderr.write(f"cbtop: {line}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - closed, or the program's own, which may do as it likes
        pass


def begin() -> None:
    """Wait for torch, unless it is switched off."""
    overhead_percent = float(os.environ.get("CBTOP_RUN", "0"))
    if overhead_percent > 0:
        finder = TorchFinder(overhead_percent, os.environ.get("CBTOP_RUN_ID", ""))
        atexit.register(finder.say_at_exit)
        sys.meta_path.insert(0, finder)


def leave() -> None:
    """Take this file out of the program's sight."""
    directory = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != directory]
    sys.path_importer_cache.pop(directory, None)
    sys.modules.pop("sitecustomize", None)


if __name__ == "sitecustomize":
    try:
        leave()
        begin()
    except Exception as error:  # noqa: BLE001 - see the rules
        say(f"process {os.getpid()} runs uninstrumented: {error}")
    # The program's own. Where there is none, this raises what Python expects of a file that is not there.
    __import__("sitecustomize")
