"""Finds the kernels that a process compiles itself with NVRTC, through NVIDIA's bindings for Python or torch.

NVRTC has no hook. So two functions of `cuda.bindings.nvrtc`, and one behind `torch.cuda._compile_kernel`, are
replaced. The replacements call the originals, and store the options and the names of kernels in the source.

cbtop does not see calls from C, calls through the program's own ctypes, or calls before the first model is followed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import wraps
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from cbtop.profiler.instrument.awaited import once_imported, stop_awaiting
from cbtop.profiler.instrument.trouble import log_own_error

BINDINGS = "cuda.bindings.nvrtc"
TORCH = "torch.cuda._utils"
CREATE, COMPILE = "nvrtcCreateProgram", "nvrtcCompileProgram"  # of the bindings
COMPILE_OF_TORCH = "_nvrtc_compile"
MAX_NAMES = 1024  # of kernels that are remembered
MAX_PROGRAMS = 64  # at most this many programs wait to be compiled
MAX_VARIANTS = 16  # of a name
MAX_SOURCE_CHARS = 1 << 20
MAX_OPTIONS_CHARS = 160
UNNAMED = "default_program"  # NVRTC's name for a source that has no name
_FAILED = "kernels of NVRTC are not named"
_DEFINITION = re.compile(r"__global__[^;{}]*?\b(\w+)\s*\(")
_LAUNCH_BOUNDS = re.compile(
    r"__launch_bounds__\s*\([^()]*\)|__cluster_dims__\s*\([^()]*\)|__attribute__\s*\(\(.*?\)\)"
)
# Options that are not shown, because they say nothing about a kernel's code.
_PATHS = re.compile(r"-I|--include-path|-include|--pre-include")


class NvrtcKernel(NamedTuple):
    """The NVRTC options of a kernel, and its source, such as `saxpy.cu:12`."""

    options: str
    source: str


_kernels: dict[str, dict[NvrtcKernel, None]] = {}  # by name, without template arguments
# NVRTC's program -> its source, the name of the source, and the line that made the program.
_created: dict[int, tuple[str, str, str]] = {}
# (module, function) -> the host's function, and cbtop's replacement.
_replaced: dict[tuple[str, str], tuple[Any, Any]] = {}


def follow() -> None:
    """From now on, store the kernels that NVRTC compiles."""
    once_imported(BINDINGS, _follow_bindings)
    once_imported(TORCH, _follow_torch)


def follow_no_more() -> None:
    """Put the host's functions back, and forget all kernels."""
    stop_awaiting(BINDINGS)
    stop_awaiting(TORCH)
    for (module, name), (was, ours) in _replaced.items():
        if getattr(sys.modules.get(module), name, None) is ours:
            setattr(sys.modules[module], name, was)
    _replaced.clear()
    _kernels.clear()
    _created.clear()


def of_nvrtc(names: Collection[str]) -> dict[str, list[NvrtcKernel]]:
    """Return the kernels in `names` that NVRTC compiled, with their options and sources."""
    found = {name: list(_kernels.get(name.partition("<")[0], ())) for name in names}
    return {name: kernels for name, kernels in found.items() if kernels}


def version() -> str:
    """Return the version of NVRTC, such as `13.5`, or "" if unknown. Asks the bindings, or else torch."""
    ask = getattr(sys.modules.get(BINDINGS), "nvrtcVersion", None)
    if ask is not None:
        status, *numbers = ask()
        return ".".join(map(str, numbers)) if not int(status) else ""
    found = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return found if isinstance(found, str) else ""


def _follow_bindings() -> None:
    _replace(BINDINGS, CREATE, _creating)
    _replace(BINDINGS, COMPILE, _compiling)


def _follow_torch() -> None:
    _replace(TORCH, COMPILE_OF_TORCH, _compiling_in_torch)


def _replace(module: str, name: str, ours: Callable[[Any], Any]) -> None:
    was = getattr(sys.modules.get(module), name, None)
    if was is not None and (module, name) not in _replaced:
        _replaced[module, name] = was, ours(was)
        setattr(sys.modules[module], name, _replaced[module, name][1])


def _creating(create: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create)
    def created(*arguments: Any, **named: Any) -> Any:
        answer = create(*arguments, **named)
        try:
            source, name = (*arguments, *(named.get(key) for key in ("src", "name")[len(arguments) :]))[:2]
            if not int(answer[0]):
                _created[int(answer[1])] = _text(source), _text(name), _place(_caller())
                _shrink(_created, MAX_PROGRAMS)
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, _FAILED)
        return answer

    return created


def _compiling(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compile_)
    def compiled(*arguments: Any, **named: Any) -> Any:
        answer = compile_(*arguments, **named)
        try:
            program, _, options = (*arguments, *(named.get(key) for key in _COMPILE_NAMES[len(arguments) :]))[:3]
            created = _created.pop(int(program), None)
            if created is not None and not int(answer[0]):
                _remember(*created, options or ())
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, _FAILED)
        return answer

    return compiled


_COMPILE_NAMES = ("prog", "numOptions", "options")


def _compiling_in_torch(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compile_)
    def compiled(kernel_source: str, kernel_name: str, *arguments: Any, **named: Any) -> Any:
        answer = compile_(kernel_source, kernel_name, *arguments, **named)
        try:
            frame = _caller()
            inside = str(Path(compile_.__code__.co_filename).parents[1]) if hasattr(compile_, "__code__") else "\0"
            while frame is not None and frame.f_code.co_filename.startswith(inside):
                frame = frame.f_back
            _remember(kernel_source, "", _place(frame), named.get("nvcc_options") or ())
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            log_own_error(error, _FAILED)
        return answer

    return compiled


def _caller() -> FrameType | None:
    """Return the frame that called the caller of this function."""
    frame = currentframe()
    return frame.f_back.f_back if frame is not None and frame.f_back is not None else None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def _place(frame: FrameType | None) -> str:
    """Return the file and line that called NVRTC."""
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _remember(source: str, name: str, place: str, options: Iterable[object]) -> None:
    """Store the kernels of a source. A source without a name gets the file and line of the call."""
    words = " ".join(one for one in map(_text, options) if not _PATHS.match(one))
    cut = words if len(words) <= MAX_OPTIONS_CHARS else words[: MAX_OPTIONS_CHARS - 1] + "…"
    for kernel, line in _definitions(source[:MAX_SOURCE_CHARS]):
        where = f"{name}:{line}" if name not in ("", UNNAMED) else f"line {line} of a source compiled at {place}"
        variants = _kernels.setdefault(kernel, {})
        variants[NvrtcKernel(cut, where)] = None
        _shrink(variants, MAX_VARIANTS)
        _shrink(_kernels, MAX_NAMES)


def _definitions(source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the line of each kernel in a source."""
    plain = _LAUNCH_BOUNDS.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    for match in _DEFINITION.finditer(plain):
        yield match[1], plain.count("\n", 0, match.start(1)) + 1


def _shrink(known: dict[Any, Any], most: int) -> None:
    while len(known) > most:
        known.pop(next(iter(known)))
