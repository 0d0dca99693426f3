"""`cbtop contracts lint` and `cbtop verify module:function`, on the bricks of docs/contracts.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.compute.contracts import FOLDER
from cbtop.compute.own_contracts import resolved
from tests.compute.made_bricks import CONTRACT, write


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module with bricks into the working directory. Returns its name."""
    module = f"bricks_{tmp_path.name.replace('-', '_')}"
    write(tmp_path, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    resolved.cache_clear()
    yield module
    sys.modules.pop(module, None)


def test_the_brick_of_the_page_passes_and_its_faults_are_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{name}:fast_rms_norm"]) == 0
    printed = capsys.readouterr().out
    assert "case 2  reference" in printed
    assert printed.endswith("2 of 2 pass; 22 faults were planted\n")
    assert main(["verify", f"{name}:fast_rms_norm", "--format", "json"]) == 0
    (first, _) = json.loads(capsys.readouterr().out)["kernels"]
    assert (first["contract"], first["bricks"], first["passed"]) == ("rms", ["RmsNorm"], True)


@pytest.mark.parametrize(
    ("brick", "said"),
    [
        ("inexact", "inexact case 1: fails equals plain_rms_norm"),
        ("raising", "raising case 2: fails the call raises RuntimeError: no kernel"),
    ],
)
def test_a_wrong_brick_fails_its_checks(name: str, capsys: pytest.CaptureFixture[str], brick: str, said: str) -> None:
    assert main(["verify", f"{name}:{brick}"]) == 4
    printed = capsys.readouterr()
    assert said in printed.out
    assert "0.0e+00" not in printed.out  # no error was allowed or measured if the call has no output
    assert "(case 1) and 1 more failed" in printed.err
    assert main(["verify", f"{name}:{brick}", "--format", "junit"]) == 4
    assert '<testsuite name="kernels" tests="2" failures="2"' in capsys.readouterr().out


def results(text: str) -> list[tuple[str, str, int]]:
    """Return the message, the file and the line of each result of a SARIF log."""
    (run,) = json.loads(text)["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(ids)) == len(ids)
    found = []
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        found.append((result["message"]["text"], place["artifactLocation"]["uri"], place["region"]["startLine"]))
    return found


def line_of(text: str, file: str) -> int:
    """Return the number of the only line of a file that contains `text`."""
    (number,) = [at for at, line in enumerate(Path(file).read_text("utf-8").splitlines(), 1) if text in line]
    return number


def test_sarif_has_the_failures_of_a_brick_at_the_lines_of_its_contract(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def sarif(brick: str, *options: str, code: int = 4) -> list[tuple[str, str, int]]:
        assert main(["verify", f"{name}:{brick}", "--format", "sarif", *options]) == code
        return results(capsys.readouterr().out)

    tolerance = line_of("tolerance", "rms.yaml")
    assert sarif("inexact") == [
        (f"{name}:inexact case {case}: fails equals plain_rms_norm", "rms.yaml", tolerance) for case in (1, 2)
    ]
    assert sarif("infinite") == [
        (f"{name}:infinite{said}", "rms.yaml", line) for said, line in (
            (" case 1: fails equals plain_rms_norm: shape (1, 9) instead of (1, 8)", tolerance),
            (" case 1: fails postcondition finite(out)", line_of("finite(out): {", "rms.yaml")),
            (" case 1: fails postcondition columns(out) == columns(x)", line_of("columns(out) ==", "rms.yaml")),
            (": no check notices epsilon left out", line_of("epsilon left out", "rms.yaml")),
        )
    ]  # fmt: skip
    assert sarif("fast_rms_norm", code=0) == []
    at_function = f"{name}.py", line_of("def softmax", f"{name}.py") - 1
    weak = sarif("softmax", "--cases", f"{name}:cases")
    assert weak == [
        (f"{name}:softmax: no check notices {fault}", *at_function)
        for fault in ("scaled by 1.5", "two outputs swapped", "an output left out")
    ]


def test_a_brick_that_leaves_the_process_fails(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{name}:leaving"]) == 4
    assert "leaving case 1: fails the call raises SystemExit: 0" in capsys.readouterr().out
    assert main(["verify", f"{name}:fast_rms_norm", "--cases", f"{name}:leaving_cases"]) == 2
    assert "importing it, or its cases, calls sys.exit(0)" in capsys.readouterr().err


def test_a_module_that_leaves_the_process_fails_the_lint(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{name}_leaving.py").write_text("import sys\nprint('mine')\nsys.exit()\n")
    (tmp_path / "rms.yaml").write_text(CONTRACT.replace("my_norms:", f"{name}_leaving:"), encoding="utf-8")
    assert main(["contracts", "lint", "rms.yaml"]) == 4
    printed = capsys.readouterr()
    assert printed.out == "✗ rms.yaml\n  reference: importing its module calls sys.exit(None)\n"
    assert "mine\n" in printed.err


def test_a_brick_prints_to_stderr_and_stdout_is_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{name}:printing", "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["kernels"]) == 2
    assert printed.err.count("mine\n") == 2


def test_checks_that_are_too_weak_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{name}:softmax", "--cases", f"{name}:cases"]) == 4
    printed = capsys.readouterr().out
    assert "MISSED: scaled by 1.5, two outputs swapped, an output left out" in printed
    assert "a NaN" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}:softmax"], "softmax has no contract with cases; pass --cases module:function"),
        (["{}:softmax", "--cases", "{}:no_cases"], "no_cases yields no arguments"),
        (["{}:without_checks"], "without_checks is not a function with @profiler.timed(BrickDefinition"),
        (["{}:nothing"], "there is no 'nothing' in "),
        (["{}:softmax", "--backend", "cuda"], "module:function takes no --model and no --backend cuda"),
        (["{}.softmax"], ".softmax is not the name of a brick; did you mean "),
        (["--cases", "{}:cases"], "--cases belongs to a brick of yours"),
    ],
)
def test_what_cannot_be_verified_is_named(
    name: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["verify", *(argument.format(name) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_the_contract_of_the_page_and_our_own_have_no_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contracts", "lint", "."]) == 0
    assert capsys.readouterr().out == "✓ rms.yaml\n"
    assert main(["contracts", "lint", str(FOLDER)]) == 0
    assert "✗" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        ("epsilon > 0: {", "epsilon >= 0: {", "precondition epsilon >= 0: no case falsifies it", "epsilon >= 0"),
        ("{epsilon: 0}\n    the", "{epsilon: epsilon}\n    the",
         "epsilon left out: no case falsifies it", "epsilon left out"),
        ("finite(x): {x: x / 0}", "all(x > 5): {x: x / 0}",
         "case 1: precondition all(x > 5) does not hold", "all(x > 5)"),
        ("plain_rms_norm", "softmax", "reference: the parameters of ", "reference:"),
        ("plain_rms_norm", "gone", "there is no 'gone' in ", "reference:"),
        ("plain_rms_norm", "profiler", ":profiler is no function", "reference:"),
        ("a NaN,", "an odd fault,",
         "falsification.outputs: 'an odd fault' is unknown; faults are scaled by 1.5", "outputs: [scaled"),
        ("equations", "equation", "the file: 'equation' is not a key; did you mean equations?", "equation:"),
        ("finite(out)", "finite(out", "'finite(out' is no expression", "finite(out:"),
        ("² + epsilon", "² + epsilom",
         "equations: line 1, column 65: 'epsilom' is not a known value; did you mean epsilon?", "epsilom"),
    ],
)  # fmt: skip
def test_a_fault_of_a_contract_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str, line: str
) -> None:
    assert old in CONTRACT
    write(tmp_path, name, CONTRACT.replace(old, new, 1))
    assert main(["contracts", "lint", "rms.yaml", "--format", "json"]) == 4
    printed = capsys.readouterr()
    (faults,) = json.loads(printed.out)["files"].values()
    assert any(said in fault for fault in faults), faults
    assert printed.err == "cbtop: 1 of 1 contract failed: rms.yaml\n"
    assert main(["contracts", "lint", "rms.yaml", "--format", "sarif"]) == 4
    in_sarif = results(capsys.readouterr().out)
    assert [message for message, _, _ in in_sarif] == faults
    assert {file for _, file, _ in in_sarif} == {"rms.yaml"}
    assert line_of(line, "rms.yaml") in {number for _, _, number in in_sarif}


def test_a_contract_without_a_brick_is_a_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contracts", "lint", ".", "--bricks", name]) == 0
    (tmp_path / "other.yaml").write_text((tmp_path / "rms.yaml").read_text("utf-8"), "utf-8")
    assert main(["contracts", "lint", ".", "--bricks", name, "--bricks", "json"]) == 4
    printed = capsys.readouterr().out
    assert printed.endswith(f"✗ other.yaml\n  no brick of {name}, json has this contract\n✓ rms.yaml\n")
    assert main(["contracts", "lint", ".", "--bricks", "no_such_module"]) == 2
    assert "--bricks no_such_module: No module named 'no_such_module'" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", "1.0e-5"), ("bfloat16", "1.0e-2")])
def test_a_brick_of_torch_gets_tensors(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, tolerance: str
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    text = CONTRACT.replace("plain_rms_norm", "torch_norm").replace("cases:", "arrays: torch\ncases:")
    text = text.replace("1.0e-5", tolerance).replace("[1, 8]", f"{{shape: [1, 8], dtype: {dtype}, low: -1}}")
    text = text.replace("weight: [8]", f"weight: {{shape: [8], dtype: {dtype}, low: 2, high: 4}}")
    write(tmp_path, name, text)
    assert main(["verify", f"{name}:fast_torch_norm"]) == 0
    assert "2 of 2 pass" in capsys.readouterr().out
    assert main(["contracts", "lint", "rms.yaml"]) == 0


def test_a_device_that_is_not_there_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    text = CONTRACT.replace("plain_rms_norm", "torch_norm").replace("cases:", "arrays: torch:cuda\ncases:")
    write(tmp_path, name, text)
    assert main(["contracts", "lint", "rms.yaml"]) == 4
    assert capsys.readouterr().out == "✗ rms.yaml\n  arrays: torch has no device cuda here\n"
    assert main(["verify", f"{name}:fast_torch_norm"]) == 2


def test_two_outputs_are_falsified_one_by_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "equations: left = x[:, ::2]; right = x[:, 1::2]\narguments: [x, left, right]\noutputs: [left, right]\n"
        "reference: my_norms:halves\ntolerance: 0\npreconditions: {}\n"
        "postconditions: {finite(right): {right: right / 0}}\n"
        "falsification: {outputs: [a NaN, scaled by 1.5], arguments: {negated: {x: -x}}}\ncases: [{x: [3, 8]}]\n"
    )
    write(tmp_path, name, text)
    assert main(["contracts", "lint", "rms.yaml"]) == 0
    write(tmp_path, name, text.replace("finite(right): {right: right / 0}", "finite(left): {right: right / 0}"))
    assert main(["contracts", "lint", "rms.yaml"]) == 4
    assert "postcondition finite(left): no case falsifies it" in capsys.readouterr().out


def test_a_folder_without_contracts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contracts", "lint", str(tmp_path)]) == 2
    assert "has no contract file; their names end with .yaml" in capsys.readouterr().err
    assert main(["contracts", "lint", str(tmp_path / "none")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_key_that_is_there_twice_is_a_fault_of_the_contract(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rms.yaml").write_text(CONTRACT.replace("my_norms:", f"{name}:") + "tolerance: 1.0\n", encoding="utf-8")
    assert main(["contracts", "lint", "rms.yaml"]) == 4
    assert "'tolerance' twice" in capsys.readouterr().out


def test_modules_of_bricks_print_to_stderr_while_contracts_are_linted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("talking.py").write_text("print('mine')\n")
    Path("leaving.py").write_text("import sys\nsys.exit(0)\n")
    assert main(["contracts", "lint", ".", "--bricks", name, "--bricks", "talking", "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["files"]
    assert printed.err == "mine\n"
    assert main(["contracts", "lint", ".", "--bricks", "leaving"]) == 2
    assert "--bricks leaving: importing it calls sys.exit(0)" in capsys.readouterr().err


def test_each_of_several_files_and_folders_is_linted_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text((tmp_path / "rms.yaml").read_text().replace("finite(out)", "finit(out)"))
    assert main(["contracts", "lint", "other.yaml", ".", "rms.yaml"]) == 4
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line[0] in "✓✗"] == ["✗ other.yaml", "✓ rms.yaml"]
    assert "1 of 2 contracts failed: other.yaml" in said.err
    assert main(["contracts", "lint", "rms.yaml", "missing.yaml"]) == 2
