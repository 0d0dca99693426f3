"""Tests of training steps on a CPU: their begin and end, their parts, and the backward of their bricks."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import (  # noqa: E402
    install,
    optimizers,
    timed_model,
    training,
    training_calls,
    uninstall,
)
from cbtop.profiler.instrument.gradient_hooks import GradientHooks  # noqa: E402
from cbtop.profiler.instrument.step_clock import StepClock  # noqa: E402
from cbtop.profiler.instrument.training import training_here  # noqa: E402
from cbtop.profiler.instrument.training_calls import StepCalls  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.profiler.recorder import RingRecorder  # noqa: E402
from cbtop.protocol.catalog import CatalogReader  # noqa: E402
from cbtop.protocol.messages import Goodbye, Manifest, Node  # noqa: E402
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_LOOSE, FLAG_PLAIN  # noqa: E402
from cbtop.protocol.training_messages import TrainingTimes  # noqa: E402
from cbtop.protocol.vocabulary import NodeKind, TrainingPart, is_training  # noqa: E402
from tests.profiler.instrument.dynamo_state import forget_compiled  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip
from torch.utils.checkpoint import checkpoint  # noqa: E402  # isort: skip

NODE = (1 << 24) - 1
WORDS = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, repeats: bool | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        # Use reentrant checkpoints (True), checkpoints that are not reentrant (False), or no checkpoints (None).
        self.repeats = repeats

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) if self.repeats is None else checkpoint(layer, x, use_reentrant=self.repeats)
        return self.head(x)


class Training:
    """A small model, its optimizer and the loop that trains it."""

    def __init__(self, repeats: bool | None = None) -> None:
        torch.manual_seed(3)
        self.model = Model(repeats)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ids = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))

    def loss(self) -> Any:
        return nn.functional.cross_entropy(self.model(self.ids).flatten(0, 1), self.ids.flatten())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


@pytest.fixture
def memory() -> Iterator[Memory]:
    kept = Memory()
    install(BrickProfiler(recorder=kept))
    try:
        yield kept
    finally:
        uninstall()
        training_here().give_up()


def steps_of(memory: Memory) -> Counter[str]:
    """Return the number of steps of each phase."""
    kinds = {node.id: node for node in memory.said if isinstance(node, Node)}
    return Counter(
        kinds[tag & NODE].name
        for tag, *_ in memory.records
        if kinds[tag & NODE].kind is NodeKind.STEP
        and (not tag & FLAG_AMOUNTS or tag & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_PLAIN)
    )


def amounts_of(memory: Memory) -> list[tuple[int, int]]:
    """Return the tokens and sequences of each training step."""
    kinds = {node.id: node for node in memory.said if isinstance(node, Node)}
    steps = [one for one in memory.records if kinds[one[0] & NODE].kind is NodeKind.STEP]
    return [
        (step[3], amounts[1])
        for step, amounts in pairwise(steps)
        if is_training(kinds[step[0] & NODE].name) and not step[0] & FLAG_AMOUNTS and amounts[0] & FLAG_AMOUNTS
    ]


def bricks_of(memory: Memory) -> Counter[str]:
    """Return the number of calls of each brick in training steps, by `layer/brick`."""
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    found: Counter[str] = Counter()
    for tag, *_ in memory.records:
        node = nodes[tag & NODE]
        if node.kind is not NodeKind.BRICK:
            continue
        around = nodes[node.parent or 0]
        stack = f" ({around.label})" if around.label else ""
        layer = f"Layer {around.name}{stack}/" if around.kind is NodeKind.LAYER else ""
        while around.kind is not NodeKind.STEP:
            around = nodes[around.parent or 0]
        if is_training(around.name):
            found[f"{layer}{node.name}"] += 1
    return found


def test_a_step_is_a_training_step_from_the_second_optimizer_step_on(memory: Memory) -> None:
    Training().steps(6)
    assert steps_of(memory) == {"forward (warm-up)": 1, "train": 5}


def test_forwards_before_the_first_optimizer_step_are_a_warm_up(memory: Memory) -> None:
    loop = Training()
    for _ in range(8):
        loop.loss().backward()
    loop.model.eval()
    with torch.no_grad():
        loop.model(loop.ids)
    loop.model.train()
    loop.loss().backward()
    loop.optimizer.step()
    loop.steps(2)
    assert steps_of(memory) == {"forward": 1, "forward (warm-up)": 9, "train": 2}


def test_an_optimizer_that_never_runs_makes_no_endless_warm_up(memory: Memory) -> None:
    loop = Training()
    for _ in range(timed_model.MOST_FIRST_FORWARDS + 6):
        loop.model(loop.ids)
    assert steps_of(memory) == {"forward": 6, "forward (warm-up)": timed_model.MOST_FIRST_FORWARDS}


def test_inference_with_gradients_and_without_optimizer_is_no_warm_up(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_model, "has_made_optimizer", lambda: False)
    loop = Training()
    for _ in range(6):
        loop.model(loop.ids)
    assert steps_of(memory) == {"forward": 6}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Training:
    """A loop in a process that has made no optimizer, as far as cbtop sees."""
    for module in (timed_model, optimizers, training):
        monkeypatch.setattr(module, "has_made_optimizer", lambda: False)
    return Training()


def change_by_hand(loop: Training) -> None:
    loop.model.zero_grad()
    loop.loss().backward()
    for weight in loop.model.parameters():
        weight.data.add_(weight.grad, alpha=-0.01)


def test_weights_that_the_program_changes_by_hand_have_training_steps(memory: Memory, by_hand: Training) -> None:
    forwards = optimizers.BACKWARDS_BY_HAND
    for _ in range(forwards + 4):
        change_by_hand(by_hand)
    assert steps_of(memory) == {"forward": forwards, "train": 3}  # the last step has not ended
    by_hand.model.eval()
    with torch.no_grad():
        by_hand.model(by_hand.ids)
    by_hand.model.train()
    for _ in range(3):
        change_by_hand(by_hand)
    assert steps_of(memory) == {"forward": forwards + 1, "train": 6}


def test_an_optimizer_that_is_made_later_ends_the_next_steps(
    memory: Memory, by_hand: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(optimizers.BACKWARDS_BY_HAND + 2):
        change_by_hand(by_hand)
    memory.records.clear()
    monkeypatch.setattr(training, "has_made_optimizer", lambda: True)
    for _ in range(3):
        by_hand.loss().backward()
        by_hand.loss().backward()
        by_hand.optimizer.step()
    assert steps_of(memory) == {"train": 3}


def test_gradients_in_evaluation_mode_are_no_training(memory: Memory, by_hand: Training) -> None:
    by_hand.model.eval()
    for _ in range(optimizers.BACKWARDS_BY_HAND + 3):
        by_hand.loss().backward()
    assert set(steps_of(memory)) == {"forward"}


@pytest.mark.slow
def test_an_optimizer_is_known_once_it_is_made() -> None:
    program = """
