"""Tests of reading the assembler's report: its spills and advisories."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.profiler.analysis.machine_code.resources import Spills, advisories_of, assembled, spills_of
from cbtop.profiler.analysis.machine_code.tools import Tool, ToolError, tools

DATA = Path(__file__).parent / "data"
PTX = (DATA / "kernels.ptx").read_bytes()


def test_spills_of_each_function_are_read_from_a_report() -> None:
    spills = spills_of((DATA / "kernels.log").read_text())
    assert {name: one for name, one in spills.items() if one} == {"spilled": Spills(124, 136)}
    assert len(spills) == 5


def test_spills_are_read_from_the_report_of_nvrtc_too() -> None:
    log = (
        "ptxas info    : Function properties for linear_1\n"
        "ptxas         .     48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads\n"
    )
    assert spills_of(log) == {"linear_1": Spills(44, 40)}


def test_a_serialized_wgmma_is_reported_in_words_with_its_line() -> None:
    injected, serialized = advisories_of((DATA / "serialized.log").read_text())
    assert (injected.code, injected.is_loss) == ("C7517", False)
    assert (serialized.code, serialized.function, serialized.line) == ("C7515", "matmul", 953)
    assert serialized.is_loss
    assert serialized.text.startswith(
        "wgmma instructions run one after the other: another instruction writes an accu"
    )


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            "insufficient register resources for the wgmma pipeline in the function 'f' in line 3",
            "not enough registers",
        ),
        ("the presence of Extern calls in the function 'f'", "calls a function of another module"),
        ("a new reason in the function 'f'", "a new reason in the function 'f'"),
    ],
)
def test_each_cause_of_serialized_wgmma_has_words(cause: str, words: str) -> None:
    text = "wgmma.mma_async instructions are serialized due to"
    log = f"ptxas info    : (C7510) Potential Performance Loss: {text} {cause}\n"
    (advisory,) = advisories_of(log)
    assert advisory.function == "f"
    assert words in advisory.text


def test_other_advisories_keep_the_words_of_the_assembler() -> None:
    (one,) = advisories_of(
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to allow debugging.\n"
    )
    assert one.text == "setmaxnreg has no effect: to allow debugging"
    (other,) = advisories_of("ptxas warning : (C9000) Something else\n")
    assert (other.text, other.is_loss, other.function, other.line) == ("Something else", False, "", None)


def test_an_architecture_of_another_form_is_refused_before_a_tool_runs() -> None:
    with pytest.raises(ToolError, match="not an architecture"):
        assembled(PTX, "sm_90 --help", [Tool("ptxas", "/nonexistent", ())])


@pytest.fixture
def assemblers() -> list[Tool]:
    found = tools("ptxas")
    if not found:
        pytest.skip("no ptxas on this machine")
    return found


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_installed_assembler_gives_resources_that_match_its_report(
    assemblers: list[Tool], architecture: str
) -> None:
    for tool in assemblers:
        result = assembled(PTX, architecture, [tool])
        assert result.assembler == tool.label
        kernels = {one.name: one for one in result.kernels}
        assert kernels.keys() == result.spills.keys()
        assert result.spills["spilled"]
        assert kernels["spilled"].registers == 24
        assert (kernels["shared_rows"].shared_bytes, kernels["wide"].shared_bytes) == (20_000, 0)
        assert (kernels["indexed"].frame_bytes, result.spills["indexed"]) == (64, Spills(0, 0))


def test_ptx_that_no_assembler_accepts_is_an_error_with_its_line(assemblers: list[Tool]) -> None:
    broken = PTX.replace(b"ld.global.nc.f32", b"ld.nowhere.f32", 1)
    with pytest.raises(ToolError, match=r"line \d+"):
        assembled(broken, "sm_80", assemblers)
