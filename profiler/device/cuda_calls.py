"""The functions of `libcuda.so.1` that the profiler calls, and the types of their arguments."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

SUCCESS = 0


class DriverError(Exception):
    """Raised if the driver refuses a call, or if a device does not answer."""


class KernelNode(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("kernel", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("library_kernel", c_void_p),
        ("context", c_void_p),
    )


_Handle, _Count = POINTER(c_void_p), POINTER(c_size_t)
# Function name -> argument types. All functions return a CUresult, and exist in drivers for CUDA 12.3 and later.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGraphAddDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphAddKernelNode_v2": (_Handle, c_void_p, c_void_p, c_size_t, POINTER(KernelNode)),
    "cuGraphClone": (_Handle, c_void_p),
    "cuGraphCreate": (_Handle, c_uint),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphGetEdges_v2": (c_void_p, c_void_p, c_void_p, c_void_p, _Count),
    "cuGraphGetNodes": (c_void_p, c_void_p, _Count),
    "cuGraphInstantiateWithFlags": (_Handle, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphNodeFindInClone": (_Handle, c_void_p, c_void_p),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_uint)),
    "cuGraphRemoveDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamGetCaptureInfo_v3": (c_void_p, POINTER(c_int), c_void_p, c_void_p, _Handle, c_void_p, _Count),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamQuery": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}


class CudaCalls:  # pragma: no cover - gpu
    """Calls functions of the driver by name. Raises DriverError if the driver is missing or too old."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._functions: dict[str, Any] = {name: getattr(library, name) for name in _CALLS}
        except (OSError, AttributeError) as error:
            raise DriverError(str(error)) from error
        for name, arguments in _CALLS.items():
            self._functions[name].argtypes, self._functions[name].restype = arguments, c_int

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result != SUCCESS:
            raise self._error(name, result)

    def _error(self, name: str, result: int) -> DriverError:
        text = c_char_p()
        self._functions["cuGetErrorName"](result, byref(text))
        return DriverError(f"{name}: {text.value.decode() if text.value else result}")