import torch
from cbtop.profiler.instrument.torch_internals import has_made_optimizer
before = has_made_optimizer()
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
print(before, has_made_optimizer())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_each_brick_has_its_forward_and_its_backward(memory: Memory) -> None:
    Training().steps(4)
    bricks = bricks_of(memory)
    for name in ("UpProjection", "DownProjection", "LayerNorm"):
        for layer in range(3):
            assert bricks[f"Layer {layer}/{name}"] == bricks[f"Layer {layer} (backward)/{name} backward"] == 3, name
    for name in ("LmHead", "LmHead backward", "Embedding", "Embedding backward", "Loss", "Optimizer", "ZeroGrad"):
        assert bricks[name] == 3, name
    assert bricks["Loss backward"] >= 3


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_what_a_checkpoint_runs_again_has_rows_of_its_own(memory: Memory, is_reentrant: bool) -> None:
    Training(is_reentrant).steps(4)
    bricks = bricks_of(memory)
    assert bricks["Layer 1/UpProjection"] == bricks["Layer 1 (backward)/UpProjection recompute"] == 3
    assert bricks["Layer 1 (backward)/UpProjection backward"] >= 3
    times = {tag & NODE: (start, end) for tag, start, end, _ in memory.records if not tag & FLAG_AMOUNTS}
    assert all(0 < end - start < 60e9 for start, end in times.values())


