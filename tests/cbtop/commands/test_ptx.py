"""Tests of `cbtop ptx FILE`, called through the command line."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from cbtop import cli
from cbtop.commands import ptx
from cbtop.compute.ptx_registry import PtxRegistry
from cbtop.profiler.analysis.machine_code.examination import Toolbox
from cbtop.profiler.analysis.machine_code.tools import Tool
from tests.representatives import first_by_default

CORPUS = Path(__file__).parents[2] / "profiler" / "analysis" / "ptx" / "corpus"
CLEAN = CORPUS.parent / "clean"
# folder with a PTX module, its machine code, and the output of NVIDIA's tools for it
KEPT = CORPUS.parent.parent / "machine_code" / "data"


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide NVIDIA's tools, so that no test depends on whether they are installed."""
    monkeypatch.setattr(Toolbox, "of_this_machine", lambda: Toolbox([], []))


@pytest.fixture
def kept_tools(no_tools: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins for ptxas and nvdisasm. They return the stored output for one PTX module."""
    scripts = {
        "ptxas": f'echo "$@" > {tmp_path}/arguments; cp {KEPT}/kernels.cubin output; cat {KEPT}/kernels.log >&2',
        "nvdisasm": f"cat {KEPT}/kernels.json",
    }
    made = []
    for name, script in scripts.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        made.append(Tool(name, str(path), (13, 5, 37)))
    monkeypatch.setattr(Toolbox, "of_this_machine", lambda: Toolbox(made[:1], made[1:]))


def called(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main(["ptx", *map(str, arguments)])
    return code, *capsys.readouterr()


def ids(text: str) -> list[str]:
    return [finding["id"] for file in json.loads(text)["files"] for finding in file["findings"]]


def test_a_valid_file_is_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    """F-PTX-EXPLAIN-001: a valid file is analysed."""
    code, out, err = called(capsys, CLEAN / "triton_softmax.ptx")
    assert (code, err) == (0, "")
    head, entry, *_, last = out.splitlines()
    assert head.endswith("triton_softmax.ptx: PTX 9.4, sm_90a (static)")
    assert entry.startswith("  softmax (line ")
    assert "3 barriers, 0 bytes of shared memory and what the launch adds, requires 128 threads" in entry
    assert last == "no error found"


def test_64_bit_addresses_of_shared_memory_are_found_with_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    """F-PTX-EXPLAIN-002: 64-bit addresses of shared memory are found with --bugs, and not without."""
    bad = CORPUS / "shared_64_bit_bad.ptx"
    code, out, _ = called(capsys, bad, "--bugs")
    assert code == 0
    assert "shared_64_bit_bad.ptx:24: likely shared-64-bit: kernel: shared memory is addressed by %rd5" in out
    assert called(capsys, bad)[1].splitlines()[-1] == "no error found"


def test_json_has_entries_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    """F-PTX-EXPLAIN-003: --json is JSON."""
    code, out, _ = called(capsys, CORPUS / "missing_barrier_bad.ptx", "--json")
    assert code == 4
    (file,) = json.loads(out)["files"]
    assert (file["target"], file["entries"][0]["shared_bytes"], file["entries"][0]["source"]) == (
        "sm_90",
        512,
        "static",
    )
    (finding,) = file["findings"]
    assert (finding["id"], finding["severity"], finding["line"]) == ("missing-barrier", "correctness", 33)


@first_by_default("path", sorted(CORPUS.glob("*_bad.ptx")), 12, ids=lambda path: path.stem)
def test_strict_finds_everything_that_bugs_finds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F-PTX-EXPLAIN-004: --strict reports at least what --bugs reports.

    --bugs reports at least what the default reports.
    """
    default, bugs, strict = (
        ids(called(capsys, path, "--json", *more)[1]) for more in ((), ("--bugs",), ("--strict",))
    )
    assert set(default) <= set(bugs) <= set(strict)
    assert strict or path.stem == "launch_shape_bad"


@pytest.mark.parametrize("name", ["missing.ptx", "text.ptx", "empty.ptx", "binary.ptx", "folder"])
def test_what_cannot_be_read_is_an_error_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F-PTX-EXPLAIN-005: a missing file, or one that is not PTX, gives a one-line error with exit code 2."""
    (tmp_path / "text.ptx").write_text("int main() {}\n")
    (tmp_path / "empty.ptx").write_text("")
    (tmp_path / "binary.ptx").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "folder").mkdir()
    code, out, err = called(capsys, tmp_path / name)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "\x1b" not in err


def test_a_pipe_is_read_and_one_without_a_writer_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (CLEAN / "triton_sum.ptx").read_bytes()
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, text), os.close(writing)))
    writer.start()
    code, out, _ = called(capsys, f"/dev/fd/{reading}")
    writer.join()
    os.close(reading)
    assert (code, "sum2d (line " in out) == (0, True)
    monkeypatch.setattr(ptx, "MAX_WAIT_S", 0.01)
    os.mkfifo(tmp_path / "fifo")
    code, out, err = called(capsys, tmp_path / "fifo")
    assert (code, out, err) == (2, "", f"cbtop: {tmp_path}/fifo: no data for 0.01 s\n")


def test_an_error_of_correctness_ends_with_exit_code_4(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, CORPUS / "divergent_barrier_bad.ptx", "--verbose")
    assert (code, err) == (4, "cbtop: 1 error of correctness in the PTX\n")
    assert "correctness divergent-barrier: kernel: only the threads that go one way at line" in out
    assert "fix: move the barrier out of the branch" in out


def test_a_launch_is_compared_with_the_entry(capsys: pytest.CaptureFixture[str]) -> None:
    bad = CORPUS / "launch_shape_bad.ptx"
    assert called(capsys, bad, "--launch", "128")[0] == 0
    code, out, _ = called(capsys, bad, "--launch", "32,8")
    assert code == 4
    assert "the launch has blocks of 32x8x1 threads, but .reqntid requires 128x1x1" in out


def test_an_early_return_is_named_by_its_source_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CORPUS / "exit_before_barrier_shared_bad.ptx").read_text()
    path = tmp_path / "early.ptx"
    path.write_text(text)
    (branch,) = (at for at, line in enumerate(text.split("\n"), 1) if "@%p1 bra" in line)
    says = "exit-before-barrier: kernel: the threads that return at"
    assert f"{says} line {branch} never reach this barrier\n" in called(capsys, path)[1]
    with_lines = text.replace("\t@%p1 bra", "\t.loc 1 7 5\n\t@%p1 bra").replace(
        "\tbar.sync", "\t.loc 1 9 5\n\tbar.sync"
    )
    path.write_text(with_lines + '.file 1 "/src/early.cu"\n')
    place = f"/src/early.cu:7 (PTX line {branch + 1})"
    out = called(capsys, path, "--verbose")[1]
    assert f"{says} {place} never reach this barrier (/src/early.cu:9)" in out
    assert "fix: let these threads skip their work instead of returning" in out
    assert "divergent-barrier" not in out


@pytest.mark.parametrize("block", ["32,8", "32x8", "32x8x1"])
def test_a_block_is_written_with_commas_or_with_x(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "blocks of 32x8x1 threads" in called(capsys, CORPUS / "launch_shape_bad.ptx", "--launch", block)[1]


def test_the_last_line_counts_findings_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    lines = called(capsys, CORPUS, "--strict")[1].splitlines()
    kinds = [line.split(": ")[1].split()[0] for line in lines if line.startswith(f"{CORPUS}/") and "PTX" not in line]
    errors, likely, advice = (kinds.count(one) for one in ("correctness", "likely", "advice"))
    expected = f"{errors} errors; {likely} likely errors; {advice} findings of advice"
    assert lines[-1].startswith(expected)


def test_an_assumed_block_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CORPUS / "missing_barrier_bad.ptx").read_text()
    path = tmp_path / "one.ptx"
    assumed = "checked for blocks of 64 threads; --launch checks yours"
    for limit, lines in ((".reqntid 128, 1, 1", 0), (".maxntid 128, 1, 1", 1), ("", 1)):
        path.write_text(text.replace(".reqntid 128, 1, 1", limit))
        assert called(capsys, path)[1].splitlines().count(assumed) == lines
    code, out, _ = called(capsys, path, "--launch", "128")
    assert (code, "checked for" in out) == (4, False)
    path.write_text(text.replace(".reqntid 128, 1, 1", "").replace("%tid.x", "%tid.y"))
    code, out, _ = called(capsys, path)
    assert out.splitlines()[-2:] == [
        "not checked for races: pass --launch, because threadIdx.y or z is used",
        "no error found",
    ]
    (entry,) = json.loads(called(capsys, path, "--json")[1])["files"][0]["entries"]
    assert (entry["checked_threads"], entry["is_assumed"]) == (None, True)


@pytest.mark.slow
def test_accesses_with_an_unknown_address_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    out = called(capsys, CLEAN / "nvrtc_rms_norm.ptx")[1]
    assert re.search(r"in (\d+) of (\d+) loads and stores \((\d+) with an unknown address\)", out)
    for file in json.loads(called(capsys, CLEAN, "--json")[1])["files"]:
        for entry in file["entries"]:
            code = entry["machine_code"]
            for space in ("global", "shared"):
                known = sum(one["space"] == space for one in code["transactions"])
                counts = f"in {known} of {known + code['unknown_addresses'][space]} loads"
                assert not known or counts in called(capsys, file["file"])[1]


def test_an_entry_of_several_has_a_block_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CORPUS / "launch_shape_bad.ptx").read_text()
    _, entry, body = text.partition("	// .globl")
    path = tmp_path / "two.ptx"
    path.write_text(text + (entry + body).replace("kernel", "other"))
    for options, wrong in (
        (["--launch", "128"], []),
        (["--launch", "256"], ["kernel", "other"]),
        (["--launch", "other=256"], ["other"]),
        (["--launch", "256", "--launch", "kernel=128"], ["other"]),
        (["--launch", "kernel=32x4", "--launch", "other=128x1x1"], ["kernel"]),
    ):
        _, out, _ = called(capsys, path, *options, "--json")
        (file,) = json.loads(out)["files"]
        assert [one["function"] for one in file["findings"] if one["id"] == "launch-shape"] == wrong, options
    (file,) = json.loads(called(capsys, path, "--launch", "kernel=128", "--json")[1])["files"]
    assert [one["checked_threads"] for one in file["entries"]] == [128, 128]
    code, out, err = called(capsys, path, "--launch", "scan=128")
    assert (code, out) == (2, "")
    assert err == "cbtop: --launch names scan, which is no entry; the entries are kernel, other\n"


def test_findings_of_one_cause_are_one_line_unless_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight loads that each have one mask give one finding.

    A finding with a different message or lint is separate.
    """
    path = tmp_path / "layer_norm.ptx"
    path.write_bytes((CLEAN / "triton_layer_norm.ptx").read_bytes())

    def split() -> list[str]:
        return [line for line in out.splitlines() if " split-loop: " in line]

    code, out, _ = called(capsys, path, "--strict")
    grouped, last = split(), out.splitlines()[-1]
    assert code == 0
    assert (
        f"{path}:77: advice split-loop: layer_norm: this check is true in all iterations but the last" in grouped[0]
    )
    assert "(2 times, also at PTX line 78; --verbose has each)" in grouped[0]
    _, out, _ = called(capsys, path, "--strict", "--verbose")
    assert (len(grouped), len(split())) == (3, 6)
    assert out.splitlines()[-1] == last
    assert len([one for one in ids(called(capsys, path, "--strict", "--json")[1]) if one == "split-loop"]) == 6


@pytest.mark.parametrize("block", ["0", "a", "1,2,3,4", "2048", "-1", "32,"])
def test_what_is_no_block_is_a_usage_error(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        called(capsys, CORPUS / "launch_shape_bad.ptx", f"--launch={block}")
    assert error.value.code == 2
    assert "is no block of 1 to 1024 threads" in capsys.readouterr().err


def test_sarif_has_the_file_the_line_and_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, CORPUS, "--strict", "--format", "sarif")
    assert code == 4
    (run,) = json.loads(out)["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert all(rules[one["ruleIndex"]] == one["ruleId"] for one in run["results"])
    assert {one["level"] for one in run["results"]} == {"error", "warning", "note"}
    divergent = next(one for one in run["results"] if one["ruleId"] == "divergent-barrier")
    place = divergent["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("divergent_barrier_bad.ptx")
    assert place["region"]["startLine"] == 33


def test_sarif_is_at_the_source_if_there_are_debug_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        (CORPUS / "missing_barrier_bad.ptx").read_text().replace("\tld.shared.f32", "\t.loc 1 7 5\n\tld.shared.f32")
    )
    (tmp_path / "build").mkdir()
    for folder, uri in ((tmp_path / "src", "src/a%20b.cu"), (Path("/elsewhere"), "file:///elsewhere/a%20b.cu")):
        (tmp_path / "build" / "a.ptx").write_text(text + f'.file 1 "{folder}/a b.cu"\n')
        out = called(capsys, "build/a.ptx", "--format", "sarif")[1]
        (result,) = json.loads(out)["runs"][0]["results"]
        (place,) = (one["physicalLocation"] for one in result["locations"])
        (related,) = (one["physicalLocation"] for one in result["relatedLocations"])
        assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (uri, 7)
        assert ("uriBaseId" in place["artifactLocation"]) is uri.startswith("src")
        assert (related["artifactLocation"]["uri"], related["region"]["startLine"]) == ("build/a.ptx", 34)


@pytest.mark.usefixtures("kept_tools")
def test_waste_in_sarif_is_at_its_source_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.ptx"
    text = (KEPT / "kernels.ptx").read_text()
    path.write_text(text.replace("ld.param", ".loc 1 5 1\n\tld.param") + '.file 1 "/src/k.cu"\n')
    results = json.loads(called(capsys, path, "--format", "sarif")[1])["runs"][0]["results"]
    places = [one["locations"][0]["physicalLocation"] for one in results]
    assert results
    assert {one["artifactLocation"]["uri"] for one in places} == {"file:///src/k.cu"}
    assert {one["region"]["startLine"] for one in places} == {5}


@pytest.mark.parametrize(("good", "expected"), [("triton_sum", 2), ("../corpus/missing_barrier_bad", 4)])
def test_a_bad_file_in_a_folder_does_not_hide_the_others(
    good: str, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.ptx").write_text("int main() {}\n")
    (tmp_path / "b.ptx").write_bytes((CLEAN / f"{good}.ptx").read_bytes())
    (tmp_path / "c\x1b.ptx").symlink_to(tmp_path / "loop.ptx")
    (tmp_path / "d.ptx").write_bytes(bytes(range(256)))
    code, out, err = called(capsys, tmp_path)
    assert code == expected
    assert f"{tmp_path}/b.ptx: PTX " in out
    named = [line.partition(".ptx: ")[0] for line in err.splitlines()]
    assert named[:2] == [f"cbtop: {tmp_path}/a", f"cbtop: {tmp_path}/d"]
    assert len(named) == (2 if expected == 2 else 3)
    (tmp_path / "b.ptx").unlink()
    code, out, err = called(capsys, tmp_path)
    assert (code, out, len(err.splitlines())) == (2, "", 2)


def test_a_hash_of_a_compiled_module_is_analysed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = (CLEAN / "triton_sum.ptx").read_bytes()
    ptx_hash = PtxRegistry().register("copy", text)
    code, out, _ = called(capsys, f"{ptx_hash:016x}"[:6])
    assert code == 0
    assert "sum2d (line " in out
    assert called(capsys, "ff" * 8)[0] == 3
    assert called(capsys, "show")[0] == 2
    assert called(capsys, CLEAN / "triton_sum.ptx", "more")[0] == 2


# --- machine code ---------------------------------------------------------------------------------------------------


def test_without_tools_resources_are_not_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, KEPT / "kernels.ptx")
    assert code == 0
    assert out.count("resources, occupancy, accesses, intensity: n/a") == 5
    assert out.count("pip install nvidia-cuda-nvcc") == 1
    document = json.loads(called(capsys, KEPT / "kernels.ptx", "--json")[1])
    machine_code = document["files"][0]["entries"][0]["machine_code"]
    assert (machine_code["registers"], machine_code["spill_store_bytes"], machine_code["occupancy"]) == (
        None,
        None,
        [],
    )


@pytest.mark.usefixtures("kept_tools")
def test_resources_and_waste_of_each_entry_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = called(capsys, KEPT / "kernels.ptx", "--verbose")
    assert code == 0
    for expected in (
        "resources (sm_80, ptxas 13.5.37): 24 registers, spills 124 bytes stored and 136 loaded, stack 128 bytes",
        "occupancy (derived): 7 blocks of 64 threads, 14 of 64 warps an SM, limited by shared memory; 32 bytes of",
        "occupancy (derived): warps an SM of 64, by threads of a block: 64 at 128, 64 at 256, 64 at 512, 64 at 1024",
        "accesses (static): global loads: 1 of 128 bits; global stores: 1 of 32 bits; tensor cores: not used",
        "intensity (estimate): 0.15 FLOP a requested byte: memory-bound, unless caches serve the loads",
        "transactions of a warp (derived): global 20 sectors, 20 needed, in 2 of 2 loads and stores",
        "    waste spills: 124 bytes of registers",
        "    possible waste not-vectorized: 4 loads of 32 bits",
        "      fix: load a vector type",
    ):
        assert expected in out
    sarif = json.loads(called(capsys, KEPT / "kernels.ptx", "--format", "sarif")[1])["runs"][0]
    rules = [rule["id"] for rule in sarif["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    assert {one["level"] for one in sarif["results"]} == {"note"}
    assert {one["ruleId"] for one in sarif["results"]} == {
        "spills",
        "local-memory",
        "low-occupancy",
        "not-vectorized",
    }
    assert all(rules[one["ruleIndex"]] == one["ruleId"] for one in sarif["results"])
    (spills,) = (one for one in sarif["results"] if one["ruleId"] == "spills")
    entry = next(
        line for line in out.splitlines() if line.startswith(f"  {spills['message']['text'].split(':')[0]} ")
    )
    line = spills["locations"][0]["physicalLocation"]["region"]["startLine"]
    assert f"(line {line}): " in entry
    assert (tmp_path / "arguments").read_text().split() == ["-v", "-arch", "sm_80", "-o", "output", "input"]


@pytest.mark.usefixtures("kept_tools")
def test_the_architecture_and_the_block_can_be_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = called(capsys, KEPT / "kernels.ptx", "--arch", "sm_90a", "--launch", "32,8", "--json")
    assert "sm_90a" in (tmp_path / "arguments").read_text().split()
    entries = {one["name"]: one["machine_code"] for one in json.loads(out)["files"][0]["entries"]}
    wide = entries["wide"]
    assert (wide["architecture"], wide["assembler"], wide["registers"]) == ("sm_90a", "ptxas 13.5.37", 14)
    assert [one["threads"] for one in wide["occupancy"]] == [256]
    assert [one["id"] for one in entries["indexed"]["waste"]] == ["local-memory", "not-vectorized"]


@pytest.mark.parametrize("architecture", ["90", "sm_9", "--help", "sm_90 -o /tmp/x"])
def test_what_is_no_architecture_is_a_usage_error(architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["ptx", str(KEPT / "kernels.ptx"), f"--arch={architecture}"])
    assert stopped.value.code == 2
    assert "is not an architecture such as sm_90" in capsys.readouterr().err
