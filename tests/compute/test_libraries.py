"""Contracts of libraries' functions: each holds, and each finds a function that computes something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop.compute import libraries
from cbtop.compute.contracts.own import FORMS, NO_BINDING, Drawn, OwnContract, read_own
from cbtop.compute.errors import ContractError
from cbtop.compute.libraries import DOMAINS, FOLDER, is_installed, library_contract, not_implemented
from cbtop.compute.libraries.verification import LibraryCheck, verify_library, with_binding
from cbtop.compute.own_bricks import lint

NAMES = [name for names in DOMAINS.values() for name in names]
# For each contract a function that returns something else. `wrong` is a module of WRONG.
OTHER_FUNCTIONS = {
    "gemv": "numpy:multiply",
    "gemm": "numpy:kron",
    "trsm": "wrong:solve_upper",
    "add": "numpy:subtract",
    "relu": "numpy:minimum",
    "softmax": "scipy.special:log_softmax",
    "transpose": "numpy:positive",
    "fft_1d": "wrong:normalised_fft",
    "ifft_1d": "numpy.fft:fft",
    "rfft_1d": "numpy.fft:ihfft",
    "fft_2d": "numpy.fft:ifft2",
    "fft_3d": "numpy.fft:fft2",
    "conv2d": "scipy.signal:correlate2d",
    "resize": "wrong:nearest",
    "canny": "wrong:canny",
    "colour": "skimage.color:rgb2yuv",
    "histogram": "wrong:density",
    "csr": "scipy.sparse:csc_array",
    "bsr": "wrong:small_blocks",
    "spmv": "scipy.sparse:tril",
    "spmm": "scipy.sparse:tril",
    "spgemm": "scipy.sparse:tril",
    "cholesky": "scipy.linalg:cholesky",
    "lu": "wrong:lu",
    "qr": "scipy.linalg:rq",
    "svd": "wrong:svd",
    "eigen": "wrong:descending",
    "philox": "wrong:philox",
    "threefry": "randomgen:Philox",
    "contraction": "wrong:contraction",
    "tensordot": "wrong:tensordot",
}
WRONG = """
import numpy as np

def solve_upper(a, b, lower): return np.linalg.solve(np.triu(a), b)
def normalised_fft(x): return np.fft.fft(x, norm="ortho")
def nearest(image, zoom, order): return np.kron(image, np.ones((zoom, zoom)))
def canny(image, sigma):
    from skimage.feature import canny
    return canny(image, sigma=2 * sigma)
def density(x, bins, range): return np.histogram(x, bins=bins, range=range, density=True)
def small_blocks(a, blocksize):
    from scipy.sparse import bsr_array
    return bsr_array(a, blocksize=(1, 1))
def lu(a):
    from scipy.linalg import lu
    p, l, u = lu(a)
    return p.T, l, u
def svd(a, full_matrices):
    u, s, v = np.linalg.svd(a, full_matrices=full_matrices)
    return u, s, v[::-1]
def descending(a):
    w, v = np.linalg.eigh(a)
    return w[::-1], v[:, ::-1]