def test_parts_inside_a_step_end_before_it_and_do_not_overlap(memory: Memory) -> None:
    Training(False).steps(5)
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    children: dict[int, list[tuple[int, int]]] = {}
    for tag, start, end, _ in memory.records:
        node = nodes[tag & NODE]
        if tag & FLAG_AMOUNTS:
            continue
        inside = children.pop(node.id, [])
        assert sum(to - since for since, to in inside) <= end - start, node.name
        assert all(start <= since <= to <= end for since, to in inside), node.name
        children.setdefault(node.parent or 0, []).append((start, end))


def test_micro_batches_whose_gradients_add_up_are_one_step(memory: Memory) -> None:
    loop = Training()
    for _ in range(4):
        for _ in range(3):
            loop.loss().backward()
        loop.optimizer.step()
    assert steps_of(memory)["train"] == 3
    tokens = {elements for tag, _, _, elements in memory.records if elements == 3 * 16}
    assert tokens == {48}


def test_two_optimizers_after_one_backward_are_in_one_step(memory: Memory) -> None:
    loop = Training()
    first, *others = loop.model.parameters()
    both = torch.optim.SGD([first], lr=0.1), torch.optim.Adam(others)
    for _ in range(4):
        loop.loss().backward()
        for optimizer in both:
            optimizer.step()
    assert steps_of(memory) == {"forward (warm-up)": 1, "train": 3}


def test_a_step_with_two_encoders_has_the_sequences_of_one(memory: Memory) -> None:
    left, right = Training(), Training()
    optimizer = torch.optim.SGD([*left.model.parameters(), *right.model.parameters()], 0.1)
    for _ in range(4):
        for _ in range(2):  # micro-batches
            (left.loss() + right.loss()).backward()
        optimizer.step()
    assert amounts_of(memory) == [(2 * 16, 2 * 2)] * 3


@pytest.mark.slow
def test_two_models_that_train_in_turns_have_steps_of_their_names(memory: Memory) -> None:
    one, other = Training(), Training()
    for _ in range(4):
        one.step()
        other.step()
    assert steps_of(memory) == {"forward (warm-up)": 2, "train": 3, "train AdamW 2": 3}


@pytest.mark.slow
def test_the_name_of_an_optimizer_that_is_gone_is_free_again(memory: Memory) -> None:
    for _ in range(3):
        Training().steps(3)
    assert {name for name in steps_of(memory) if is_training(name)} == {"train"}


def test_an_evaluation_is_inference_and_its_time_is_in_no_step(memory: Memory) -> None:
    loop = Training()
    loop.steps(3)
    memory.records.clear()
    loop.model.eval()
    with torch.no_grad():
        for _ in range(2):
            loop.model(loop.ids)
            time.sleep(0.2)
    loop.model.train()
    loop.step()
    assert steps_of(memory) == {"forward": 2, "train": 1}
    (took_ns,) = [end - start for tag, start, end, _ in memory.records[-2:] if not tag & FLAG_AMOUNTS]
    assert took_ns < 200e6


def test_an_infinite_gradient_that_the_scaler_leaves_out_ends_a_step(memory: Memory) -> None:
    loop = Training()
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    for number in range(4):
        scaler.scale(loop.loss()).backward()
        if number % 2:
            loop.model.head.weight.grad[0, 0] = float("inf")
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    assert steps_of(memory)["train"] == 3


