"""Kernels of a burst are added up over the layers with the same brick. Kernels without a match are skipped."""

from __future__ import annotations

import pytest

from cbtop.client.store import Store
from cbtop.protocol.announcements import MAX_ANNOUNCED
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import KernelBurst, KernelTimes, Node, SourceCatalog
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.kernels import kernels_of

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