def philox(key): return np.random.Philox(key=key + 1)
def contraction(path, a, b): return np.einsum("abc,cbd->ad", a, b)
def tensordot(a, b, axes): return np.tensordot(a, b, axes).swapaxes(0, 1)
"""


def of_cpu(contract: OwnContract) -> list[LibraryCheck]:
    """Verify the functions of the CPU. Skip the test if their library is not installed."""
    found = verify_library("a domain", contract, "cpu")
    if found[0].skipped:
        assert not is_installed(contract.bindings["cpu"])
        pytest.skip(found[0].skipped)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_function_keeps_its_contract_in_every_case(name: str) -> None:
    contract = library_contract(name)
    found = of_cpu(contract)
    assert len(found) == len(contract.cases) >= 2
    for check in found:
        assert check.result is not None
        assert check.result.passed, (check.result.failed, check.result.missed)
        assert check.result.planted > 5
        assert check.call_us is not None
        assert check.call_us > 0


@pytest.mark.parametrize("name", NAMES)
def test_each_condition_and_fault_of_a_contract_is_falsified(name: str) -> None:
    assert lint(FOLDER / f"{name}.yaml") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_contract_finds_a_function_that_returns_something_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    of_cpu(library_contract(name))
    found = of_cpu(with_binding(library_contract(name), OTHER_FUNCTIONS[name]))
    failed = [failure for check in found if check.result is not None for failure in check.result.failed]
    assert failed
    assert not any("raises" in failure for failure in failed), failed  # a result was compared
    assert all(check.call_us is None for check in found if check.result is not None and not check.result.passed)


def test_every_contract_is_listed_and_every_name_is_implemented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_implemented() == []
    monkeypatch.setitem(DOMAINS, "fft", ("fft_1d", "fft_4d"))
    *unlisted, unknown = not_implemented()
    assert unlisted == [f"{name}.yaml is in no domain" for name in ("fft_2d", "fft_3d", "ifft_1d", "rfft_1d")]
    assert "fft_4d.yaml: No such file or directory" in unknown


def test_a_function_that_its_library_lacks_is_not_implemented(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = with_binding(library_contract("gemm"), "numpy:matrix_multiply")
    monkeypatch.setattr(libraries, "library_contract", lambda name: lacking if name == "gemm" else read(name))
    assert not_implemented() == ["numpy:matrix_multiply: there is no 'matrix_multiply' in numpy"]


def read(name: str) -> OwnContract:
    return read_own(FOLDER / f"{name}.yaml")


def test_a_library_that_is_not_installed_is_a_skipped_check() -> None:
    (check,) = verify_library("fft", with_binding(library_contract("fft_1d"), "no_such_library.fft:fft"), "cpu")
    assert (check.skipped, check.result) == ("no_such_library is not installed", None)
    (check,) = verify_library("random", library_contract("threefry"), "gpu")
    assert check.skipped == "neither CuPy nor cuRAND has Threefry"


def test_a_binding_is_a_function_or_a_reason_why_there_is_none(tmp_path: Path) -> None:
    text = (FOLDER / "fft_1d.yaml").read_text()
    path = tmp_path / "fft.yaml"
    path.write_text(text.replace("numpy.fft:fft", "numpy.fft.fft"))
    with pytest.raises(ContractError, match=r"bindings\.cpu: is 'numpy.fft.fft'; module:function is expected"):
        read_own(path)
    path.write_text(text.replace("  gpu: cupy.fft:fft\n", ""))
    with pytest.raises(ContractError, match="bindings: has no 'gpu'"):
        read_own(path)


def test_a_drawn_matrix_has_the_form_that_a_case_asks_for() -> None:
    def drawn(form: str) -> Any:
        return Drawn((40, 40), "float64", form=form).values(np.random.default_rng(1))

    assert np.array_equal(drawn("symmetric"), drawn("symmetric").T)
    assert np.linalg.eigvalsh(drawn("positive definite")).min() > 0
    assert np.count_nonzero(np.triu(drawn("lower triangular"), 1)) == 0
    assert 0.1 < np.count_nonzero(drawn("sparse")) / 1600 < 0.2
    assert all(drawn(form).dtype == np.float64 for form in FORMS)
    assert Drawn((3,), "complex64").values(np.random.default_rng(1)).dtype == np.complex64


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in NAMES if not library_contract(name).bindings["gpu"].startswith(NO_BINDING)]
)
def test_the_function_of_the_gpu_keeps_the_same_contract(name: str) -> None:
    pytest.importorskip("cupy")
    found = verify_library("a domain", library_contract(name), "gpu")
    if found[0].skipped:
        pytest.skip(found[0].skipped)
    assert all(check.result is not None and check.result.passed for check in found)
