"""Records kernels with CUPTI, using the library that torch ships. Uses ctypes, no headers and no library of our own.

Rules
- CUPTI is open only while a step, or a few steps in a row, are recorded. This time is called a window, see
  kernel_burst.py. If CUPTI stayed open, the host's graph launches would take several times as long.
- A process has one owner of CUPTI. If another tool is the owner, `begin` raises CuptiError with TAKEN and leaves that
  tool alone. Tools that the environment injects (Nsight) are detected before CUPTI is opened.
- Records are read as bytes at known offsets. The beginning of a kernel's record has been the same since the CUPTI of
  CUDA 12.0 (version 18). This was checked in the headers of 12.1, 12.8 and 13.0, where later records are only longer.
  Versions other than 12 and 13 are refused.
- Buffers are bounded. Beyond MAX_BUFFERS, CUPTI drops records and reports their number.
- Other modules use only `Cupti`, so that a test can replace it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple, Protocol

from cbtop.protocol.requests import State

BUFFER_BYTES = 4 << 20  # size of a buffer for CUPTI's records; it has room for about 19,000 kernels
MAX_BUFFERS = 16
MAX_NAME_BYTES = 4096
MAPS = "/proc/self/maps"
# environment variables that load other tools into the process
INJECTED = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")

# Kinds of CUPTI records.
DRIVER_CALL, RUNTIME_CALL, KERNEL, EXTERNAL = 4, 5, 10, 39
OF_KERNELS = (KERNEL,)
# CUPTI delivers external ids only if it also records the calls of the driver and the runtime.
OF_CALLS = (KERNEL, DRIVER_CALL, RUNTIME_CALL, EXTERNAL)
_CUSTOM = 3  # CUPTI's number for the kind of external id that cbtop sets

_KERNEL_BYTES = 160  # number of bytes to read of a kernel's record; later fields are not needed
_EXTERNAL_RECORD = struct.Struct("<IIQI")  # the fields kind, owner, external id and correlation id
_TIMES, _SIZES, _LOCAL, _CALL = struct.Struct("<QQ"), struct.Struct("<8i"), struct.Struct("<I"), struct.Struct("<I")
_REGISTERS, _NAME, _GRAPH_NODE, _GRAPH = (
    struct.Struct("<H"),
    struct.Struct("<Q"),
    struct.Struct("<Q"),
    struct.Struct("<I"),
)
_REGISTERS_AT, _TIMES_AT, _SIZES_AT, _LOCAL_AT, _CALL_AT, _NAME_AT = 6, 16, 52, 84, 92, 104
_GRAPH_NODE_AT, _GRAPH_AT = 144, 156

_SUCCESS, _MANY_SUBSCRIBERS = 0, 39
_NO_PRIVILEGES, _NO_PRIVILEGES_IN_A_VM = 35, 40
_STATES = {
    _MANY_SUBSCRIBERS: State.TAKEN,
    _NO_PRIVILEGES: State.NOT_PERMITTED,
    _NO_PRIVILEGES_IN_A_VM: State.NOT_PERMITTED,
}


class CuptiError(Exception):
    """Raised if CUPTI cannot be used. `state` is the reason, as an answer to the viewer's request."""

    def __init__(self, what: str, state: State = State.FAILED) -> None:
        super().__init__(what)
        self.state = state


class KernelRecord(NamedTuple):
    """One launch of a kernel as CUPTI recorded it. `graph` is 0 for a kernel that was launched without a graph.

    `local_bytes` is the local memory of a thread: spilled registers, and its stack.
    """

    name_at: int
    start_ns: int
    end_ns: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    static_bytes: int
    dynamic_bytes: int
    local_bytes: int
    call: int
    graph: int
    graph_node: int


class ExternalCorrelation(NamedTuple):
    """The external id that was set during a call of the driver or the runtime. CUPTI numbers these calls, and `call`
    is such a number.
    """

    external: int
    call: int


class Records(NamedTuple):
    """The records of one window: its kernels, the external id that was set during each launching call, and the number
    of lost records.
    """

    kernels: list[KernelRecord]
    externals: dict[int, int]
    lost: int


