"""Runs in a thread of a process that `cbtop attach` has chosen. Shows its torch models until the viewer ends.

Rules
- `cbtop attach` executes this file by its path, because the process may not have cbtop. So it imports no module of
  cbtop before it knows that cbtop can run there.
- The thread waits for the viewer's end in a system call, and takes no processor time meanwhile. No other thread waits
  for it: it may be frozen or cut off at any time, as when the process ends.
- An error of cbtop reaches only the viewer. Nothing is printed.
- A forked child is not shown, because the viewer asked for this process only.

After the viewer ends, these remain: the imported modules, this process's files in the runtime directory, a page of
memory with the code that started this thread, and a function that each fork calls.
"""

from __future__ import annotations

import sys

MYPY = False
if MYPY:
    import _socket
    from types import ModuleType

    from cbtop.profiler.profiler import BrickProfiler

ATTACHED, REFUSED, DETACHED = "attached", "refused", "detached"


def show_until_the_end(
    address: str, directory: str, package: str, lent_msgpack: str, overhead_percent: float
) -> None:
    """Attach to the models of this process, and detach when the viewer at the socket `address` has ended.

    `directory` is the viewer's runtime directory, and `package` the viewer's cbtop. A Python without
    cbtop loads it.
    """
    import _socket  # not `socket`, because gevent replaces its functions by ones that need an event loop
    from contextlib import closing

    with closing(_socket.socket(_socket.AF_UNIX)) as viewer:
        try:
            viewer.connect(address)
        except OSError:
            return  # the viewer has ended before this process ran Python code
        try:
            profiler = _attached(directory, package, lent_msgpack, overhead_percent)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            _say(viewer, f"{REFUSED} {error}")
            return
        _say(viewer, ATTACHED)
        try:
            while viewer.recv(64):
                pass
        except OSError:
            pass  # the viewer was killed, which is its end, too
        _detach(profiler)
        _say(viewer, DETACHED)


def _attached(directory: str, package: str, lent_msgpack: str, overhead_percent: float) -> BrickProfiler:
    """Attach each model at its next call. Raises an error with the reason if that is not possible."""
    if "torch" not in sys.modules:
        raise RuntimeError("its Python has not imported torch")
    __import__("torch")  # waits until another thread has imported it to the end

    hook = _import_hook(package)
    if hook.lacks_cbtop():
        hook.load_package(package)
    from cbtop.protocol import packing

    packing.lent_directory = lent_msgpack  # before any module that loads msgpack
    from cbtop.profiler.instrument import temporary

    with temporary.alone() as is_alone:
        if not is_alone:
            raise RuntimeError("its models are attached already, by a viewer, `cbtop run` or the program itself")
        return _installed(directory, overhead_percent)


def _installed(directory: str, overhead_percent: float) -> BrickProfiler:
    from pathlib import Path

    import torch

    from cbtop.profiler.instrument import attachment, dynamo
    from cbtop.profiler.instrument.call_attribute import is_supported
    from cbtop.profiler.instrument.run_profiler import profiler_of
    from cbtop.profiler.recorder import RingRecorder

    if not is_supported():
        raise RuntimeError(f"cbtop cannot follow the calls of its torch {torch.__version__}")
    recorder = RingRecorder(Path(directory))
    profiler = profiler_of(recorder, overhead_percent)
    recorder.open()
    if recorder.path is None:
        raise RuntimeError(f"it cannot write into {directory}")
    if dynamo.can_keep_dynamo_out():
        dynamo.keep_dynamo_out()  # here, because it would take a tenth of a second of the model's next call
    attachment.install(profiler)
    _leave_children_alone(profiler)
    return profiler


def _detach(profiler: BrickProfiler) -> None:
    _detach_models(profiler)
    profiler.close("the viewer has detached")


def _detach_models(profiler: BrickProfiler) -> None:
    """Detach the models of this profiler. Models that the host has attached itself stay attached."""
    from cbtop.profiler.instrument import attachment

    if attachment.installed() is profiler:
        attachment.uninstall([one for one in attachment.attachments() if one.profiler is not profiler])


def _leave_children_alone(profiler: BrickProfiler) -> None:
    """Detach the models in each child that this process forks while they are attached."""
    import os
    import weakref

    reference = weakref.ref(profiler)

    def in_child() -> None:
        there = reference()
        if there is not None:
            _detach_models(there)

    os.register_at_fork(after_in_child=in_child)


def _import_hook(package: str) -> ModuleType:
    """Return the module with the functions that lend cbtop, loaded from the viewer's package."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(
        "_cbtop_import_hook", f"{package}/profiler/instrument/import_hook/sitecustomize.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _say(viewer: _socket.socket, line: str) -> None:
    from contextlib import suppress

    with suppress(OSError):  # the viewer may have ended
        viewer.sendall(line.encode("utf-8", "replace") + b"\n")
