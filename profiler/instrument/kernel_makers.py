"""Finds the makers of kernels: Triton functions (with file and line), inductor's generated code, CuPy and NVRTC.

Rules
- Triton calls `_loaded` after it has loaded a kernel. Only the kernel's name and the paths of its files are stored
  then. A bounded part of each file is read when the recording of kernels ends.
- CUPTI gives only the name of a kernel. If several functions have this name, the shared memory and the number of
  warps of the launch decide. If these are equal too, all of the functions are named.
- A hook of the host stays in place. If Triton takes only one hook and the host uses it, Triton's kernels are not
  followed.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cbtop.profiler.device.kernel_burst import LaunchedKernel
from cbtop.profiler.instrument import cupy_kernels, nvrtc_kernels
from cbtop.profiler.instrument.awaited import once_imported, stop_awaiting
from cbtop.profiler.instrument.trouble import log_once, log_own_error

KNOBS = "triton.knobs"
HOOK = "kernel_load_end_hook"
BY_INDUCTOR = "triton_"  # prefix of the names that inductor gives to its kernels
WARP_THREADS = 32
MAX_NAMES = 1024  # at most this many kernel names are stored
MAX_VARIANTS = 16  # number of newest compiled variants that are stored for one name
MAX_HEAD_BYTES = 1 << 14  # the first line of the intermediate code has the location of the Triton function
MAX_METADATA_BYTES = 1 << 18
MAX_CODE_BYTES = 1 << 24  # cbtop reads at most this many bytes of a file of generated code
MAX_SOURCES = 3  # maximum number of sources to show for one name
_FAILED = "makers of kernels are not known"

_LOCATION = re.compile(r'#loc = loc\("([^"]+)":(\d+)')
_DEFINITION = re.compile(r"\w+ = async_compile\.triton\('(\w+)'")
SOURCE_NODES = re.compile(r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[([^\]]*)\]")


class Maker(NamedTuple):
    """The program that made a kernel, such as `Triton 3.9.0, 4 warps, 3 stages`, and its source, such as
    `norms.py:41`.
    """

    maker: str
    source: str


@dataclass(frozen=True, slots=True)
class _Variant:
    """A compiled Triton kernel, as described by its file. A number is None if the file does not contain it."""

    version: str
    warps: int | None
    stages: int | None
    shared_bytes: int | None
    source: str


ModulesOf = Callable[[Sequence[str]], Sequence[str]]

#: Files of inductor's generated code -> a function that finds the modules of Dynamo's nodes, by their names.
generated_code: dict[str, ModulesOf] = {}
# Name of a kernel -> the path of its metadata -> the path of its intermediate code.
_files: dict[str, dict[str, str]] = {}


def follow() -> None:
    """From now on, store the kernels that Triton loads and NVRTC compiles."""
    once_imported(KNOBS, _add_hook)
    nvrtc_kernels.follow()


def follow_no_more() -> None:
    """Stop following Triton and NVRTC, and forget all kernels."""
    stop_awaiting(KNOBS)
    hooks: Any = _hooks()
    held: Any = getattr(hooks, HOOK, None)
    if held is _loaded:
        setattr(hooks, HOOK, None)
    elif hasattr(held, "remove"):
        held.remove(_loaded)
    _files.clear()
    nvrtc_kernels.follow_no_more()


def _hooks() -> object:
    return getattr(sys.modules.get(KNOBS), "runtime", None)


def _add_hook() -> None:
    hooks: Any = _hooks()
    held = getattr(hooks, HOOK, hooks)
    if hasattr(held, "add"):
        held.add(_loaded)
    elif held is None and hooks is not None:
        setattr(hooks, HOOK, _loaded)
    elif held is not _loaded:
        log_once("this Triton has no free hook for loaded kernels: its functions are not named")


def _loaded(module: object, function: object, name: str, metadata_group: Mapping[str, str], hash: str) -> None:
    try:
        paths = {Path(file).suffix: str(path) for file, path in metadata_group.items()}
        if ".json" not in paths or ".ttir" not in paths:
            return
        variants = _files.setdefault(name, {})
        variants[paths[".json"]] = paths[".ttir"]
        for known, most in ((variants, MAX_VARIANTS), (_files, MAX_NAMES)):
            while len(known) > most:
                known.pop(next(iter(known)))
    except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
        log_own_error(error, _FAILED)


# --- after a burst -------------------------------------------------------------------------------------------------


def makers_of(kernels: Iterable[LaunchedKernel]) -> dict[LaunchedKernel, Maker]:
    """Return the maker of each kernel. Leaves out kernels with an unknown maker. Reads files."""
    wanted = list(kernels)
    by_inductor = _definitions({one.name for one in wanted if one.name.startswith(BY_INDUCTOR)})
    variants: dict[str, list[_Variant]] = {}
    found = {}
    for one in wanted:
        if one.name in by_inductor:
            found[one] = Maker(f"inductor of torch {torch.__version__}", _listed(by_inductor[one.name]))
        elif one.name in _files:
            if one.name not in variants:
                read = [_variant(*paths) for paths in list(_files[one.name].items())]
                variants[one.name] = [variant for variant in read if variant is not None]
            if variants[one.name]:
                found[one] = _by_triton(variants[one.name], one)
    by_cupy = cupy_kernels.of_cupy({one.name for one in wanted if one not in found})
    for one in wanted:
        if one not in found and one.name in by_cupy:
            found[one] = Maker(f"CuPy {cupy_kernels.version()}".rstrip(), _listed(by_cupy[one.name]))
    by_nvrtc = nvrtc_kernels.of_nvrtc({one.name for one in wanted if one not in found})
    version = nvrtc_kernels.version() if by_nvrtc else ""
    for one in wanted:
        if one not in found and one.name in by_nvrtc:
            found[one] = _by_nvrtc(version, by_nvrtc[one.name])
    return found


def _by_nvrtc(version: str, kernels: Sequence[nvrtc_kernels.NvrtcKernel]) -> Maker:
    options = {one.options for one in kernels}
    words = [f"NVRTC {version}".rstrip(), *(options if len(options) == 1 else ())]
    return Maker(", ".join(filter(None, words)), _listed(list(dict.fromkeys(one.source for one in kernels))))


def _by_triton(variants: Sequence[_Variant], kernel: LaunchedKernel) -> Maker:
    warps = math.prod(kernel.block) // WARP_THREADS
    launched = [one for one in variants if one.shared_bytes == kernel.dynamic_bytes]
    alike = [one for one in launched if one.warps == warps] or launched or list(variants)
    words = {_options(one) for one in alike}
    maker = words.pop() if len(words) == 1 else "Triton"
    return Maker(maker, _listed(list(dict.fromkeys(one.source for one in alike if one.source))))


def _options(variant: _Variant) -> str:
    numbers = ((variant.warps, "warps"), (variant.stages, "stages"))
    parts = [f"Triton {variant.version}".rstrip(), *(f"{number} {what}" for number, what in numbers if number)]
    return ", ".join(parts)


def _listed(sources: Sequence[str]) -> str:
    more = len(sources) - MAX_SOURCES
    one_of = "one of " if len(sources) > 1 else ""
    return one_of + "; ".join(sources[:MAX_SOURCES]) + (f"; {more} more" if more > 0 else "")


def _variant(metadata_path: str, code_path: str) -> _Variant | None:
    """Read a compiled kernel. Returns None if its files are damaged or missing. They are missing if Triton's cache
    was cleared.
    """
    try:
        metadata = json.loads(_text(metadata_path, MAX_METADATA_BYTES))
        location = _LOCATION.search(_text(code_path, MAX_HEAD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(metadata, dict):
        return None
    version = metadata.get("triton_version")
    warps, stages, shared = (_number(metadata.get(name)) for name in ("num_warps", "num_stages", "shared"))
    source = f"{location[1]}:{location[2]}" if location else ""
    return _Variant(version if isinstance(version, str) else "", warps, stages, shared, source)


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _text(path: str, most: int) -> str:
    with io.open(path, "rb") as file:
        return file.read(most).decode("utf-8", "replace")


def _definitions(names: set[str]) -> dict[str, list[str]]:
    """Find the kernels with these names in inductor's generated code, and return their sources."""
    found: dict[str, list[str]] = {}
    for file, modules_of in list(generated_code.items()) if names else ():
        try:
            lines = _text(file, MAX_CODE_BYTES).splitlines()
        except OSError:
            continue
        for at, line in enumerate(lines):
            definition = _DEFINITION.match(line)
            if definition and definition[1] in names:
                nodes = _nodes_above(lines, at)
                inside = ", ".join(dict.fromkeys(modules_of(nodes)))
                words = [f"{Path(file).name}:{at + 1}", *([f"nodes {', '.join(nodes)}"] if nodes else [])]
                words += [f"of {inside}"] if inside else []
                found.setdefault(definition[1], []).append(" ".join(words))
    return found


def _nodes_above(lines: Sequence[str], at: int) -> list[str]:
    """Return Dynamo's nodes that the comment above a kernel's definition names."""
    while at > 0 and lines[at - 1].startswith("#"):
        at -= 1
        nodes = SOURCE_NODES.match(lines[at])
        if nodes:
            return [name for name in nodes[1].split(", ") if name]
    return []
