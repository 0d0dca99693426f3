"""Tests of gradients and the loss scale of training steps: both are announced, and the program is not disturbed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

import pytest

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import (  # noqa: E402
    gradients,
    install,
    late_figures,
    loss_scale,
    optimizer_gradients,
    uninstall,
)
from cbtop.profiler.instrument.gradients import gradients_here, measured, seem_finite  # noqa: E402
from cbtop.profiler.instrument.parameter_names import name_of_last  # noqa: E402
from cbtop.profiler.instrument.training import training_here  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.training_messages import GradientFault, GradientNorm, LossScale  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip
from torch.overrides import TorchFunctionMode  # noqa: E402  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  # isort: skip

WORDS = 32
Kind = TypeVar("Kind")


class Factor(torch.autograd.Function):
    """The identity function. Its backward multiplies the gradient by `factor`."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * Factor.factor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.is_odd = False

    def forward(self, x: Any) -> Any:
        inside = self.down(self.up(self.norm(x)).relu())
        return x + (Factor.apply(inside) if self.is_odd else inside)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].is_odd = True

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Loop:
    """A training loop that also computes its own gradient norms."""

    def __init__(self, *, clips: bool = False, scales: bool = False, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scales, growth_interval=10)
        self.ids = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))
        self.clips, self.factor = clips, 1.0
        self.norms = [math.nan]

    def loss(self) -> Any:
        loss = nn.functional.cross_entropy(self.model(self.ids).flatten(0, 1), self.ids.flatten())
        return loss * self.factor

    def norm(self) -> float:
        """Return the norm of the gradients in float64."""
        grads = [one.grad.double() for one in self.model.parameters() if one.grad is not None]
        return float(torch.cat([grad.flatten() for grad in grads]).norm())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        self.norms.append(self.norm() / scale)
        if self.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """Yield a recorder of messages. Gradients are measured and announced in every step."""
    monkeypatch.setattr(optimizer_gradients, "ANNOUNCE_NS", 0)
    monkeypatch.setattr(loss_scale, "ANNOUNCE_NS", 0)
    monkeypatch.setattr(Factor, "factor", 1.0)
    here = gradients_here()
    here.budget, here.small_budget = gradients.Budget(math.inf), gradients.Budget(math.inf)
    kept = Memory()
    install(BrickProfiler(recorder=kept))
    try:
        yield kept
    finally:
        uninstall()
        training_here().give_up()
        gradients_here().forget()


def said(heard: Memory, kind: type[Kind]) -> list[Kind]:
    return [message for message in heard.said if isinstance(message, kind)]


@first_by_default(
    ("options", "clipping"),
    [
        ({}, ""),
        ({"clips": True}, "before"),
        ({"scales": True}, ""),
        ({"scales": True, "clips": True}, "before"),
        ({"scales": True, "fused": True}, ""),
    ],
    3,
)
def test_the_norm_of_each_step_is_that_of_the_unscaled_gradients_before_clipping(
    heard: Memory, options: dict[str, Any], clipping: str
) -> None:
    loop = Loop(**options)
    loop.steps(20)
    norms = said(heard, GradientNorm)
    assert [one.step for one in norms] == list(range(2, 21))
    assert [one.norm for one in norms] == pytest.approx([loop.norms[one.step] for one in norms], rel=1e-4)
    assert {one.clipping for one in norms} == {clipping}
    assert norms[-1].highest == max(one.norm for one in norms)
    assert not said(heard, GradientFault)


def test_a_norm_of_gradients_that_were_clipped_otherwise_is_after_clipping(heard: Memory) -> None:
    loop = Loop()
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)
        after = loop.norm()
        loop.optimizer.step()
    newest = said(heard, GradientNorm)[-1]
    assert (newest.step, newest.clipping) == (4, "after")
    assert newest.norm == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("order", [2, math.inf])
