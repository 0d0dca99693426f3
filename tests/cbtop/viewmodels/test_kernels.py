"""Tests of recorded kernels: they are added up over all layers that have the same brick.

Kernels outside of bricks are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cbtop.client.store import Store
from cbtop.protocol.announcements import MAX_ANNOUNCED
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.kernel_messages import KernelBurst, KernelTimes
from cbtop.protocol.messages import Node, SourceCatalog
from cbtop.protocol.vocabulary import NodeKind
from cbtop.text.kernel_text import in_burst
from cbtop.viewmodels.kernel_findings import findings_of
from cbtop.viewmodels.kernels import kernels_of, waves_of

SHAPE = KernelAttributes(grid=(8, 1, 1), block=(128, 1, 1))
NODES = [
    Node(1, None, NodeKind.STEP, "decode"),
    Node(2, 1, NodeKind.LAYER, "0"),
    Node(3, 2, NodeKind.BRICK, "RmsNorm"),
    Node(4, 3, NodeKind.KERNEL, "norm", kernel=SHAPE),
    Node(5, 1, NodeKind.LAYER, "1"),
    Node(6, 5, NodeKind.BRICK, "RmsNorm"),
    Node(7, 6, NodeKind.KERNEL, "norm", kernel=SHAPE),
]


def times(node: int, mean_ns: float, launches: int = 4, steps: int = 2) -> KernelTimes:
    return KernelTimes(node, steps, launches, mean_ns, 0.0, round(mean_ns), round(mean_ns))


def test_a_brick_has_the_kernels_of_all_its_layers_and_their_spread() -> None:
    (phase,) = kernels_of(NODES, KernelBurst(1, 2, (times(4, 1000.0), times(7, 3000.0))))
    (brick,) = phase.bricks
    (row,) = brick.kernels
    assert (phase.phase, phase.steps, brick.layers) == ("decode", 2, 2)
    assert (row.launches_per_step, row.mean_us, row.deviation_us) == (4, 2, 1)
    assert (row.min_us, row.max_us, row.us_per_step) == (1, 3, 8)
    assert phase.us_per_step == brick.us_per_step == 8


def test_a_single_launch_has_no_deviation() -> None:
    once = times(4, 1000.0, launches=1, steps=1)
    (phase,) = kernels_of(NODES, KernelBurst(1, 1, (once,)))
    assert phase.bricks[0].kernels[0].deviation_us is None
    assert in_burst(once) == "1.00 µs, 1 a step, in a burst of 1 step"
    assert in_burst(times(4, 1000.0)) == "1.00 µs ± 0.00, 2 a step, in a burst of 2 steps"


def test_what_names_no_kernel_in_a_step_is_passed_over() -> None:
    burst = KernelBurst(1, 2, tuple(times(node, 1000.0) for node in (-1, 0, 1, 2, 3, 8, 1 << 60)))
    assert kernels_of(NODES, burst) == ()
    assert kernels_of([Node(1, None, NodeKind.KERNEL, "alone")], KernelBurst(1, 1, (times(1, 1.0),))) == ()


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"launches": 0}, {"mean_ns": -1.0}, {"min_ns": 5}, {"max_ns": 0}, {"deviation_ns": float("nan")}],
)
def test_times_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    good = {"node": 1, "steps": 1, "launches": 1, "mean_ns": 3.0, "deviation_ns": 0.0, "min_ns": 2, "max_ns": 4}
    KernelTimes(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel 1"):
        KernelTimes(**(good | wrong))  # type: ignore[arg-type]


def test_a_burst_of_more_kernels_than_are_kept_is_refused() -> None:
    store = Store()
    burst = KernelBurst(1, 1, (times(4, 1.0),) * (MAX_ANNOUNCED + 1))
    with pytest.raises(DecodeError, match="kernels in a burst"):
        store.apply(SourceCatalog("a", complete=True, messages=(burst,)))


GEMM = KernelAttributes(grid=(300, 1, 1), block=(256, 1, 1), registers=128, shared_memory_bytes=0)


def burst_on(multiprocessors: int | None, architecture: str, *found: KernelTimes) -> KernelBurst:
    return KernelBurst(1, 2, found, multiprocessors=multiprocessors, architecture=architecture)


def test_waves_follow_from_blocks_that_fit_and_the_grid() -> None:
    # A block has 256 threads with 128 registers each: half of the 65,536 registers of a multiprocessor (SM). So 2
    # blocks fit on an SM, and 264 on 132 SMs.
    waves = waves_of(GEMM, burst_on(132, "sm_90"))
    assert waves is not None
    assert (waves.blocks_per_multiprocessor, waves.blocks, waves.multiprocessors) == (2, 300, 132)
    assert (waves.waves, waves.tail, waves.empty) == pytest.approx((300 / 264, 36 / 264, 1 - 300 / 528))
    full = waves_of(replace(GEMM, grid=(264, 2, 1)), burst_on(132, "sm_90"))
    assert full is not None
    assert (full.waves, full.tail, full.empty) == (2, 1, 0)


@pytest.mark.parametrize(
    ("change", "multiprocessors", "architecture"),
    [
        ({}, None, "sm_90"),
        ({}, 132, ""),
        ({}, 132, "sm_52"),
        ({"grid": None}, 132, "sm_90"),
        ({"grid": (0, 1, 1)}, 132, "sm_90"),
        ({"block": None}, 132, "sm_90"),
        ({"block": (0, 1, 1)}, 132, "sm_90"),
        ({"block": (2048, 1, 1)}, 132, "sm_90"),
        ({"registers": None}, 132, "sm_90"),
        ({"registers": 0}, 132, "sm_90"),
        ({"shared_memory_bytes": 1 << 40}, 132, "sm_90"),
    ],
)
def test_waves_are_not_known_if_something_else_is_not(
    change: dict[str, Any], multiprocessors: int | None, architecture: str
) -> None:
    assert waves_of(replace(GEMM, **change), burst_on(multiprocessors, architecture)) is None


def test_losses_of_launches_are_listed_by_measured_time() -> None:
    shapes = {"few": (20, 1, 1), "tail": (300, 1, 1), "full": (264, 1, 1), "long tail": (2700, 1, 1)}
    nodes = [*NODES[:3]]
    for number, (name, grid) in enumerate(shapes.items(), 4):
        nodes.append(Node(number, 3, NodeKind.KERNEL, name, kernel=replace(GEMM, grid=grid)))
    found = [times(number, 1000.0 * number) for number in range(4, 8)]
    (phase,) = kernels_of(nodes, burst_on(132, "sm_90", *found))
    assert [(one.kernel, one.what, one.us_per_step) for one in findings_of(phase)] == [
        ("tail", "1.14 waves of 132 x 2 blocks: the last is 14 % full", 10),
        ("few", "20 blocks for 132 multiprocessors: 112 have nothing to do", 8),
    ]


def test_a_device_without_multiprocessors_is_refused() -> None:
    with pytest.raises(ValueError, match="0 multiprocessors"):
        burst_on(0, "sm_90")
