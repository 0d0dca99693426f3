"""Tests of possible causes: other changes are listed next to slower bricks if both runs have measured them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.comparison.causes import Causes, causes_of, with_causes
from cbtop.comparison.contents import Contents
from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.runs import Run
from cbtop.protocol.attributes import KernelAttributes
from cbtop.reports.run_diff import diff_fields, diff_markdown, diff_text
from tests.cbtop.comparison.made_contents import GEMM, ONE, contents, kernel, layers, phase
from tests.cbtop.comparison.made_runs import made_run

HEAVY = replace(GEMM, registers=72, occupancy_percent=50)


def run(made: Contents, threads: int = 4) -> Run:
    plain = made_run(1, steps=8)
    return replace(plain, contents=made, surroundings=replace(plain.surroundings, threads=threads))


def heavy(attributes: KernelAttributes = HEAVY, name: str = "gemm") -> Contents:
    pieces = layers()
    del pieces[kernel("Layer 1", "gemm")]
    return contents(phase(pieces | {kernel("Layer 1", name, attributes): ONE}))


def test_a_changed_condition_is_named_with_both_values() -> None:
    base, now = (
        run(contents(conditions=(("Triton", one), ("torch", "2.13"))), threads)
        for one, threads in (("3.6", 4), ("3.7", 2))
    )
    assert causes_of(base, now).of_process == ["Triton 3.6 → 3.7", "threads 4 → 2"]


def test_a_condition_that_one_run_does_not_report_is_no_change() -> None:
    base, now = run(contents(conditions=(("Triton", "3.6"),))), run(contents(conditions=(("CUDA", "12.8"),)))
    assert causes_of(base, now) == causes_of(now, base) == Causes()


def test_a_changed_launch_is_named_in_its_brick_and_layer() -> None:
    base = contents(phase(layers()))
    found = causes_of(run(base), run(heavy()))
    # occupancy is known only in the new run
    assert found.of_brick("decode", "DownProjection", "Layer 1") == ["64 → 72 registers"]
    assert found.of_brick("decode", "DownProjection, launch-bound") == ["64 → 72 registers"]
    assert found.of_brick("decode", "DownProjection", "Layer 2") == []
    assert found.of_brick("decode", "RmsNorm") == []
    assert found.kernels[0].kernel == "gemm"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (replace(GEMM, grid=(64, 2, 1)), "grid 32×1×1 → 64×2×1"),
        (replace(GEMM, block=(256, 1, 1)), "block 128×1×1 → 256×1×1"),
        (replace(GEMM, local_memory_bytes=1024), "0 → 1,024 B of local memory"),
        (replace(GEMM, shared_memory_bytes=1024), "0 → 1,024 B of dynamic shared memory"),
        (replace(GEMM, static_shared_memory_bytes=1024), "0 → 1,024 B of static shared memory"),
        (replace(GEMM, occupancy_percent=25), "100 → 25 % occupancy"),
    ],
)
def test_each_property_of_a_launch_has_its_words(changed: KernelAttributes, text: str) -> None:
    known = replace(
        GEMM, local_memory_bytes=0, shared_memory_bytes=0, static_shared_memory_bytes=0, occupancy_percent=100
    )
    assert [one.text for one in causes_of(run(heavy(known)), run(heavy(changed))).kernels] == [text]


def test_another_kernel_is_compared_if_it_is_the_only_one_of_its_brick() -> None:
    found = causes_of(run(heavy()), run(heavy(replace(HEAVY, registers=80), "gemm_v2"))).kernels
    assert [(one.kernel, one.text) for one in found] == [("gemm → gemm_v2", "72 → 80 registers")]


def test_of_several_kernels_of_a_brick_each_is_compared_by_its_name() -> None:
    sides = []
    for registers in (64, 80):
        silu = kernel("Layer 1", "silu", replace(GEMM, registers=registers))
        sides.append(run(contents(phase(layers() | {silu: ONE, kernel("Layer 1", f"copy_{registers}"): ONE}))))
    assert [(one.kernel, one.text) for one in causes_of(*sides).kernels] == [("silu", "64 → 80 registers")]


def test_a_kernel_with_two_launch_configurations_in_a_brick_is_not_compared() -> None:
    several = contents(phase(layers() | {kernel("Layer 1", "gemm", HEAVY): ONE}))
    assert causes_of(run(contents()), run(several)).kernels == ()


def slower_runs() -> tuple[list[Run], list[Run]]:
    """Return base runs and new runs. In the new runs, Triton is newer and DownProjection of Layer 4 is slower."""
    before = contents(phase(layers(6)), conditions=(("Triton", "3.6"),))
    pieces = {piece: one for piece, one in layers(6).items() if piece != kernel("Layer 4", "gemm")}
    after = contents(phase(pieces | {kernel("Layer 4", "gemm", HEAVY): ONE}), conditions=(("Triton", "3.7"),))
    bases = [replace(made_run(seed), contents=before) for seed in (1, 2, 3)]
    return bases, [replace(made_run(9, slower=1.3), contents=after)]


def test_a_diff_says_the_cause_beside_the_effect() -> None:
    found = diff_of(*slower_runs())
    text = diff_text(found)
    assert "\n  Triton 3.6 → 3.7\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("slower: decode: DownProjection in Layer 4")]
    assert line.endswith("; 64 → 72 registers, Triton 3.6 → 3.7")
    (row,) = [row for row in text.splitlines() if row.startswith("DownProjection in Layer 4")]
    assert "slower, 64 → 72 registers" in row
    assert "64 → 72 registers" in diff_markdown(found)
    assert diff_fields(found)["causes"] == {
        "conditions": ({"name": "Triton", "before": "3.6", "now": "3.7"},),
        "kernels": (
            {
                "phase": "decode",
                "brick": "DownProjection",
                "layers": ("Layer 4",),
                "kernel": "gemm",
                "what": "registers",
                "before": 64,
                "now": 72,
            },
        ),
        "graph": (),
    }


def test_a_diff_lists_the_differences_of_the_graph() -> None:
    runs = [replace(made_run(seed), contents=contents(phase(layers(20)))) for seed in (1, 2)]
    half = contents(phase(layers(20, dtype="bfloat16")))
    found = diff_of(runs[:1], [replace(runs[1], contents=half)])
    line = "graph: decode: every layer › DownProjection: float32 → bfloat16"
    for text in (diff_text(found), diff_markdown(found)):
        assert line in text
        assert "nothing has changed" not in text
    assert diff_fields(found)["causes"]["graph"] == (
        {"phase": "decode", "place": "every layer › DownProjection", "what": "float32 → bfloat16"},
    )
    other = {kernel(f"Layer {number}", f"copy{number}"): ONE for number in range(20)}
    now = replace(runs[1], contents=contents(phase(layers(20) | other)))
    listed = [line for line in diff_text(diff_of(runs[:1], [now])).splitlines() if line.startswith("  graph: ")]
    assert (len(listed), listed[-1]) == (13, "  graph: and 8 more")


def test_a_broken_line_of_the_gate_says_the_cause() -> None:
    found = diff_of(*slower_runs())
    judged = default_gate(found)
    told = with_causes(judged, found)
    (line,) = [one for one in told if one.guilty == "DownProjection in Layer 4" and "no brick" in one.rule]
    assert line.said.endswith("; 64 → 72 registers; Triton 3.6 → 3.7")
    assert [one.said for one in told if one.outcome is not Outcome.BROKEN] == [
        one.said for one in judged if one.outcome is not Outcome.BROKEN
    ]


def test_without_any_change_the_results_stay_as_they_are() -> None:
    found = diff_of([made_run(1)], [made_run(2)])
    judged = [Judged("rule", "decode: RmsNorm", Outcome.BROKEN, "slower", "RmsNorm")]
    assert with_causes(judged, found) == judged
