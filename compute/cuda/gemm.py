"""Multiplies bfloat16 matrices by cuBLAS, through CuPy. CuPy is loaded at the first call."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cbtop.compute.cuda.launches import LibraryCall

# Values of cudaDataType_t, cublasComputeType_t, cublasOperation_t and cublasGemmAlgo_t (library_types.h and
# cublas_api.h). CuPy has no names for the values of bfloat16.
_BFLOAT16, _FLOAT32, _COMPUTES_IN_FLOAT32 = 14, 0, 68
_TRANSPOSED, _AS_IT_IS, _DEFAULT_ALGORITHM = 1, 0, -1
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def bf16_product(weights: Any, x: Any, out: Any, columns: int) -> LibraryCall:
    """Return a call that sets out = x @ weights.T, float32 (tokens, rows), with sums in float32.

    x and weights hold bfloat16 numbers as uint16. Both have `columns` columns.
    """
    return LibraryCall("cublas_gemm_bf16", partial(_run, weights, x, out, columns))


def _run(weights: Any, x: Any, out: Any, columns: int) -> None:  # pragma: no cover - gpu
    from cupy.cuda import cublas, device

    tokens, rows = out.shape  # cuBLAS uses column-major order, so cuBLAS sees the memory of `out` as (rows, tokens)
    cublas.gemmEx(
        device.get_cublas_handle(), _TRANSPOSED, _AS_IT_IS, rows, tokens, columns, _ONE.ctypes.data,
        weights.data.ptr, _BFLOAT16, columns, x.data.ptr, _BFLOAT16, columns, _ZERO.ctypes.data,
        out.data.ptr, _FLOAT32, rows, _COMPUTES_IN_FLOAT32, _DEFAULT_ALGORITHM,
    )  # fmt: skip