def parts_ns(memory: Memory) -> dict[str, int]:
    """Return the median time in ns of each part in the latest report."""
    times = [one for one in memory.said if isinstance(one, TrainingTimes)][-1]
    return {part.name: part.p50_ns for part in times.parts}


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` after a wait of 100 ms."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return function(*args, **kwargs)

    return slow


@pytest.mark.parametrize(("name", "part"), [("unscale_", TrainingPart.OPTIMIZER), ("update", TrainingPart.OTHER)])
def test_what_the_scaler_does_in_its_step_is_a_part_of_the_optimizer(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, name: str, part: TrainingPart
) -> None:
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    monkeypatch.setattr(torch.amp.GradScaler, name, slowly(getattr(torch.amp.GradScaler, name)))
    loop = Training()
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    for _ in range(4):
        scaler.scale(loop.loss()).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    assert parts_ns(memory)[part] >= 100e6


@pytest.mark.parametrize("name", ["optimizer_begins", "optimizer_ended"])
def test_our_own_work_in_the_hooks_of_an_optimizer_is_in_no_part(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    monkeypatch.setattr(GradientHooks, name, slowly(getattr(GradientHooks, name)))
    loop = Training()
    other = torch.optim.SGD(loop.model.parameters(), lr=0.0)  # a second optimizer ends no step
    for _ in range(5):
        loop.step()
        other.step()
    assert max(parts_ns(memory).values()) < 100e6
    times = [one for one in memory.said if isinstance(one, TrainingTimes)][-1]
    assert times.own_ns >= 100e6 * times.steps


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_the_work_of_torch_around_the_hooks_of_an_optimizer_is_a_part_of_its_step(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, has_scheduler: bool
) -> None:
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    loop = Training()
    scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer) if has_scheduler else None
    loop.step()
    around = torch.autograd.profiler.record_function
    monkeypatch.setattr(around, "__enter__", slowly(around.__enter__))
    monkeypatch.setattr(around, "__exit__", slowly(around.__exit__))
    for _ in range(5):
        loop.step()
        if scheduler is not None:
            scheduler.step()
    assert parts_ns(memory)[TrainingPart.OPTIMIZER] >= 200e6


def test_an_optimizer_that_calls_another_ends_one_step(memory: Memory) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    loop = Training()
    loop.optimizer = Outer(loop.optimizer)
    loop.steps(5)
    assert steps_of(memory)["train"] == 4
    assert not training_here().stepping


def test_an_optimizer_that_raises_leaves_the_next_steps_alone(memory: Memory) -> None:
    loop = Training()
    loop.steps(3)
    group, loop.optimizer.param_groups[0]["betas"] = loop.optimizer.param_groups[0]["betas"], None
    with pytest.raises(TypeError):
        loop.step()
    assert not training_here().stepping
    assert training_here().clock.is_in is None
    loop.optimizer.param_groups[0]["betas"] = group
    loop.steps(2)
    assert steps_of(memory)["train"] == 4


def test_a_step_whose_model_raises_is_dropped_and_the_next_one_counts(memory: Memory) -> None:
    loop = Training()
    loop.steps(3)
    with pytest.raises(IndexError):
        loop.model(torch.full((1, 4), WORDS))
    loop.steps(2)
    assert steps_of(memory)["train"] == 4
    assert not training.captures


def test_the_wait_for_data_and_the_end_of_an_epoch(memory: Memory) -> None:
    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, at: int) -> Any:
            time.sleep(0.01)
            return torch.arange(8)

    loop = Training()
    for _ in range(2):
        for loop.ids in torch.utils.data.DataLoader(Slow(), batch_size=2):
            loop.step()
        time.sleep(0.2)
    nodes = {node.id: node.name for node in memory.said if isinstance(node, Node)}
    waits = [end - start for tag, start, end, _ in memory.records if nodes[tag & NODE] == "DataWait"]
    assert len(waits) == 5
    assert min(waits) >= 20e6
    steps = [
        end - start
        for tag, start, end, _ in memory.records
        if nodes[tag & NODE] == "train" and not tag & FLAG_AMOUNTS
    ]
    assert max(steps) < 200e6


def test_two_threads_train_each_in_steps_of_its_own(memory: Memory) -> None:
    loops = Training(), Training()
    threads = [threading.Thread(target=loop.steps, args=(5,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = steps_of(memory)
    assert sum(count for name, count in found.items() if is_training(name)) == 8


def test_training_is_bit_equal_with_and_without_us(memory: Memory) -> None:
    watched = Training(False)
    watched.steps(8)
    assert any(name.endswith(" backward") for name in bricks_of(memory))
    uninstall()
    bare = Training(False)
    bare.steps(8)
    for one, other in zip(watched.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_graph_that_is_kept_has_no_hook_of_ours_any_more() -> None:
    calls, loss = StepCalls(lambda brick: brick), Training().loss()
    handles = calls.backward_begins([loss])
    loss.backward(retain_graph=True)
    calls.backward_ended(handles)
    reached = len(calls._runs)
    assert reached > 2
    loss.backward()
    assert len(calls._runs) == reached


def test_the_announced_parts_add_up_to_the_steps(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    Training().steps(12)
    said = [message for message in memory.said if isinstance(message, TrainingTimes)]
    assert said
    assert said[-1].phase == "train"
    names = {part.name for part in said[-1].parts}
    assert {TrainingPart.FORWARD, TrainingPart.LOSS, TrainingPart.BACKWARD, TrainingPart.OPTIMIZER} <= names
    assert sum(part.sum_ns for part in said[-1].parts) == said[-1].wall_ns


def test_the_parts_of_the_last_steps_are_announced_when_recording_ends(runtime: Path) -> None:
    recorder = RingRecorder(runtime)
    install(BrickProfiler(recorder=recorder))
    try:
        kept = Training()
        kept.steps(12)
        recorder.close("exit")
    finally:
        uninstall()
        training_here().give_up()
    said = list(CatalogReader(next(runtime.glob("*.catalog"))).read())
    assert [message for message in said if isinstance(message, TrainingTimes)][-1].steps == 11
    assert isinstance(said[-1], Goodbye)


def test_a_model_that_is_gone_has_announced_its_last_steps(memory: Memory) -> None:
    Training().steps(12)
    gc.collect()
    assert [message for message in memory.said if isinstance(message, TrainingTimes)][-1].steps == 11


def test_without_attached_models_no_optimizer_hook_and_no_wrapper_stays(memory: Memory) -> None:
    code = torch.optim.AdamW.step.__code__
    Training().steps(2)
    assert torch.optim.AdamW.step.__code__ is not code
    uninstall()
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert torch.optim.AdamW.step.__code__ is code


PARTS = [
    TrainingPart.DATA_WAIT,
    TrainingPart.FORWARD,
    TrainingPart.BACKWARD,
    TrainingPart.OPTIMIZER,
    TrainingPart.EVALUATION,
]
OWN_WORK = "cbtop's own work"


@given(st.lists(st.tuples(st.sampled_from([*PARTS, OWN_WORK, None]), st.integers(0, 1000))))
def test_the_parts_of_any_step_add_up_to_its_time(events: list[tuple[Any, int]]) -> None:
    clock, now_ns, begun_ns = StepClock(), 0, None
    left_out_ns = 0
    for part, passed_ns in events:
        now_ns += passed_ns
        if part is None:
            clock.end(now_ns)
        elif part is OWN_WORK:
            clock.leave_out(now_ns, now_ns + passed_ns)
            now_ns += passed_ns
            left_out_ns += 0 if begun_ns is None else passed_ns
        else:
            begun_ns = now_ns if begun_ns is None else begun_ns
            clock.begin(part, now_ns)
    begun, parts, ranges = clock.finish(now_ns + 5)
    assert begun == (now_ns + 5 if begun_ns is None else begun_ns)
    assert sum(parts.values()) == now_ns + 5 - begun - left_out_ns
    assert sum(until - since for _, since, until in ranges) == now_ns + 5 - begun - left_out_ns


def test_a_failing_clock_does_not_reach_the_host(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise LookupError("of ours")

    loop = Training()
    loop.steps(3)
    failing: list[tuple[Any, str]] = [(StepClock, "begin"), (StepClock, "end"), (training, "statistics")]
    for owner, name in failing:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            loop.steps(2)
    replaced: Callable[..., Any] = training_here
    assert replaced().clock is not None


def test_a_generator_of_losses_is_left_to_torch(memory: Memory) -> None:
    loop = Training()
    loop.steps(3)
    loop.optimizer.zero_grad()
    torch.autograd.backward(loss for loss in [loop.loss()])
    assert loop.model.head.weight.grad is not None


def test_no_torch_function_of_the_host_sees_a_backward_of_ours(memory: Memory) -> None:
    seen: list[Any] = []

    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    loop = Training()
    counts = []
    for _ in range(4):
        loss = loop.loss()
        seen.clear()
        with Counts():
            torch.autograd.backward(loss)
        counts.append(len(seen))
        loop.optimizer.step()
    # The number of functions that autograd calls does not depend on whether the step is recorded. The first step
    # has no record.
    assert len(set(counts)) == 1


def test_a_model_that_trains_in_evaluation_mode_has_training_steps(memory: Memory) -> None:
    loop = Training()
    loop.model.eval()
    loop.steps(4)
    assert steps_of(memory)["train"] == 3


def test_a_model_in_evaluation_mode_may_be_a_part_of_another_s_step(memory: Memory) -> None:
    generator, judge = Training(), Training()
    for _ in range(4):
        judge.model.train()
        judge.step()
        judge.model.eval()
        generator.optimizer.zero_grad()
        (generator.loss() + judge.loss()).backward()
        generator.optimizer.step()
    assert steps_of(memory)["train"] == 3
    assert sum(count for name, count in steps_of(memory).items() if is_training(name)) == 6


def test_a_closure_of_the_optimizer_has_its_loss_and_backward(memory: Memory) -> None:
    loop = Training()

    def closure() -> Any:
        loop.optimizer.zero_grad()
        scores = loop.model(loop.ids)
        time.sleep(0.01)
        loss = scores.logsumexp(-1).mean()
        loss.backward()
        return loss

    for _ in range(4):
        loop.optimizer.step(closure)
    nodes = {node.id: node.name for node in memory.said if isinstance(node, Node)}
    took = Counter[str]()
    for tag, start, end, _ in memory.records:
        took[nodes[tag & NODE]] += end - start
    assert took["Loss"] >= 3 * 10e6
    assert took["Optimizer"] < took["Loss"]


def test_gradients_without_backward_end_a_step_too(memory: Memory) -> None:
    loop = Training()
    weights = list(loop.model.parameters())
    for _ in range(4):
        for weight, gradient in zip(weights, torch.autograd.grad(loop.loss(), weights), strict=True):
            weight.grad = gradient
        loop.optimizer.step()
    assert steps_of(memory)["train"] == 3


def test_an_optimizer_for_each_weight_in_the_backward_is_one_step(memory: Memory) -> None:
    loop = Training()
    each = {weight: torch.optim.SGD([weight], lr=0.01) for weight in loop.model.parameters()}
    for weight in each:
        weight.register_post_accumulate_grad_hook(lambda one: each[one].step())
    for _ in range(6):
        loop.loss().backward()
    assert steps_of(memory)["train"] == 5


def test_steps_that_end_in_another_thread_are_forwards_again(memory: Memory) -> None:
    loop = Training()
    loop.steps(2)
    for _ in range(60):
        thread = threading.Thread(target=loop.loss().backward)
        thread.start()
        thread.join()
    assert steps_of(memory)["forward"] >= 20


def test_a_step_with_too_many_calls_has_no_bricks(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Training()
    loop.steps(2)
    before = bricks_of(memory)
    monkeypatch.setattr(training_calls, "MAX_CALLS", 30)
    for _ in range(5):
        loop.loss().backward()
    loop.optimizer.step()
    assert bricks_of(memory) == before
    assert steps_of(memory)["train"] == 2


def flops_of(memory: Memory) -> dict[str, float]:
    """Return the FLOP of each brick in the recorded training steps."""
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    found: Counter[str] = Counter()
    for tag, _, _, elements in memory.records:
        node = nodes[tag & NODE]
        if node.kind is NodeKind.BRICK and node.work is not None and not tag & FLAG_AMOUNTS:
            around = nodes[node.parent or 0]
            while around.kind is not NodeKind.STEP:
                around = nodes[around.parent or 0]
            flops = node.work.flops(1, elements)
            if is_training(around.name) and flops is not None:
                found[node.name] += flops
    return dict(found)


def test_the_gradient_of_each_operand_is_a_product_of_its_own(memory: Memory) -> None:
    Training().steps(4)
    flops = flops_of(memory)
    for name in ("UpProjection", "DownProjection", "LmHead"):
        assert flops[f"{name} backward"] == 2 * flops[name] > 0, name
    assert "LayerNorm backward" not in flops


def test_frozen_weights_have_no_product_for_their_gradient(memory: Memory) -> None:
    trained = Training()
    for layer in trained.model.layers:
        layer.up.weight.requires_grad_(requires_grad=False)
    trained.steps(4)
    flops = flops_of(memory)
    assert flops["UpProjection backward"] == flops["UpProjection"] > 0
    assert flops["DownProjection backward"] == 2 * flops["DownProjection"]


def test_what_is_repeated_does_the_work_of_its_forward(memory: Memory) -> None:
    Training(repeats=False).steps(4)
    flops = flops_of(memory)
    assert flops["UpProjection recompute"] == flops["UpProjection"]
    assert flops["UpProjection backward"] == 2 * flops["UpProjection"]


@first_by_default("is_reentrant", [True, False])
def test_a_backward_that_a_checkpoint_interrupts_is_one_call(memory: Memory, is_reentrant: bool) -> None:
    Training(is_reentrant).steps(4)
    bricks = bricks_of(memory)
    assert bricks["Layer 1 (backward)/DownProjection backward"] == bricks["Layer 1/DownProjection"] == 3


def test_gradients_cleared_after_the_loss_leave_it_one_call(memory: Memory) -> None:
    trained = Training()
    for _ in range(4):
        loss = trained.loss()
        trained.optimizer.zero_grad()
        loss.backward()
        trained.optimizer.step()
    bricks = bricks_of(memory)
    assert bricks["Loss"] == bricks["ZeroGrad"] == 3


@pytest.mark.slow
def test_a_frozen_product_inside_a_brick_does_not_count_in_its_backward(memory: Memory) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
    trained = Training()
    trained.model = peft.get_peft_model(trained.model, peft.LoraConfig(r=4, target_modules=["up"]))
    trained.optimizer = torch.optim.AdamW([one for one in trained.model.parameters() if one.requires_grad])
    trained.steps(4)
    flops, tokens = flops_of(memory), 3 * 16  # three recorded steps
    adapter = 2 * 4 * (16 + 64)  # FLOP per token in the forward of the adapter, which is two products of rank 4.
    base = 2 * 16 * 64
    # The input of the first layer needs no gradient. Only the adapter's weights and the result of its first product
    # need one.
    first = adapter + 2 * 4 * 64
    others = 2 * adapter + base
    assert flops["UpProjection backward"] == pytest.approx(tokens * (first + 2 * others), rel=0.01)


def test_an_evaluation_between_micro_batches_has_all_its_steps(memory: Memory) -> None:
    trained = Training()
    for _ in range(6):
        trained.loss().backward()
        trained.model.eval()
        with torch.no_grad():
            trained.model(trained.ids)
        trained.model.train()
        trained.loss().backward()
        trained.optimizer.step()
    steps = steps_of(memory)
    assert steps["train"] == 5
    # Two forwards belong to the first step, which is a warm-up. Six are evaluations.
    assert (steps["forward (warm-up)"], steps["forward"]) == (2, 6)


def test_an_evaluation_between_micro_batches_is_a_part_of_the_step(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    trained = Training()
    pause = trained.model.head.register_forward_hook(lambda *_: None if trained.model.training else time.sleep(0.02))
    for _ in range(6):
        trained.loss().backward()
        trained.model.eval()
        with torch.no_grad():
            trained.model(trained.ids)
        trained.model.train()
        time.sleep(0.01)
        trained.loss().backward()
        trained.optimizer.step()
    pause.remove()
    said = [message for message in memory.said if isinstance(message, TrainingTimes)][-1]
    parts = {part.name: part.sum_ns / said.steps for part in said.parts}
    assert parts[TrainingPart.EVALUATION] >= 20e6
    assert parts[TrainingPart.OTHER] >= 10e6
    assert parts[TrainingPart.OTHER] + parts[TrainingPart.FORWARD] < said.wall_ns / said.steps - 20e6
    assert sum(part.sum_ns for part in said.parts) == said.wall_ns


def test_generation_between_micro_batches_is_evaluation_too(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make torch")
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(2, 8, dtype=torch.long)
    for _ in range(6):
        model(ids, labels=ids).loss.backward()
        model.eval()
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert steps_of(memory)["train"] == 5
    said = [message for message in memory.said if isinstance(message, TrainingTimes)][-1]
    assert {TrainingPart.EVALUATION, TrainingPart.FORWARD} <= {part.name for part in said.parts}
    assert sum(part.sum_ns for part in said.parts) == said.wall_ns


def test_a_wrapped_model_has_the_name_of_what_it_wraps(memory: Memory) -> None:
    trained = Training()
    trained.model = torch.compile(trained.model, backend="eager")
    trained.steps(2)
    forget_compiled()  # functions that compiled code may call are not replaced, but other tests need them
    (said, *_) = [one for one in memory.said if isinstance(one, Manifest)]
    assert (said.model, said.architecture) == ("Model", "Model")
