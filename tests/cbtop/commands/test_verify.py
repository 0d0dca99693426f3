"""Text, JSON and JUnit output of `cbtop verify` agree. A failed check has its own exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from cbtop.cli import main
from cbtop.commands.verify import FORMATS
from cbtop.compute import verification
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.demo_model import TINY, write_model
from cbtop.compute.gguf_header import read_header
from cbtop.compute.kernels.activation import SWIGLU
from cbtop.compute.kernels.sampling import GREEDY
from cbtop.compute.quantization.floats import F16
from cbtop.compute.verification import Variant, verified
from cbtop.protocol.messages import CheckResult


def test_what_one_brick_runs_is_said_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "Activation"]) == 0
    text = capsys.readouterr().out
    assert "✓  swiglu" in text
    assert "✓  geglu" in text
    assert "4 of 4 pass; 148 faults were planted" in text
    assert main(["verify", "Activation", "--format", "json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [(kernel["kernel"], kernel["peer"], kernel["planted"]) for kernel in kernels] == [
        ("swiglu", "reference", 59), ("swiglu", "single tokens", 15),
        ("geglu", "reference", 59), ("geglu", "single tokens", 15),
    ]  # fmt: skip
    for kernel in kernels:
        assert kernel["bricks"] == ["Activation", "MoeExperts"]
        assert (kernel["passed"], kernel["missed"]) == (True, [])
    assert main(["verify", "Activation", "--format", "junit"]) == 0
    (suite,) = ET.fromstring(capsys.readouterr().out)
    assert (suite.get("tests"), suite.get("failures"), len(suite)) == ("4", "0", 4)
    assert len({case.get("name") for case in suite}) == 4


def test_a_kernel_that_is_wrong_is_named_with_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(logits: Any, choice: Any) -> None:
        GREEDY.implementation(logits, choice)
        choice += 1

    def planted() -> Iterator[Variant]:
        yield Variant(replace(GREEDY, implementation=wrong))

    monkeypatch.setattr(verification, "variants", planted)
    assert main(["verify"]) == 4
    said = capsys.readouterr()
    assert "✗  greedy" in said.out
    assert "✗ greedy: fails postcondition all(out < columns(logits)) at size 1, " in said.out
    assert "equals reference at size 32" in said.out
    assert said.err.endswith("cbtop: greedy (as it is) failed\n")
    assert main(["verify", "--format", "junit"]) == 4
    (suite,) = ET.fromstring(capsys.readouterr().out)
    assert suite.get("failures") == "1"
    assert "equals reference at size 32" in (suite[0][0].get("message") or "")


@pytest.mark.parametrize(("value", "met"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_what_a_kernel_met_that_is_not_finite_is_said_in_every_format(value: float, met: str) -> None:
    def wrong(gate: Any, up: Any, out: Any) -> None:
        SWIGLU.implementation(gate, up, out)
        out[-1, -1] = value

    found = [verified(Variant(replace(SWIGLU, implementation=wrong)), (7,))]
    of_model = [
        CheckResult("Activation", "finite", False, None, None, met),
        CheckResult("Activation", "equals reference", False, None, 1e-5, met),
    ]
    text = FORMATS["text"](found, of_model)
    assert [met in line.split() for line in text.splitlines() if line.startswith("✗  ")] == [True, True, True]
    said = json.loads(FORMATS["json"](found, of_model))
    assert [one["not_finite"] for one in (*said["kernels"], *said["model"])] == [met, met, met]
    messages = [
        failure.get("message") or "" for failure in ET.fromstring(FORMATS["junit"](found, of_model)).iter("failure")
    ]
    assert messages[0].endswith(f"equals reference at size 7; met {met}")
    assert messages[1:] == [f"met {met}", f"met {met}"]


def test_a_brick_that_is_not_there_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "DownProj"]) == 2
    assert "unknown brick 'DownProj'; did you mean DownProjection? there are" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bricks_of_a_model_are_checked_in_both_kinds_of_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    assert main(["verify", "Sampling", "--model", str(path)]) == 0
    assert "brick of the model" in capsys.readouterr().out


def test_a_model_that_cannot_be_run_is_refused_before_a_kernel_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "verified", lambda *_, **__: pytest.fail("a kernel ran"))
    no_model = tmp_path / "text.gguf"
    no_model.write_text("a text\n")
    for path, said in (
        (tmp_path / "none.gguf", "does not exist"),
        (tmp_path, "is a directory without config.json"),
        (no_model, "is not a GGUF file"),
    ):
        assert main(["verify", "--model", str(path)]) == 2
        assert f"{path} {said}" in capsys.readouterr().err


def test_a_brick_of_a_model_does_not_pass_where_what_it_is_given_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    attend = Decoder._attention

    def late(decoder: Decoder, layer: Any, space: Any, count: int, run: Any) -> None:
        decoder._start -= count == 1
        attend(decoder, layer, space, count, run)
        decoder._start += count == 1

    monkeypatch.setattr(Decoder, "_attention", late)
    assert main(["verify", "RopeEmbedding", "--model", str(path)]) == 4
    said = capsys.readouterr()
    wrong = [line for line in said.out.splitlines() if line.startswith("✗")]
    assert len(wrong) >= 2
    assert all("logits are those of float64" in line for line in wrong)
    assert f"a whole pass of the model and {len(wrong) - 1} more failed" in said.err


ROOT = Path(__file__).parents[3]


def run_of(log: dict[str, Any]) -> dict[str, Any]:
    """Return the only run of a SARIF log. Check that the log has what SARIF 2.1.0 and code hosts require."""
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], set(driver)) == ("cbtop", {"name", "version", "rules"})
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids)
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] == "error"
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
        lines = (ROOT / place["artifactLocation"]["uri"]).read_text(encoding="utf-8").splitlines()
        assert 1 <= place["region"]["startLine"] <= len(lines)
    return dict(run)


def test_sarif_has_a_rule_for_every_check_and_no_result_if_all_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "Sampling", "--format", "sarif"]) == 0
    run = run_of(json.loads(capsys.readouterr().out))
    assert run["results"] == []
    ids = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert ids > {
        "greedy/finite", "greedy/equals reference", "greedy/precondition finite(logits)", "greedy/the smallest",
        "drawn/postcondition all(out >= 0)", "drawn/scaled by 1.5",
    }  # fmt: skip
    assert {one.partition("/")[0] for one in ids} == {"greedy", "drawn"}


def test_what_fails_is_in_sarif_at_the_line_of_its_contract() -> None:
    def wrong(logits: Any, choice: Any) -> None:
        GREEDY.implementation(logits, choice)
        choice += 1

    kernel = replace(verified(Variant(replace(GREEDY, implementation=wrong))), missed=("the smallest",))
    of_model = [
        CheckResult("LmHead", "equals reference", False, 0.5, 1e-5),
        CheckResult("LmHead", "finite", True, None, None),
        CheckResult("RmsNorm", "finite", False, None, None, not_finite="NaN"),
    ]
    run = run_of(json.loads(FORMATS["sarif"]([kernel], of_model)))
    said = {}
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        uri, line = place["artifactLocation"]["uri"], place["region"]["startLine"]
        text = (ROOT / uri).read_text(encoding="utf-8").splitlines()[line - 1]
        said[result["message"]["text"]] = result["ruleId"], text.split(":")[0].strip()
    assert said["greedy: fails equals reference at size 32"] == ("greedy/equals reference", "tolerance")
    assert said["greedy: fails postcondition all(out < columns(logits)) at size 1"] == (
        "greedy/postcondition all(out < columns(logits))",
        "all(out < columns(logits))",
    )
    assert said["greedy: no check notices: the smallest"] == ("greedy/the smallest", "the smallest")
    assert said["LmHead of the model: fails equals reference"] == ("linear/equals reference", "tolerance")
    assert [text for text in said if "fails finite" in text] == ["RmsNorm of the model: fails finite, met NaN"]


def test_what_fails_beside_single_tokens_says_so_everywhere() -> None:
    def wrong(gate: Any, up: Any, out: Any) -> None:
        SWIGLU.implementation(gate, up, out)
        out[1:] /= 2

    found = verified(Variant(replace(SWIGLU, implementation=wrong), peer=verification.SINGLE_TOKENS), (7,))
    assert found.failed == ("equals single tokens at size 7",)
    run = run_of(json.loads(FORMATS["sarif"]([found], [])))
    assert [result["message"]["text"] for result in run["results"]] == [
        "swiglu beside single tokens: fails equals single tokens at size 7"
    ]
    assert "swiglu beside single tokens: fails" in FORMATS["text"]([found], [])
    assert 'name="swiglu beside single tokens"' in FORMATS["junit"]([found], [])


def test_what_is_allowed_is_not_rounded_below_an_error_that_it_allows() -> None:
    near = CheckResult("LmHead", "logits are those of float64", True, max_error=0.14, tolerance=0.15)
    assert FORMATS["text"]([], [near]).splitlines()[-3].split()[-2:] == ["1.4e-01", "1.5e-01"]


def test_what_was_skipped_has_neither_passed_nor_failed() -> None:
    skipped = CheckResult("LmHead", "equals reference", True, None, 1e-5, skipped="a reason", note="1 thread, exact")
    said = FORMATS["text"]([], [skipped])
    assert said.splitlines()[-3].split(maxsplit=6) == [
        "–", "LmHead", "equals", "reference", "skipped", "1.0e-05", "1 thread, exact: a reason"
    ]  # fmt: skip
    assert "0 of 1 pass" in said
    assert json.loads(FORMATS["json"]([], [skipped]))["model"][0]["passed"] is None
    suite = ET.fromstring(FORMATS["junit"]([], [skipped]))[1]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert run_of(json.loads(FORMATS["sarif"]([], [skipped])))["results"] == []


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("against")
    for name, matrices in (("q4.gguf", None), ("f16.gguf", F16)):
        write_model(folder / name, TINY, lambda text, fraction: None, matrices=matrices)
    return str(folder / "q4.gguf"), str(folder / "f16.gguf")


def test_two_files_of_a_model_are_compared_by_tensor_and_by_layer(
    two_files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, against = two_files
    assert main(["verify", "--model", model, "--against", against]) == 0
    text = capsys.readouterr().out
    assert main(["verify", "--model", model, "--against", against, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (tensor,) = (one for one in found["tensors"] if one["name"] == "blk.0.ffn_up.weight")
    assert (tensor["format"], tensor["against_format"], tensor["shape"]) == ("Q4_K", "F16", [256, 512])
    (line,) = (line for line in text.splitlines() if "blk.0.ffn_up.weight" in line)
    assert line.split() == [
        "✓", "blk.0.ffn_up.weight", "Q4_K", "F16",
        tensor["quant_trace"], f"{tensor['max_abs_error']:.1e}", f"{tensor['snr_db']:.1f}", f"{tensor['cosine']:.6f}",
        f"{tensor['min_cosine']:.6f}", f"{tensor['min_snr_db']:.1f}",
    ]  # fmt: skip
    assert text.splitlines()[-1] == f"{len(found['tensors'])} of {len(found['tensors'])} tensors pass"
    assert "attn_q.bias         F32     F32      ok             0.0e+00   equal  1.000000" in text
    assert all(one["passed"] for one in found["tensors"])
    for layer in found["layers"]:
        assert f"    {layer['layer']}  {layer['mean']:.2e}  {layer['largest']:.2e}\n" in text
    assert (found["tokens"], len(found["layers"])) == (16, 2)


def test_a_broken_tensor_is_named_and_ends_with_exit_code_4(
    two_files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, broken = "blk.1.ffn_up.weight", tmp_path / "broken.gguf"
    content = bytearray(Path(two_files[0]).read_bytes())
    with Path(two_files[0]).open("rb") as stream:
        header = read_header(stream, broken)
    at = header.tensors[name].offset
    content[at : at + 512 * 144] = content[at + 144 : at + 512 * 144] + content[at : at + 144]  # rows are shifted
    broken.write_bytes(content)
    arguments = ["verify", "--model", str(broken), "--against", two_files[1]]
    assert main(arguments) == 4
    out, err = capsys.readouterr()
    assert f"✗  {name} " in out
    assert out.splitlines()[-1].endswith(f" tensors pass: ✗ {name}")
    assert err.splitlines()[-1].startswith(f"cbtop: tensor {name}: the cosine is ")
    assert err.endswith("expected at least 0.990038 and 16.9 dB\n")
    assert main([*arguments, "--format", "json"]) == 4
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert [one["name"] for one in tensors if not one["passed"]] == [name]
    assert main([*arguments, "--min-cosine=-1"]) == 0
    assert main(["verify", "--model", two_files[0], "--against", two_files[1], "--min-cosine", "0.9999"]) == 4
    assert " more failed" in capsys.readouterr().err


@pytest.mark.parametrize("cosine", ["1.1", "-1.5", "nan", "much"])
def test_a_limit_that_is_no_cosine_is_refused(cosine: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", f"--min-cosine={cosine}"])
    assert "is not a number from -1 to 1" in capsys.readouterr().err
    assert main(["verify", "--min-cosine", "0.5"]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--against compares two files"),
        (["--model", "x.gguf", "--format", "sarif"], "its formats are text and json"),
        (["--model", "x.gguf", "LmHead"], "--against takes no brick"),
        (["--model", "x.gguf", "--backend", "cuda"], "no --backend cuda"),
        (["--model", "x.gguf"], "x.gguf does not exist"),
    ],
)
def test_against_refuses_what_it_cannot_compare_in_one_line(
    arguments: list[str], complaint: str, two_files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments, "--against", two_files[1]]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
