"""Link ranks that each have a GPU of the same host, with NCCL through CuPy.

Calls go to the current stream, so that a captured graph contains them like kernels. If a rank has ended, a rank that
waits for it waits forever. So the program that started the ranks must end them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.device import Gpu

# number types of NCCL, values of ncclDataType_t (nccl.h)
INT64, FLOAT32 = 4, 7
SUM = 0  # value of ncclRedOp_t
_TYPES = {np.dtype(np.int64): INT64, np.dtype(np.float32): FLOAT32}


def new_id(gpu: Gpu) -> bytes:
    """Return an id that ranks use to find each other. One rank makes the id and passes it to all other ranks.

    Raises ComputeError without NCCL.
    """
    unique_id: bytes = _nccl(gpu).get_unique_id()
    return unique_id


class NcclLink:
    """A `decoder.ranks.RankLink` for arrays on `gpu`. The constructor waits until every rank has called it.

    Raises ComputeError if NCCL is missing or reports an error.
    """

    def __init__(self, gpu: Gpu, number: int, count: int, unique_id: bytes) -> None:
        self._gpu = gpu
        nccl = _nccl(gpu)
        self._error = nccl.NcclError
        try:
            with gpu.device:
                self._communicator = nccl.NcclCommunicator(count, unique_id, number)
        except self._error as error:
            raise ComputeError(f"NCCL cannot begin: {error}") from error

    def send(self, array: Any, to: int) -> None:
        """Send the array to a different rank, on the current stream."""
        self._call(self._communicator.send, array, to)

    def recv(self, array: Any, sender: int) -> None:
        """Receive data from a different rank into the array, on the current stream."""
        self._call(self._communicator.recv, array, sender)

    def broadcast(self, array: Any, sender: int) -> None:
        """Send the array of one rank to all ranks, on the current stream."""
        self._call(self._communicator.bcast, array, sender)

    def all_reduce(self, array: Any) -> None:
        """Add up the arrays of all ranks in place, on the current stream."""
        self._call(partial(self._communicator.allReduce, array.data.ptr), array, SUM)

    def _call(self, function: Any, array: Any, peer: int) -> None:
        """Call an NCCL function on the current stream. `peer` is the number of the other rank, or the operation of a
        reduction."""
        stream = self._gpu.cupy.cuda.get_current_stream().ptr
        try:
            function(array.data.ptr, array.size, _TYPES[array.dtype], peer, stream)
        except self._error as error:
            raise ComputeError(f"NCCL: {error}") from error


def _nccl(gpu: Gpu) -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ComputeError(f"no NCCL ({error}): pip install nvidia-nccl-cu13") from error
    if not nccl.available:
        raise ComputeError("no NCCL that CuPy can load: pip install nvidia-nccl-cu13")
    return nccl
