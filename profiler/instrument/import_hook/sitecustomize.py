"""Runs at the start of every Python process under `cbtop run`. Waits for the import of torch, llama-cpp-python or a
library.

Python imports a module `sitecustomize` at its start, and `cbtop run` puts this directory first on PYTHONPATH.

Rules
- Each Python that a program starts runs this file, from version 3.6 on, even without cbtop. So it imports only
  modules that Python has already loaded. It imports no module of cbtop before the program imports torch or a
  library of `--libraries`.
- sys.path, sys.modules and the program's own sitecustomize are as without cbtop. Only PYTHONPATH keeps this directory
  first, so that child processes run this file, too (see `stay_first`).
- If cbtop fails, it prints one line on stderr, and the program runs on.
- For a Python without cbtop, this file loads the cbtop that it belongs to, by its path. It loads only one other
  package from there: msgpack, under a different name (`cbtop.protocol.packing`). So the program's imports find the
  same modules as without cbtop.

Environment
- CBTOP_RUN is the allowed overhead in percent. 0 switches everything off.
- CBTOP_LIBRARIES has the names of the libraries to time, separated by commas. CBTOP_RESIDUALS=1 checks their results.
- CBTOP_RUN_ID is `PID:FILE`, and later `PID,PID:FILE`. The first PID is the process of the command. The second is the
  first Python process below it, in this branch of the process tree.
- FILE exists until a process of the run has recorded a step of a model. A process that has imported torch and
  recorded nothing writes the reason into FILE, one per line.
- If there is a FIFO FILE.end, a process waits there to print a summary.
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
SUMMARY_WITHIN_MS = 300  # longest time that a process waits at its end for its summary
# The oldest and the newest Python version that cbtop supports, as in pyproject.toml.
LENT_FROM, LENT_BELOW = (3, 11), (3, 14)
NO_CALL = "no call of a model was seen"
NO_LIBRARY_CALL = "no call of a library took 10 us or more"
LLAMA = "llama_cpp"  # the package of llama-cpp-python
NO_BATCH = "llama.cpp computed no batch"


class ImportFinder:
    """An import finder that comes first until torch is imported, and the first of `libraries`. It finds these through
    the other finders.
    """

    def __init__(self, overhead_percent: float, run_id: str, libraries: "tuple[str, ...]" = ()) -> None:
        self._overhead_percent = overhead_percent
        self._libraries = libraries
        self._awaited = {"torch", LLAMA, *libraries}
        self._pid = os.getpid()
        pids, _, self._nothing_yet = run_id.partition(":")
        launched_pid, _, first_pid = pids.partition(",")
        if not first_pid:
            os.environ["CBTOP_RUN_ID"] = f"{launched_pid},{self._pid}:{self._nothing_yet}"
        self._is_launched = launched_pid == str(self._pid)
        self._is_first = first_pid in ("", str(self._pid))
        self._saw_torch = False
        self._saw_library = False
        self._is_lent = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Find a module by the finders after this one. If cbtop waits for this module, the module's loader also
        reports the end of the import.
        """
        if name not in self._awaited or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)  # finders from before Python 3.4 have no `find_spec`
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if "exec_module" not in getattr(spec.loader, "__dict__", {"exec_module"}):
                    self._follow(name, spec.loader)
                return spec
        return None

    def begin(self) -> None:
        """Wait for the imports. Instrument what is imported already, by a .pth file of this Python."""
        sys.meta_path.insert(0, self)
        for name in ("torch", LLAMA, *self._libraries):
            if name in sys.modules:
                self._is_imported(name)

    def _is_imported(self, name: str) -> None:
        """Instrument the process. Only the first library counts, because cbtop awaits the others itself.

        After torch, cbtop awaits llama-cpp-python itself, too.
        """
        if name not in self._awaited:
            return
        own = {"torch": ("torch", LLAMA), LLAMA: (LLAMA,)}
        self._awaited.difference_update(own.get(name, self._libraries))
        if not self._awaited:
            sys.meta_path.remove(self)
        if name == "torch":
            self._torch_is_imported()
        elif name == LLAMA:
            self._llama_is_imported()
        else:
            self._library_is_imported()

    def _library_is_imported(self) -> None:
        """Time the calls of the libraries."""
        self._saw_library = True
        self._note(NO_LIBRARY_CALL)
        try:
            self._find_cbtop()
            from cbtop.profiler.instrument.libraries.under_run import time_libraries

            time_libraries(self._libraries, self._overhead_percent, self._nothing_yet)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
            self._failed(error)

    def _llama_is_imported(self) -> None:
        """Follow the contexts of llama-cpp-python."""
        self._saw_library = True
        self._note(NO_BATCH)
        try:
            self._find_cbtop()
            from cbtop.profiler.instrument.llama_cpp_python import follow
            from cbtop.profiler.instrument.run_profiler import profiler_of_run

            follow(profiler_of_run(self._overhead_percent, self._nothing_yet))
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
            self._failed(error)

    def _find_cbtop(self) -> None:
        if lacks_cbtop():
            self._lend(os.path.abspath(__file__ + "/../../../.."))

    def _torch_is_imported(self) -> None:
        """Prepare to instrument the process before the first call of a module."""
        self._saw_torch = True
        self._note(NO_CALL)
        try:
            self._find_cbtop()
            from cbtop.profiler.instrument.first_call import await_first_call

            await_first_call(self._instrument)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
            self._failed(error)

    def at_exit(self) -> None:
        """Print one line if nothing was instrumented.

        Only the launched process or the first process with torch prints it.
        """
        if self._saw_torch and os.path.exists(self._nothing_yet):
            self._note_why()
        saw_any = self._saw_torch or self._saw_library
        if os.getpid() == self._pid and (self._is_launched or (self._is_first and saw_any)):
            why = self._reason()
            # whether the program uses cbtop's API itself
            has_a_profiler = "cbtop.profiler.profiler" in sys.modules and not saw_any
            if why and not has_a_profiler:
                print_line("nothing was instrumented: " + why)
            elif self._is_launched and self._nothing_yet:
                self._await_summary()

    def _instrument(self) -> None:
        try:
            from cbtop.profiler.instrument.launched import instrument

            instrument(self._overhead_percent, self._nothing_yet, self._is_lent)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
            self._failed(error)

    def _lend(self, directory: str) -> None:
        """Load cbtop from `directory`. The first process of the run prints one line about it."""
        load_package(directory)
        self._is_lent = True
        if self._is_launched or self._is_first:
            from importlib.util import find_spec

            fits = find_spec("cbtop.profiler._hot_path") is not None
            cost = "" if fits else ", without its compiled parts: recording costs more than with cbtop installed"
            print_line(f"{sys.executable} has no cbtop; using {directory}{cost}")

    def _failed(self, error: Exception) -> None:
        reraise_host_error(error)
        self._nothing_yet = ""  # from here on, log the reason instead of writing it into the file
        print_line(f"{sys.executable} (process {os.getpid()}) runs uninstrumented: {error}")

    def _note_why(self) -> None:
        try:
            from cbtop.profiler.instrument import unseen

            self._note(unseen.why())
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
            reraise_host_error(error)

    def _await_summary(self) -> None:
        """Wait until the run's summary is printed, because a shell shows its prompt as soon as this process ends."""
        try:
            fifo = os.open(self._nothing_yet + ".end", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:  # with --quiet, the run has no FIFO to wait for
            reraise_host_error(error)
            return
        try:
            os.write(fifo, b"end\n")
            import select  # the module is loaded already, because the program has imported torch or NumPy

            waiting = select.poll()
            # The poll asks for no events. It returns only when the reader has closed the FIFO.
            waiting.register(fifo, 0)
            waiting.poll(SUMMARY_WITHIN_MS)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
            reraise_host_error(error)
        finally:
            os.close(fifo)

    def _follow(self, name: str, loader: "Any") -> None:
        real = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            real(module)
            if self in sys.meta_path:
                self._is_imported(name)

        loader.exec_module = exec_module

    def _note(self, why: str) -> None:
        """Add the reason `why` to the run's file, if nothing was recorded yet."""
        try:
            file = os.open(self._nothing_yet, os.O_WRONLY | os.O_APPEND)
            try:
                if why and os.fstat(file).st_size < MAX_REASONS_BYTES:
                    os.write(file, ascii(why)[1:-1][:400].encode() + b"\n")
            finally:
                os.close(file)
        except OSError as error:
            reraise_host_error(error)

    def _reason(self) -> str:
        """Return why the run has recorded nothing. "" if it has recorded something, or if the reason was printed."""
        try:
            file = os.open(self._nothing_yet, os.O_RDONLY)
            try:
                said = os.read(file, 2 * MAX_REASONS_BYTES).decode("ascii", "replace").splitlines()
            finally:
                os.close(file)
            os.unlink(self._nothing_yet)
        except OSError as error:
            reraise_host_error(error)
            return ""
        if said or self._saw_torch or self._saw_library:  # the disk may be full; the file then has no reason
            known = NO_CALL if self._saw_torch else NO_LIBRARY_CALL
            return [known, *(why for why in said if why not in (NO_CALL, NO_LIBRARY_CALL))][-1]
        never = " or ".join(("torch", *self._libraries)) + " was never imported"
        times = os.times()
        if times.children_user + times.children_system > 0:
            return f"{never}, nor in a child that was reached (not one with an environment of its own, -I, -E or -S)"
        return never


def lacks_cbtop() -> bool:
    """Return whether this Python has no package cbtop. A directory of that name without `__init__.py` is not a
    package.
    """
    from importlib.util import find_spec

    spec = find_spec("cbtop")
    return spec is None or spec.origin is None


def load_package(directory: str) -> None:
    """Load the package cbtop from `directory` without changing sys.path.

    Raises RuntimeError if cbtop cannot run in this Python.
    """
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    is_supported = sys.implementation.name == "cpython" and LENT_FROM <= sys.version_info[:2] < LENT_BELOW
    if not is_supported or "t" in sys.abiflags:  # "t" marks a Python without the global interpreter lock
        raise RuntimeError("cbtop needs CPython 3.11 to 3.13; create the program's environment with one of these")
    if find_spec("numpy") is None:
        raise RuntimeError(f"cbtop needs NumPy there: {sys.executable} -m pip install numpy")
    spec = spec_from_file_location(
        "cbtop", os.path.join(directory, "__init__.py"), submodule_search_locations=[directory]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["cbtop"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["cbtop"]
        raise


def reraise_host_error(error: Exception) -> None:
    """Raise `error` again if a signal handler of the program raised it while cbtop's code ran."""
    if error.__traceback__ is None or error.__traceback__.tb_next is None:
        return  # raised by the caller of this function, not by a signal handler
    try:
        from cbtop.protocol import signals
    except (ImportError, SyntaxError):  # this Python has no cbtop installed
        return
    signals.reraise_host_error(error)


def print_line(line: str) -> None:
    """Print one line on stderr, unless stderr is missing or fails."""
    try:
        sys.stderr.write(f"cbtop: {line}\n")
        sys.stderr.flush()
    except Exception as error:  # noqa: BLE001 - stderr may be closed, or the program's own, which may raise anything
        reraise_host_error(error)


def begin() -> None:
    """Wait for the imports of torch and the libraries, unless cbtop is switched off."""
    overhead_percent = float(os.environ.get("CBTOP_RUN", "0"))
    if overhead_percent > 0:
        stay_first(os.path.dirname(__file__))
        libraries = tuple(filter(None, os.environ.get("CBTOP_LIBRARIES", "").split(",")))
        finder = ImportFinder(overhead_percent, os.environ.get("CBTOP_RUN_ID", ""), libraries)
        atexit.register(finder.at_exit)
        finder.begin()


def stay_first(directory: str) -> None:
    """Keep `directory` first on the PYTHONPATH of child processes.

    Python imports only the first sitecustomize. Wrappers such as opentelemetry-instrument put their own directory
    first. Only the C library's environment is changed, which children inherit. The program still reads its own value
    in os.environ.
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
    """Hide the module of this file from the program."""
    sys.path[:] = [entry for entry in sys.path if entry != directory]
    sys.path_importer_cache.pop(directory, None)
    if (
        getattr(sys.modules.get("sitecustomize"), "__file__", None) == __file__
    ):  # if the file differs, another sitecustomize has imported this one
        del sys.modules["sitecustomize"]


if __name__ == "sitecustomize":
    try:
        leave(os.path.dirname(__file__))
        begin()
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the program
        reraise_host_error(error)
        print_line(f"process {os.getpid()} runs uninstrumented: {error}")
    # Import the program's own sitecustomize. If the program has no sitecustomize, this raises the error that Python
    # expects.
    __import__("sitecustomize")
