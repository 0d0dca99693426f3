"""Contracts of functions of libraries, by domain. A YAML file names a function of the CPU and one of the GPU.

A new one is a file here and its name in DOMAINS. `through.py` and `references.py` have functions that it may name.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from cbtop.compute.contracts.own import NO_BINDING, OwnContract, read_own
from cbtop.compute.errors import ContractError
from cbtop.compute.own_contracts import resolved

__all__ = ["DOMAINS", "FOLDER", "is_installed", "library_contract", "not_implemented"]

FOLDER = Path(__file__).parent
DOMAINS: dict[str, tuple[str, ...]] = {
    "blas": ("gemv", "gemm", "trsm"),
    "elementwise": ("add", "relu", "softmax", "transpose"),
    "fft": ("fft_1d", "ifft_1d", "rfft_1d", "fft_2d", "fft_3d"),
    "image": ("conv2d", "resize", "canny", "colour", "histogram"),
    "sparse": ("csr", "bsr", "spmv", "spmm", "spgemm"),
    "solvers": ("cholesky", "lu", "qr", "svd", "eigen"),
    "random": ("philox", "threefry"),
    "contraction": ("contraction", "tensordot"),
}


@cache
def library_contract(name: str) -> OwnContract:
    """Return the contract in NAME.yaml. Raises ContractError if the file is missing or invalid, or binds nothing."""
    contract = read_own(FOLDER / f"{name}.yaml")
    if not contract.bindings:
        raise ContractError(f"{contract.path}: bindings: missing; name a function for cpu and one for gpu")
    return contract


def is_installed(function: str) -> bool:
    """Return whether the library of `module:function` is installed."""
    return find_spec(function.partition(":")[0].partition(".")[0]) is not None


def not_implemented() -> list[str]:
    """Return what AllImplemented lacks: files that are in no domain's list, names without a file, and functions that
    are missing in an installed library.
    """
    names = [name for domain in DOMAINS.values() for name in domain]
    missing = [f"{path.name} is in no domain" for path in sorted(FOLDER.glob("*.yaml")) if path.stem not in names]
    for name in names:
        try:
            contract = library_contract(name)
            for function in filter(None, (contract.reference, contract.through, *contract.bindings.values())):
                if not function.startswith(NO_BINDING) and is_installed(function):
                    resolved(function)
        except ContractError as error:
            missing.append(str(error))
    return missing