class Cupti(Protocol):
    """The interface to CUPTI. Each method raises CuptiError if CUPTI refuses the call."""

    def begin(self, kinds: Sequence[int]) -> None:
        """Become the owner of CUPTI in this process, and record the given kinds of records."""

    def end(self) -> None:
        """Stop recording, and wait until CUPTI has delivered all records."""

    def finalize(self) -> None:
        """End the use of CUPTI, so that it leaves no trace in the process."""

    def let_go(self) -> None:
        """Release CUPTI, so that other tools can use it, but do not finalize it."""

    def push(self, external: int) -> None:
        """Set the external id of the caller's thread. CUPTI stores it with the next calls of this thread."""

    def pop(self) -> None:
        """Undo `push`."""

    def node_number(self, node: int) -> int:
        """Return the number of a node within its graph. Records have this number in `graph_node`."""

    def graph_number(self, executable: int) -> int:
        """Return the number of an executable graph. Records have this number in `graph`."""

    def read(self, most: int) -> Records:
        """Return the delivered records. Records beyond the first `most`, and invalid records, count as lost."""

    def text(self, address: int) -> bytes:
        """Return the text at an address that a record contains. The address is valid until CUPTI is finalized."""

    @property
    def dropped(self) -> int:
        """Number of records that did not fit into CUPTI's buffers."""


def decoded(raw: bytes) -> KernelRecord | ExternalCorrelation | None:
    """Return the content of a record, or None if cbtop does not use records of this kind. Raises ValueError for an
    invalid record.
    """
    if len(raw) < _CALL.size:
        raise ValueError(f"a record of {len(raw)} bytes")
    kind = _CALL.unpack_from(raw)[0]
    if kind == EXTERNAL:
        if len(raw) < _EXTERNAL_RECORD.size:
            raise ValueError(f"a record of {len(raw)} bytes")
        _, whose, external, call = _EXTERNAL_RECORD.unpack_from(raw)
        return ExternalCorrelation(external, call) if whose == _CUSTOM else None
    if kind != KERNEL:
        return None
    if len(raw) < _KERNEL_BYTES:
        raise ValueError(f"a kernel's record of {len(raw)} bytes")
    start_ns, end_ns = _TIMES.unpack_from(raw, _TIMES_AT)
    sizes = _SIZES.unpack_from(raw, _SIZES_AT)
    if min(sizes[:6]) < 1 or min(sizes) < 0 or not 0 < start_ns <= end_ns < 1 << 63:
        raise ValueError(f"a kernel of {sizes} from {start_ns} to {end_ns}")
    return KernelRecord(
        name_at=_NAME.unpack_from(raw, _NAME_AT)[0],
        start_ns=start_ns,
        end_ns=end_ns,
        grid=sizes[0:3],
        block=sizes[3:6],
        registers=_REGISTERS.unpack_from(raw, _REGISTERS_AT)[0],
        static_bytes=sizes[6],
        dynamic_bytes=sizes[7],
        local_bytes=_LOCAL.unpack_from(raw, _LOCAL_AT)[0],
        call=_CALL.unpack_from(raw, _CALL_AT)[0],
        graph=_GRAPH.unpack_from(raw, _GRAPH_AT)[0],
        # the upper half of this number identifies the executable graph
        graph_node=_GRAPH_NODE.unpack_from(raw, _GRAPH_NODE_AT)[0] & 0xFFFFFFFF,
    )


def read_in_python(records: Iterable[bytes], most: int) -> Records:
    """Read `records`, with the same result as `Cupti.read`. Each item is one record, cut to the length that is
    needed.
    """
    kernels: list[KernelRecord] = []
    externals: dict[int, int] = {}
    lost = 0
    for count, raw in enumerate(records):
        try:
            found = decoded(raw) if count < most else None
        except ValueError:
            lost += 1
            continue
        lost += count >= most
        if isinstance(found, KernelRecord):
            kernels.append(found)
        elif found is not None:
            externals[found.call] = found.external
    return Records(kernels, externals, lost)


def _read_in_c() -> Callable[[int, list[tuple[int, int]], int], Any] | None:
    """Return the compiled reader, or None if it was not built or if CBTOP_PURE_PYTHON is set."""
    if os.environ.get("CBTOP_PURE_PYTHON"):
        return None
    try:
        from cbtop.profiler import _kernel_records
    except ImportError:  # at installation, the compiler or the headers of Python were missing
        return None
    return _kernel_records.read_records


read_in_c = _read_in_c()

_Requested = CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
_Completed = CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)
_Called = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)

