"""Tests of recorded kernels: each is assigned to the brick that launched it and gets a readable name.

A failure leaves no resource behind.
"""

from __future__ import annotations

import pytest

from cbtop.profiler.device import kernel_burst
from cbtop.profiler.device.cupti import CuptiError
from cbtop.profiler.device.graph_surgery import Order
from cbtop.profiler.device.kernel_burst import (
    MAX_NAME_CHARS,
    Durations,
    KernelBurstResults,
    KernelWindow,
    LaunchedKernel,
    short,
)
from tests.profiler.device.fake_cupti import CuptiWorld, FakeCupti, kernel_record

STREAM = 7


@pytest.fixture
def world() -> CuptiWorld:
    return CuptiWorld()


def window_of(world: CuptiWorld, *, has_calls: bool = False) -> KernelWindow:
    window = KernelWindow(FakeCupti(world), world, has_calls=has_calls)
    window.begin()
    return window


def chain(world: CuptiWorld, *durations_ns: int) -> tuple[int, list[int]]:
    graph, nodes = world.new_graph(), []
    for duration_ns in durations_ns:
        nodes.append(world.add(graph, nodes[-1:], duration_ns))
    return graph, nodes


def ended(world: CuptiWorld, window: KernelWindow) -> KernelBurstResults:
    burst = KernelBurstResults()
    world.pass_time(10_000_000)
    window.end(STREAM, burst)
    return burst


def test_kernels_of_a_graph_are_put_where_their_nodes_belong(world: CuptiWorld) -> None:
    graph, nodes = chain(world, 20_000, 3_000, 20_000)
    where = dict(zip(nodes, [("a",), ("b",), ("a",)], strict=True))
    window = window_of(world)
    window.launch(graph, where.get, STREAM)
    burst = ended(world, window)
    found = {(keys, kernel.name): durations.count for (keys, kernel), durations in burst.kernels.items()}
    assert found == {(("a",), "gemm_kernel"): 2, (("b",), "norm_kernel"): 1}
    ((_, kernel), durations) = next(iter(burst.kernels.items()))
    assert (kernel.grid, kernel.block, kernel.registers) == ((8, 1, 1), (128, 1, 1), 32)
    assert (durations.mean_ns, durations.deviation_ns) == (20_000, 0)
    assert (burst.unplaced, burst.lost) == (0, 0)


def test_nothing_is_left_of_a_window(world: CuptiWorld) -> None:
    graph, _ = chain(world, 1000)
    window = window_of(world)
    window.launch(graph, lambda node: ("a",), STREAM)
    assert world.executables
    ended(world, window)
    assert not world.executables
    assert world.owner is None
    assert world.finalized == 1


def test_kernels_launched_outside_graphs_are_placed_where_they_are_called(world: CuptiWorld) -> None:
    window = window_of(world, has_calls=True)
    world.eager(5000)
    window.enter(("outer",))
    world.eager(5000)
    window.enter(("outer", "inner"))
    world.eager(20_000)
    window.leave()
    world.eager(7000)
    window.leave()
    world.eager(5000)
    burst = ended(world, window)
    found = {keys: (durations.count, durations.sum_ns) for (keys, _), durations in burst.kernels.items()}
    assert found == {("outer",): (2, 12_000), ("outer", "inner"): (1, 20_000)}
    assert burst.unplaced == 2


def test_a_window_goes_on_where_it_was_ended_and_begun_again(world: CuptiWorld) -> None:
    window = window_of(world, has_calls=True)
    burst = KernelBurstResults()
    window.enter(("a",))
    world.eager(5000)
    window.end(STREAM, burst)
    assert world.owner is None
    window.begin()
    world.eager(5000)
    window.leave()
    window.end(STREAM, burst)
    assert [(keys, durations.count) for (keys, _), durations in burst.kernels.items()] == [(("a",), 2)]
    assert world.finalized == 2


def test_where_a_graph_of_another_ran_cupti_is_let_go_and_not_finalized(world: CuptiWorld) -> None:
    graph, _ = chain(world, 1000)
    theirs = world.instantiate(graph)
    window = window_of(world)
    world.launch_graph(theirs, STREAM)
    burst = ended(world, window)
    assert (world.finalized, world.let_go) == (0, 1)
    assert window.is_left_on
    assert burst.unplaced == 1


def test_a_step_that_does_not_end_is_waited_for_no_longer(world: CuptiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_burst, "WAIT_S", 0.01)
    graph, _ = chain(world, 1000)
    window = window_of(world)
    window.launch(graph, lambda node: ("a",), STREAM)  # no time passes
    with pytest.raises(CuptiError, match="did not end"):
        window.end(STREAM, KernelBurstResults())
    assert world.let_go == 1
    assert world.executables