def test_the_norm_is_the_l2_norm_whatever_norm_the_program_clips_by(heard: Memory, order: float) -> None:
    loop = Loop()
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        before = loop.norm()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3, norm_type=order)
        loop.optimizer.step()
    newest = said(heard, GradientNorm)[-1]
    assert (newest.norm, newest.clipping) == (pytest.approx(before, rel=1e-4), "before")


def test_gradients_that_were_clipped_before_they_were_unscaled_have_their_own_norm(heard: Memory) -> None:
    loop = Loop(scales=True)
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.loss()).backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        scaled = loop.norm() / loop.scaler.get_scale()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    assert said(heard, GradientNorm)[-1].norm == pytest.approx(scaled, rel=1e-4)


def test_gradients_that_a_closure_computes_are_measured(heard: Memory) -> None:
    loop = Loop()

    def closure() -> Any:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        loop.norms.append(loop.norm())
        return loss

    for _ in range(5):
        loop.optimizer.step(closure)
    newest = said(heard, GradientNorm)[-1]
    assert newest.step == 5
    assert newest.norm == pytest.approx(loop.norms[5], rel=1e-4)


@pytest.mark.parametrize("clips", [False, True])
def test_the_first_parameter_whose_gradient_is_nan_is_named_with_its_step(
    heard: Memory, monkeypatch: pytest.MonkeyPatch, clips: bool
) -> None:
    loop = Loop(clips=clips)
    loop.steps(9)
    monkeypatch.setattr(Factor, "factor", math.nan)
    loop.steps(3)
    fault = said(heard, GradientFault)[-1]
    assert (fault.parameter, fault.kind) == ("layers.1.down.bias", "NaN")
    assert (fault.step, fault.finite_step, fault.last_step, fault.checked_step) == (10, 9, 12, 12)
    assert (fault.faulty, fault.parameters) == (13, 21)
    assert said(heard, GradientNorm)[-1].step == 9


def test_of_two_optimizers_in_turns_each_has_its_own_fault(heard: Memory) -> None:
    loops = [Loop(clips=True), Loop(clips=True)]
    for number in range(9):
        for begin, loop in zip((4, 6), loops, strict=True):
            loop.factor = math.nan if number == begin else 1.0
            loop.step()
    faults = {one.phase: one for one in said(heard, GradientFault)}
    assert {phase: (one.step, one.finite_step, one.last_step) for phase, one in faults.items()} == {
        "train": (5, 4, 9),
        "train AdamW 2": (7, 6, 9),
    }


