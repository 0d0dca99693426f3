"""Tests of the examination of a PTX module with NVIDIA's tools. Without the tools, no result is invented."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cbtop.profiler.analysis.machine_code.examination import Examination, Toolbox, examined
from cbtop.profiler.analysis.machine_code.tools import Tool
from cbtop.profiler.analysis.ptx.parser import parse

DATA = Path(__file__).parent / "data"
PTX = (DATA / "kernels.ptx").read_text()


def kept_tool(folder: Path, name: str, script: str) -> Tool:
    """Return a stand-in for one of NVIDIA's tools. The shell script `script` prints stored output."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Tool(name, str(path), (13, 5, 37))


@pytest.fixture
def assembler(tmp_path: Path) -> Tool:
    return kept_tool(tmp_path, "ptxas", f"cp {DATA}/kernels.cubin output; cat {DATA}/kernels.log >&2")


@pytest.fixture
def disassembler(tmp_path: Path) -> Tool:
    return kept_tool(tmp_path, "nvdisasm", f"echo 'nvdisasm warning : old' >&2; cat {DATA}/kernels.json")


def examination(toolbox: Toolbox, architecture: str = "sm_80") -> Examination:
    return examined(PTX.encode(), parse(PTX), architecture, toolbox)


def waste_in(found: Examination, name: str) -> dict[str, str]:
    return {one.id: f"{one.what}; {one.impact}" for one in found.entries[name].waste}


def test_each_kind_of_waste_is_found_in_its_kernel(assembler: Tool, disassembler: Tool) -> None:
    found = examination(Toolbox([assembler], [disassembler]))
    assert found.problems == ()
    assert {name: [*waste_in(found, name)] for name in found.entries} == {
        "spilled": ["spills"],
        "indexed": ["local-memory", "not-vectorized"],
        "narrow": ["not-vectorized"],
        "wide": [],
        "shared_rows": ["low-occupancy"],
    }
    assert "124 bytes of registers are stored to local memory and 136 loaded" in waste_in(found, "spilled")["spills"]
    assert "4 instructions do what 1 could" in waste_in(found, "narrow")["not-vectorized"]
    assert "32 bytes of shared memory less give 8 blocks" in waste_in(found, "shared_rows")["low-occupancy"]
    assert all(one.fix for entry in found.entries.values() for one in entry.waste)


def test_occupancy_is_of_the_declared_block_or_of_usual_sizes(assembler: Tool) -> None:
    found = examination(Toolbox([assembler], []))
    assert [one.threads for one in found.entries["indexed"].occupancy] == [128]
    assert [one.threads for one in found.entries["wide"].occupancy] == [128, 256, 512, 1024]


def test_without_an_assembler_only_the_text_is_examined() -> None:
    found = examination(Toolbox([], []))
    (problem,) = found.problems
    assert "pip install nvidia-cuda-nvcc" in problem
    for one in found.entries.values():
        assert (one.kernel, one.spills, one.occupancy, one.code, one.waste) == (None, None, (), None, ())
    assert found.entries["wide"].lanes.accesses


def test_without_a_disassembler_resources_are_known_and_accesses_are_not(assembler: Tool) -> None:
    found = examination(Toolbox([assembler], []))
    assert "nvidia-cuda-nvdisasm" in found.problems[0]
    entry = found.entries["spilled"]
    assert entry.kernel is not None
    assert (entry.kernel.registers, entry.code, entry.intensity) == (24, None, "not disassembled")
    assert [*waste_in(found, "spilled")] == ["spills"]


def test_a_tool_that_fails_is_named_and_the_next_one_is_used(tmp_path: Path, assembler: Tool) -> None:
    broken = kept_tool(tmp_path, "nvdisasm", "echo 'nvdisasm fatal   : unknown option -json' >&2; exit 1")
    refusing = kept_tool(tmp_path, "ptxas-blackwell", "echo 'fatal : Unsupported .version 7.8' >&2; exit 255")
    found = examination(Toolbox([refusing, assembler], [broken]))
    assert found.problems == ("nvdisasm 13.5.37 failed (exit code 1): nvdisasm fatal   : unknown option -json",)
    assert found.assembler == "ptxas 13.5.37"
    assert "Unsupported .version 7.8" in examination(Toolbox([refusing], [])).problems[0]


def test_a_damaged_result_of_an_assembler_is_a_problem(tmp_path: Path) -> None:
    empty = kept_tool(tmp_path, "ptxas", "echo > output")
    found = examination(Toolbox([empty], []))
    assert found.problems[0].startswith("no cubin")
    assert found.entries["wide"].kernel is None


def test_an_architecture_whose_limits_are_not_known_has_no_occupancy(assembler: Tool) -> None:
    entry = examination(Toolbox([assembler], []), "sm_107").entries["spilled"]
    assert entry.occupancy == ()
    assert entry.kernel is not None


def test_shared_memory_of_the_launch_leaves_the_gain_open(assembler: Tool) -> None:
    dynamic = PTX.replace(".address_size 64", ".address_size 64\n.extern .shared .align 16 .b8 more[];").replace(
        "mov.u32 \t%r1, %tid.x;", "mov.u32 \t%r1, %tid.x;\n\tmov.u32 %r1, more;"
    )
    entry = examined(dynamic.encode(), parse(dynamic), "sm_80", Toolbox([assembler], [])).entries["shared_rows"]
    assert entry.has_dynamic_shared
    assert [one.gain for one in entry.occupancy] == [None]
    assert entry.occupancy[0].loss is not None