def test_nothing_is_left_if_a_signal_handler_raises_while_a_step_is_awaited(
    world: CuptiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = chain(world, 1000)
    window = window_of(world)
    window.launch(graph, lambda node: ("a",), STREAM)

    def interrupted(nap_s: float) -> None:
        world.pass_time(10_000_000)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_burst.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        window.end(STREAM, KernelBurstResults())
    assert not world.executables
    assert (world.finalized, world.let_go) == (1, 0)


def test_our_own_kernels_are_none_of_the_hosts(world: CuptiWorld) -> None:
    world.names = ("cbtop_pong", "norm_kernel")
    window = window_of(world, has_calls=True)
    window.enter(("a",))
    world.eager(20_000)
    world.eager(5_000)
    window.leave()
    world.eager(20_000)
    burst = ended(world, window)
    assert [kernel.name for _, kernel in burst.kernels] == ["norm_kernel"]
    assert burst.unplaced == 0


@pytest.mark.parametrize("what", ["end", "finalize"])
def test_whatever_fails_leaves_nothing(world: CuptiWorld, what: str) -> None:
    graph, _ = chain(world, 1000)
    window = window_of(world)
    window.launch(graph, lambda node: ("a",), STREAM)
    world.fails_at = what
    with pytest.raises(CuptiError, match=what):
        ended(world, window)
    assert world.owner is None
    assert not world.executables


@pytest.mark.parametrize("hostile", [b"", b"\x0a\0\0\0", kernel_record(grid=(-1, 1, 1))[:160]])
def test_a_record_that_cannot_be_read_is_counted(world: CuptiWorld, hostile: bytes) -> None:
    world.hostile = hostile
    window = window_of(world, has_calls=True)
    window.enter(("a",))
    world.eager(5000)
    window.leave()
    burst = ended(world, window)
    assert burst.lost == 1
    assert len(burst.kernels) == 1


def test_what_a_burst_keeps_is_bounded(world: CuptiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_burst, "MAX_KERNELS", 3)
    monkeypatch.setattr(kernel_burst, "MAX_RECORDS", 10)
    window = window_of(world, has_calls=True)
    for at in range(8):
        window.enter((at,))
        world.eager(5000)
        window.leave()
    burst = ended(world, window)
    assert (len(burst.kernels), burst.left_out, burst.lost) == (3, 2, 6)


def test_durations_have_a_mean_and_a_spread() -> None:
    durations = Durations()
    for duration_ns in (1000, 3000):
        durations.add(duration_ns)
    assert (durations.mean_ns, durations.deviation_ns) == (2000, 1000)
    assert (durations.min_ns, durations.max_ns) == (1000, 3000)


def test_what_was_captured_between_two_places_is_known_beside_branches_too(world: CuptiWorld) -> None:
    graph = world.new_graph()
    first = world.add(graph)
    left, right = world.add(graph, [first]), world.add(graph, [first])
    joined = world.add(graph, [left, right])
    last = world.add(graph, [joined])
    order = Order(world, graph)
    assert set(order.between([first], [left, right])) == {left, right}
    assert set(order.between([left, right], [joined])) == {joined}
    assert order.between([], [first]) == [first]
    assert set(order.between([], [last])) == {first, left, right, joined, last}
    assert order.between([joined], [joined]) == []
    assert order.between([first], [0xDEAD]) == []


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >"
            "(at::native::ReduceOp<float, at::native::MeanOps<float, float> >)",
            "reduce_kernel<512, 1, ReduceOp<float, MeanOps<float, float>>>",
        ),
        (
            "void at::native::(anonymous namespace)::softmax_warp_forward<float, false>(float*, float const*)",
            "softmax_warp_forward<float, false>",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
            "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
            "{lambda()#10}::operator()() const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>"
            "(int, at::native::gpu_kernel_impl_nocast<int>)",
            "elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda>>",
        ),
        ("", "kernel"),
    ],
)
def test_names_are_short_enough_to_be_read(name: str, read: str) -> None:
    assert short(name) == read


def test_of_a_long_name_the_innermost_arguments_go_first() -> None:
    inner = ", ".join(f"second{at}<third>" for at in range(30))
    assert short(f"void f<first<{inner}>, int>(int)") == "f<first<…>, int>"
    assert len(short("x" * 1000)) == MAX_NAME_CHARS


def test_the_launches_in_a_step_are_a_range_from_zero_if_a_step_has_none() -> None:
    burst = KernelBurstResults()
    for launches, others in ((2, 1), (3, 0), (2, 1)):
        for name, count in (("gemm", launches), ("copy", others)):
            for _ in range(count):
                burst.add(("step", "brick"), made_kernel(name), 10)
        burst.end_step("step")
    ranges = {kernel.name: burst.launches_in_step(keys, one) for (keys, kernel), one in burst.kernels.items()}
    assert ranges == {"gemm": (2, 3), "copy": (0, 1)}


def test_merged_durations_have_the_range_of_all_their_steps() -> None:
    one, other = Durations(), Durations()
    for durations, launches in ((one, 2), (other, 5)):
        for _ in range(launches):
            durations.add(10)
        durations.end_step()
    one.merge(other)
    one.add(10)
    one.end_step()
    assert (one.count, one.steps, one.fewest, one.most) == (8, 3, 1, 5)
    assert (one.copy().fewest, one.copy().most) == (1, 5)


def made_kernel(name: str) -> LaunchedKernel:
    return LaunchedKernel(name, (1, 1, 1), (32, 1, 1), 16, 0, 0)