def test_small_gradients_show_a_fault_in_a_step_that_is_not_due(
    heard: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    loop.steps(5)
    gradients_here().budget.share = 1e-9
    loop.steps(4)
    measured_until = said(heard, GradientNorm)[-1].step
    assert measured_until < 9
    monkeypatch.setattr(Factor, "factor", math.nan)
    loop.steps(2)
    fault = said(heard, GradientFault)[-1]
    assert (fault.step, fault.finite_step, fault.last_step) == (10, 9, 11)


def test_if_steps_are_short_a_fault_is_found_in_the_next_checked_step(
    heard: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, here = Loop(), gradients_here()
    loop.steps(5)
    here.budget.share = here.small_budget.share = 1e-9
    loop.steps(2)  # the budgets are spent in the first of these steps
    finite = said(heard, GradientNorm)[-1].step
    monkeypatch.setattr(Factor, "factor", math.nan)
    loop.steps(3)
    assert not said(heard, GradientFault)
    here.small_budget = gradients.Budget(math.inf)
    loop.step()
    fault = said(heard, GradientFault)[-1]
    assert (fault.step, fault.finite_step) == (11, finite)


def test_if_all_gradients_are_nan_the_step_is_certain_only_after_a_measured_one(heard: Memory) -> None:
    loop = Loop()
    loop.steps(5)
    gradients_here().budget.share = 1e-9
    loop.steps(4)
    finite = said(heard, GradientNorm)[-1].step
    loop.factor = math.nan
    loop.step()
    fault = said(heard, GradientFault)[-1]
    assert (fault.step, fault.finite_step) == (10, finite)
    assert fault.faulty == fault.parameters


def test_an_infinite_gradient_is_inf_and_a_norm_that_overflows_is_no_fault(heard: Memory) -> None:
    loop = Loop()
    loop.steps(3)
    for element in (1e30, math.inf):
        assert not said(heard, GradientFault)
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.model.head.weight.grad[0, 0] = element
        loop.optimizer.step()
    fault = said(heard, GradientFault)[0]
    assert (fault.parameter, fault.kind, fault.step, fault.faulty) == ("head.weight", "Inf", 5, 1)


@first_by_default("options", [{}, {"clips": True}, {"fused": True}], 2)
def test_an_overflow_that_the_scaler_skips_is_no_fault_but_lowers_the_scale(
    heard: Memory, options: dict[str, Any]
) -> None:
    loop = Loop(scales=True, **options)
    loop.steps(40)
    loop.factor = 1e36
    loop.steps(12)
    assert not said(heard, GradientFault)
    scale = said(heard, LossScale)[-1]
    assert scale.updates == 52
    assert scale.scale == loop.scaler.get_scale()
    assert scale.falls == scale.latest_falls == scale.latest
    assert scale.before == scale.scale * 2**scale.latest_falls
    assert scale.falls >= 8
    assert max(one.step for one in said(heard, GradientNorm)) <= 41


def test_falls_among_the_first_updates_are_not_among_the_latest(heard: Memory) -> None:
    loop = Loop(scales=True)
    loop.factor = 1e36
    loop.steps(12)
    loop.factor = 1.0
    loop.steps(30)
    scale = said(heard, LossScale)[-1]
    assert scale.falls >= 8
    assert (scale.latest, scale.latest_falls) == (0, 0)


def test_a_scale_that_the_program_sets_is_no_fall(heard: Memory) -> None:
    loop = Loop(scales=True)
    loop.steps(36)
    loop.scaler.update(2.0)
    loop.scaler.load_state_dict(loop.scaler.state_dict() | {"scale": 1.0})
    loop.steps(4)
    assert said(heard, LossScale)[-1].falls == 0


def test_a_fault_in_the_second_optimizer_of_a_step_is_named(heard: Memory) -> None:
    loop = Loop()
    first, *others = loop.model.parameters()
    both = torch.optim.SGD([first], lr=0.1), torch.optim.Adam(others)
    for number in range(6):
        for optimizer in both:
            optimizer.zero_grad()
        loop.loss().backward()
        if number == 4:
            loop.model.head.bias.grad[0] = math.nan
        for optimizer in both:
            optimizer.step()
    fault = said(heard, GradientFault)[0]
    assert (fault.phase, fault.parameter, fault.step) == ("train", "head.bias", 5)
    assert {one.phase for one in said(heard, GradientNorm)} == {"train"}


@pytest.fixture
def arrive_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures of gradients arrive late, as from a device.

    The first attempt to read them fails, and the second attempt succeeds.
    """
    on_their_way: dict[int, list[float]] = {}
    read = late_figures.LateFigures.read

    def read_late(figures: Any) -> list[float] | None:
        if id(figures) in on_their_way:
            return on_their_way.pop(id(figures))
        on_their_way[id(figures)] = read(figures)
        return None

    monkeypatch.setattr(late_figures.LateFigures, "read", read_late)
    monkeypatch.setattr(gradients, "is_finite", lambda parameter: None)
    monkeypatch.setattr(optimizer_gradients, "seem_finite", lambda parameters: None)


@pytest.mark.usefixtures("arrive_late")
def test_norms_that_arrive_in_a_later_step_belong_to_their_own_step(
    heard: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    loop.steps(9)
    norms = said(heard, GradientNorm)
    assert [one.step for one in norms] == list(range(2, 9))
    assert [one.norm for one in norms] == pytest.approx([loop.norms[one.step] for one in norms], rel=1e-4)
    monkeypatch.setattr(Factor, "factor", math.nan)
    loop.steps(3)
    fault = said(heard, GradientFault)[0]
    assert (fault.parameter, fault.step, fault.finite_step) == ("layers.1.down.bias", 10, 9)


@pytest.mark.usefixtures("arrive_late")
def test_an_infinite_norm_that_arrives_late_is_no_fault_until_an_element_is_infinite(heard: Memory) -> None:
    loop = Loop()
    loop.steps(3)
    for element in (1e30, 1e30, 1.0, math.inf, math.inf, math.inf):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.model.head.weight.grad[0, 0] = element
        loop.optimizer.step()
        if element < math.inf:
            assert not said(heard, GradientFault)
    fault = said(heard, GradientFault)[0]  # After this step, the weights are NaN.
    assert (fault.kind, fault.step, fault.finite_step) == ("NaN", 8, 6)


def test_a_sum_of_small_gradients_is_finite_only_if_each_element_is() -> None:
    weights = [nn.Parameter(torch.zeros(shape)) for shape in ((3,), (2, 2), ())]
    assert seem_finite([]) is None
    assert seem_finite(weights) is None
    for dtype in (torch.float32, torch.float16):
        for weight in weights:
            weight.data = weight.data.to(dtype)
            weight.grad = torch.full_like(weight, 60_000)
        assert seem_finite(weights) is True
        for value in (math.nan, math.inf):
            for weight in weights:
                before = weight.grad.clone()
                weight.grad.view(-1)[-1] = value
                assert seem_finite(weights) is False
                weight.grad = before


def test_large_gradients_are_added_up_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MOST_JOINED", 3)
    monkeypatch.setattr(torch, "cat", None)
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(2)
    assert seem_finite(weights) is True
    weights[1].grad = torch.tensor([math.inf, -math.inf])
    assert seem_finite(weights) is False


def test_sparse_gradients_are_not_measured(heard: Memory) -> None:
    loop = Loop()
    loop.model.embedding.sparse = True
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.optimizer.step()
    assert not said(heard, GradientNorm)


def test_a_norm_of_float16_has_more_digits_than_float16() -> None:
    weight = nn.Parameter(torch.zeros(1_000, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.37)
    other = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    other.grad = torch.full_like(other, 2.0)
    found: Any = measured([weight, other])
    expected = math.hypot(weight.grad.double().norm().item(), other.grad.norm().item())
    assert found.norm == pytest.approx(expected, rel=1e-5)


def test_only_the_own_part_of_a_dtensor_is_measured(tmp_path: Path) -> None:
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensors = pytest.importorskip("torch.distributed.tensor")
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        weight = nn.Parameter(tensors.distribute_tensor(torch.ones(6), mesh, [tensors.Shard(0)]))
        weight.grad = tensors.distribute_tensor(torch.full((6,), 2.0), mesh, [tensors.Shard(0)])
        with torch.no_grad():
            found: Any = measured([weight])
        assert (found.norm, found.is_shard) == (pytest.approx(math.sqrt(24)), True)
    finally:
        distributed.destroy_process_group()


def test_norms_take_no_more_than_their_share_of_the_time(heard: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, now_ns = gradients.Budget(0.002), 1_000
    monkeypatch.setattr(gradients.clock, "perf_counter_ns", lambda: now_ns)
    for began_ns, cost_ns, due_ns in (
        (1_000, 900, 1_000),  # The first measurement is always allowed, whatever it costs.
        (2_000, 10, 7_000),
        (7_000, 10, 12_000),
        (12_000, 500, 17_000),  # This measurement was interrupted, so its cost does not count.
    ):
        assert budget.is_due(began_ns)
        now_ns = began_ns + cost_ns
        budget.spend(began_ns)
        assert budget.is_due(due_ns)
        assert not budget.is_due(due_ns - 1)


def test_weights_with_an_optimizer_of_their_own_are_not_looked_at(heard: Memory) -> None:
    loop = Loop()
    own = {weight: torch.optim.SGD([weight], lr=0.01) for weight in loop.model.parameters()}
    for weight in own:
        weight.register_post_accumulate_grad_hook(lambda weight: own[weight].step())
    for _ in range(4):
        loop.loss().backward()
        loop.model.zero_grad()
    assert not said(heard, GradientNorm)


@pytest.mark.slow
def test_200_steps_with_clipping_and_a_scaler_are_bit_equal_without_us(heard: Memory) -> None:
    watched = Loop(clips=True, scales=True)
    watched.steps(200)
    state = torch.get_rng_state()
    assert said(heard, GradientNorm)
    uninstall()
    bare = Loop(clips=True, scales=True)
    bare.steps(200)
    assert torch.equal(state, torch.get_rng_state())
    assert watched.scaler.state_dict() == bare.scaler.state_dict()
    for one, other in zip(watched.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
        assert one.grad.grad_fn is None


class Functions(TorchFunctionMode):
    """A mode of torch that lists the functions that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """A mode of torch that lists the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@first_by_default("make", [Functions, Operations])
def test_modes_of_the_host_see_nothing_of_ours(heard: Memory, make: Callable[[], Any]) -> None:
    def seen() -> list[str]:
        loop = Loop(clips=True, scales=True)
        loop.steps(4)
        with make() as mode:
            loop.steps(2)
        names: list[str] = mode.seen
        return names

    watched = seen()
    assert said(heard, GradientNorm)
    uninstall()
    assert watched == seen()


def test_an_error_of_ours_stops_looking_at_gradients_and_the_host_goes_on(
    heard: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(optimizer_gradients, "measured", fails)
    loop = Loop()
    loop.steps(6)
    assert not said(heard, GradientNorm)
    assert training_here().steps is None
    assert training_here().clock.is_in is None


def test_no_gradient_is_kept_alive(heard: Memory) -> None:
    loop = Loop(clips=True)
    loop.steps(4)
    kept = [ref(one.grad) for one in loop.model.parameters()]
    loop.optimizer.zero_grad()
    gc.collect()
    assert not any(one() is not None for one in kept)


def test_without_attached_models_gradients_are_not_looked_at(heard: Memory) -> None:
    loop = Loop(clips=True, scales=True)
    loop.steps(3)
    uninstall()
    before = len(heard.said)
    loop.steps(3)
    assert len(heard.said) == before


class DistributedDataParallel(nn.Module):
    """A wrapper of a model with the name of torch's class. As in torch, the model is in the attribute `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_name_leaves_out_what_torch_puts_around_a_module() -> None:
    model = Model()
    wrapped = model.layers[1].up
    del model.layers[1].up
    model.layers[1].add_module("_checkpoint_wrapped_module", wrapped)
    root = DistributedDataParallel(model)
    weight = wrapped.weight
    assert name_of_last(root, [weight]) == "layers.1.weight"
    assert name_of_last(root, [model.layers[2].norm.weight, model.head.bias]) == "layers.2.norm.weight"
    assert name_of_last(root, [nn.Parameter(torch.zeros(1))]) == ""


def test_groups_of_weights_and_biases_do_not_change_what_is_named(
    heard: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    weights = [one for one in loop.model.parameters() if one.dim() > 1]
    others = [one for one in loop.model.parameters() if one.dim() == 1]
    loop.optimizer = torch.optim.AdamW([{"params": others}, {"params": weights, "weight_decay": 0.1}])
    loop.steps(4)
    monkeypatch.setattr(Factor, "factor", math.nan)
    loop.steps(1)
    (fault,) = said(heard, GradientFault)
    assert (fault.parameter, fault.step) == ("layers.1.down.bias", 5)
