"""Compile CUDA C++ to machine code with NVRTC, and cache the result. NVRTC needs neither a GPU nor its driver."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cbtop.compute.cuda.prelude import PRELUDE
from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.kernel_cache import is_believed
from cbtop.compute.ptx_registry import PtxRegistry
from cbtop.protocol.cache import bytes_of, cache_dir, replace_whole

OPTIONS = ("--std=c++17", "--extra-device-vectorization", "--ptxas-options=-v")
MAX_KEPT_BYTES = 1 << 26
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """A compiled module: its PTX, its machine code, and ptxas's report of registers and spills."""

    ptx: bytes
    cubin: bytes
    log: str

    @property
    def ptx_hash(self) -> int:
        return PtxRegistry.hash_ptx(self.ptx)


def compiled(source: str, architecture: str, *, stamped: bool = False) -> CompiledModule:
    """Compile `source`, with the prelude before it, for an `architecture` in NVRTC's form (sm_90).

    Each version of NVRTC compiles a source only once. Later calls read the result from the cache. Raises ComputeError
    if NVRTC is not installed, or with NVRTC's text if it rejects the source.
    """
    nvrtc = _nvrtc()
    options = (*OPTIONS, f"--gpu-architecture={architecture}", *(("--define-macro=STAMPED",) if stamped else ()))
    whole = (PRELUDE + source).encode()
    made_of = json.dumps([_version(), options]).encode() + whole
    kept = cache_dir() / "cuda" / f"{hashlib.sha256(made_of).hexdigest()}.module"
    found = _read(kept)
    if found is None:
        found = _compile(nvrtc, whole, options)
        _keep(kept, found)
    return found


def architectures() -> tuple[str, ...]:
    """Return the architectures that this NVRTC can compile for, oldest first."""
    return tuple(f"sm_{number}" for number in _checked(_nvrtc().nvrtcGetSupportedArchs())[0])


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise ComputeError(
            f"no CUDA compiler ({str(error).partition(chr(10))[0]}): pip install 'cbtop[cuda]'"
        ) from error
    return nvrtc


@cache
def _version() -> tuple[int, ...]:
    return tuple(_checked(_nvrtc().nvrtcVersion()))


def _checked(answer: tuple[Any, ...]) -> list[Any]:
    """Return the results of an NVRTC call without its status. Raises ComputeError if the call failed."""
    status, *given = answer
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise ComputeError(f"NVRTC: {status.name}")
    return given


def _compile(nvrtc: Any, source: bytes, options: tuple[str, ...]) -> CompiledModule:
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ComputeError(f"NVRTC refuses a kernel ({status.name}):\n{log}")
        ptx = _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        return CompiledModule(ptx.rstrip(b"\0"), _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(size_of: Any, read: Any, program: Any) -> bytes:
    (size_bytes,) = _checked(size_of(program))
    text = bytearray(size_bytes)
    _checked(read(program, text))
    return bytes(text)


# --- cached files: a digest, the lengths of PTX and log, then PTX, log and machine code ----------------------------


def _read(path: Path) -> CompiledModule | None:
    """Return a cached module, or None if it is missing or damaged.

    The code of the module will be executed. So the result is also None if other users may write to the directory.
    """
    try:
        whole = bytes_of(path, MAX_KEPT_BYTES) if is_believed(path.parent) else None
    except (OSError, ValueError):
        return None
    if whole is None or hashlib.sha256(whole[DIGEST_BYTES:]).digest() != whole[:DIGEST_BYTES]:
        return None
    ptx_end = DIGEST_BYTES + 16 + int.from_bytes(whole[DIGEST_BYTES : DIGEST_BYTES + 8], "little")
    log_end = ptx_end + int.from_bytes(whole[DIGEST_BYTES + 8 : DIGEST_BYTES + 16], "little")
    return CompiledModule(whole[DIGEST_BYTES + 16 : ptx_end], whole[log_end:], whole[ptx_end:log_end].decode())


def _keep(path: Path, one: CompiledModule) -> None:
    log = one.log.encode()
    body = len(one.ptx).to_bytes(8, "little") + len(log).to_bytes(8, "little") + one.ptx + log + one.cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, hashlib.sha256(body).digest() + body)
    except OSError:
        # The cache could not be written, because the disk is full or read-only; the next run compiles the module
        # again.
        pass
