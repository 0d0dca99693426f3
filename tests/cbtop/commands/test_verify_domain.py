"""`cbtop verify --domain` prints what was checked, and has the exit codes of `cbtop verify`."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from cbtop.cli import main
from cbtop.compute import libraries
from cbtop.compute.contracts.own import OwnContract
from cbtop.compute.libraries import DOMAINS, library_contract
from cbtop.compute.libraries.verification import with_binding


def replace_contract(monkeypatch: pytest.MonkeyPatch, contract: OwnContract) -> None:
    """Replace the contract with the same name."""

    def contract_of(name: str) -> OwnContract:
        return contract if name == contract.name else library_contract(name)

    monkeypatch.setattr(libraries, "library_contract", contract_of)


def test_a_domain_is_printed_with_errors_faults_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--domain", "fft"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[:3] for line in text.splitlines()[1:4]] == [["✓", "fft_1d", "numpy.fft.fft"]] * 3
    assert "11 of 11 cases pass; 99 faults were planted" in text
    assert "AllImplemented holds: 31 contracts have a function of the CPU, 28 one of the GPU" in text
    assert main(["verify", "--domain", "fft", "--format", "json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert list(dict.fromkeys(check["contract"] for check in checks)) == list(DOMAINS["fft"])
    assert all(check["passed"] and check["call_us"] > 0 and check["result"]["max_error"] < 1e-11 for check in checks)
    assert main(["verify", "--domain", "fft", "--format", "junit"]) == 0
    (suite,) = ET.fromstring(capsys.readouterr().out)
    assert (suite.get("tests"), suite.get("failures")) == ("11", "0")


def test_a_wrong_binding_ends_with_exit_code_4_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = with_binding(library_contract("ifft_1d"), "numpy.fft:fft")
    replace_contract(monkeypatch, wrong)
    assert main(["verify", "--domain", "fft"]) == 4
    said = capsys.readouterr()
    assert "✗  ifft_1d   numpy.fft.fft" in said.out
    assert "✗ ifft_1d x 64: fails equals inverse_dft" in said.out
    assert "cbtop: ifft_1d by numpy.fft.fft (x 64) and 1 more failed" in said.err


def test_a_domain_with_a_missing_contract_ends_with_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DOMAINS, "fft", (*DOMAINS["fft"], "fft_4d"))
    assert main(["verify", "--domain", "fft"]) == 4
    assert "AllImplemented does not hold: " in capsys.readouterr().err


def test_a_skipped_contract_has_its_reason_in_every_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = with_binding(library_contract("philox"), "no_such_library:Philox")
    replace_contract(monkeypatch, absent)
    monkeypatch.setitem(DOMAINS, "random", ("philox",))
    monkeypatch.setitem(DOMAINS, "fft", (*DOMAINS["fft"], "threefry"))
    assert main(["verify", "--domain", "random"]) == 2
    assert "nothing of random could be checked: philox: no_such_library is not installed" in capsys.readouterr().err
    monkeypatch.setitem(DOMAINS, "random", ("gemm", "philox"))
    monkeypatch.setitem(DOMAINS, "blas", ("gemv", "trsm"))
    assert main(["verify", "--domain", "random"]) == 0
    assert "2 of 2 cases pass; 22 faults were planted; 1 contract was skipped" in capsys.readouterr().out
    assert main(["verify", "--domain", "random", "--format", "junit"]) == 0
    (suite,) = ET.fromstring(capsys.readouterr().out)
    assert suite.get("skipped") == "1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--domain", "ftt"], "unknown domain 'ftt'; did you mean fft? there are blas"),
        (["--domain", "fft", "--format", "sarif"], "the formats of --domain are text, json, junit"),
        (["--domain", "fft", "Sampling"], "--domain takes no brick and no model"),
    ],
)
def test_options_that_do_not_fit_a_domain_are_usage_errors(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_domain_on_a_gpu_needs_cupy_and_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import cupy

        has_gpu = cupy.cuda.is_available()
    except ImportError:
        has_gpu = False
    if has_gpu:
        pytest.skip("there is a GPU")
    assert main(["verify", "--domain", "fft", "--backend", "cuda"]) == 2
    assert "CuPy" in capsys.readouterr().err