# Argument types by function name. All functions return a CUptiResult.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuptiActivityDisable": (c_int,),
    "cuptiActivityEnable": (c_int,),
    "cuptiActivityFlushAll": (c_uint32,),
    "cuptiActivityGetNextRecord": (c_void_p, c_size_t, POINTER(c_void_p)),
    "cuptiActivityGetNumDroppedRecords": (c_void_p, c_uint32, POINTER(c_size_t)),
    "cuptiActivityPopExternalCorrelationId": (c_int, POINTER(c_uint64)),
    "cuptiActivityPushExternalCorrelationId": (c_int, c_uint64),
    "cuptiActivityRegisterCallbacks": (_Requested, _Completed),
    "cuptiFinalize": (),
    "cuptiGetGraphExecId": (c_void_p, POINTER(c_uint32)),
    "cuptiGetGraphNodeId": (c_void_p, POINTER(c_uint64)),
    "cuptiGetResultString": (c_int, POINTER(c_char_p)),
    "cuptiGetVersion": (POINTER(c_uint32),),
    "cuptiSubscribe": (POINTER(c_void_p), _Called, c_void_p),
    "cuptiUnsubscribe": (c_void_p,),
}


_found_path: list[str] = []


def library_path() -> str:
    """Return the path of the libcupti that this process has loaded, usually by torch. Returns "" if there is none.

    Reading the thousands of mappings of a process takes 2 ms, so the path is stored as soon as it was found.
    """
    if _found_path:
        return _found_path[0]
    with io.open(MAPS, encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and os.path.basename(path[0]).startswith("libcupti.so"):
                _found_path.append(path[0])
                return path[0]
    return ""


def is_known(version: int) -> bool:
    """Return whether records of this CUPTI version have the layout that this module expects."""
    return 18 <= version < 100 or 130000 <= version < 140000


@functools.cache
def _functions_of(path: str) -> dict[str, Any]:
    """Return CUPTI's functions by name. Raises CuptiError if the library lacks one of them."""
    try:
        library = ctypes.CDLL(path)
        functions: dict[str, Any] = {name: getattr(library, name) for name in _CALLS}
    except (OSError, AttributeError) as error:
        raise CuptiError(str(error), State.NO_CUPTI) from error
    for name, arguments in _CALLS.items():
        functions[name].argtypes, functions[name].restype = arguments, c_int
    return functions


class TorchsCupti:  # pragma: no cover - gpu
    """The CUPTI that torch has loaded. Raises CuptiError if no known version is loaded or another tool uses it."""

    def __init__(self) -> None:
        taken = [name for name in INJECTED if os.environ.get(name)]
        if taken:
            raise CuptiError(f"a tool was injected ({taken[0]})", State.TAKEN)
        path = library_path()
        if not path:
            raise CuptiError("torch has loaded no libcupti.so", State.NO_CUPTI)
        self._functions = _functions_of(path)
        version = c_uint32()
        self._call("cuptiGetVersion", byref(version))
        if not is_known(version.value):
            raise CuptiError(f"its version is {version.value}", State.UNKNOWN_CUPTI)
        self._push = self._functions["cuptiActivityPushExternalCorrelationId"]
        self._pop = self._functions["cuptiActivityPopExternalCorrelationId"]
        self._popped = byref(c_uint64())
        self._text_of = ctypes.CDLL(None).strnlen
        self._text_of.argtypes, self._text_of.restype = (c_void_p, c_size_t), c_size_t
        self._callbacks = _Requested(self._requested), _Completed(self._completed), _Called(_pass_over)
        self._subscriber = c_void_p()
        self._kinds: list[int] = []
        self._buffers: dict[int, Any] = {}  # address -> each buffer that was given to CUPTI
        # The address of each full buffer, and how many bytes CUPTI has written to it.
        self._full: list[tuple[int, int]] = []
        self._is_begun = False
        self.dropped = 0

    def begin(self, kinds: Sequence[int]) -> None:
        self._call("cuptiSubscribe", byref(self._subscriber), self._callbacks[2], None)
        self._is_begun = True
        self.dropped = 0
        try:
            self._call("cuptiActivityRegisterCallbacks", self._callbacks[0], self._callbacks[1])
            for kind in kinds:
                self._call("cuptiActivityEnable", kind)
                self._kinds.append(kind)
        except BaseException:
            try:
                self.end()
            finally:
                self.finalize()
            raise

    def end(self) -> None:
        while self._kinds:
            self._call("cuptiActivityDisable", self._kinds.pop())
        self._call("cuptiActivityFlushAll", 0)
        dropped = c_size_t()
        self._call("cuptiActivityGetNumDroppedRecords", None, 0, byref(dropped))
        self.dropped += dropped.value

    def finalize(self) -> None:
        if self._is_begun:
            self._is_begun = False
            self._call("cuptiFinalize")
            self._buffers.clear()
            self._full.clear()

    def let_go(self) -> None:
        if self._is_begun:
            self._is_begun = False
            _left_on.append(self)  # CUPTI may still call this object's functions, so keep it alive
            self._call("cuptiUnsubscribe", self._subscriber)

    # `push` and `pop` run before and after each call of a module, so they do little.

    def push(self, external: int) -> None:
        if self._push(_CUSTOM, external) != _SUCCESS:
            self._call("cuptiActivityPushExternalCorrelationId", _CUSTOM, external)

    def pop(self) -> None:
        self._pop(_CUSTOM, self._popped)

    def node_number(self, node: int) -> int:
        found = c_uint64()
        self._call("cuptiGetGraphNodeId", node, byref(found))
        return found.value & 0xFFFFFFFF

    def graph_number(self, executable: int) -> int:
        found = c_uint32()
        self._call("cuptiGetGraphExecId", executable, byref(found))
        return found.value

    def read(self, most: int) -> Records:
        following = self._functions["cuptiActivityGetNextRecord"]
        if read_in_c is None:
            return read_in_python(self._records(following), most)
        kernels, externals, lost = read_in_c(ctypes.cast(following, c_void_p).value or 0, self._full, most)
        return Records([KernelRecord._make(kernel) for kernel in kernels], externals, lost)

    def _records(self, following: Any) -> Iterator[bytes]:
        for address, size_bytes in self._full:
            at, end = c_void_p(), address + size_bytes
            while following(address, size_bytes, byref(at)) == _SUCCESS:
                begin = at.value or 0
                if not address <= begin < end:
                    break
                yield ctypes.string_at(begin, min(_KERNEL_BYTES, end - begin))

    def text(self, address: int) -> bytes:
        return ctypes.string_at(address, self._text_of(address, MAX_NAME_BYTES)) if address else b""

    def _requested(self, buffer: Any, size_bytes: Any, most: Any) -> None:
        """Give CUPTI a buffer when it asks for one. If MAX_BUFFERS are in use, give none, so that CUPTI drops its
        records.
        """
        buffer[0], size_bytes[0], most[0] = None, 0, 0
        if len(self._buffers) < MAX_BUFFERS:
            room = (c_uint64 * (BUFFER_BYTES // 8))()
            address = ctypes.addressof(room)
            self._buffers[address] = room
            buffer[0], size_bytes[0] = address, BUFFER_BYTES

    def _completed(self, _context: Any, _stream: int, buffer: int, _size_bytes: int, written_bytes: int) -> None:
        if buffer in self._buffers:
            self._full.append((buffer, min(written_bytes, BUFFER_BYTES)))

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result != _SUCCESS:
            text = c_char_p()
            self._functions["cuptiGetResultString"](result, byref(text))
            why = text.value.decode(errors="replace") if text.value else str(result)
            raise CuptiError(f"{name}: {why}", _STATES.get(result, State.FAILED))


_left_on: list[TorchsCupti] = []


def _pass_over(_data: Any, _domain: int, _which: int, _called: Any) -> None:
    """Do nothing. CUPTI requires a callback for calls of the driver, but never calls this one, because cbtop enables
    no callbacks.
    """


@functools.cache
def _demangler() -> tuple[Any, Any] | None:
    """Return two functions of the C++ library: one demangles a name (makes it readable), the other frees the
    result.
    """
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    demangle.argtypes, demangle.restype = (c_char_p, c_void_p, c_void_p, POINTER(c_int)), c_void_p
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = (c_void_p,), None
    return demangle, free


def demangled(name: bytes) -> str:
    """Return the name of a C++ function as in its source. Other names are returned unchanged."""
    functions = _demangler() if name.startswith(b"_Z") else None
    if functions is not None:
        demangle, free = functions
        found = demangle(name, None, None, byref(c_int()))
        if found:
            try:
                return ctypes.string_at(found).decode(errors="replace")
            finally:
                free(found)
    return name.decode(errors="replace")
