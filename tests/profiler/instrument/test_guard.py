"""Tests of the guard: the guard names the first brick with an output that is not finite.

A test also searches for this brick with forward hooks, and compares the results.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.guard_setting import NotFiniteError  # noqa: E402
from cbtop.profiler.instrument import attach, guard, uninstall  # noqa: E402
from cbtop.profiler.instrument.guard import Guard, guarded_here  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.guard_messages import FAULTY, FINITE, GuardedSteps, GuardFault  # noqa: E402
from cbtop.protocol.training_messages import GradientFault  # noqa: E402
from tests.integration.hosts import CBTOP, DEADLINE_S  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  # isort: skip

WORDS, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.factor = self.scale = 1.0

    def forward(self, x: Any) -> Any:
        inside = self.act(self.up(self.norm(x) * 1.0))
        return (x + self.down(inside * self.factor)) * self.scale


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Any, attention_mask: Any = None) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.arange(16).reshape(2, 8)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(guard, "ANNOUNCE_NS", 0)
    yield Memory()
    uninstall()
    assert not guarded_here().open


def guarded(model: Any, memory: Memory, setting: str = "log") -> Any:
    return attach(model, BrickProfiler(recorder=memory), guard=setting)


def report(memory: Memory) -> GuardedSteps:
    return [said for said in memory.said if isinstance(said, GuardedSteps)][-1]


def fault(memory: Memory) -> GuardFault:
    found = report(memory).fault
    assert found is not None
    return found


def first_by_hooks(model: Any, call: Callable[[], Any]) -> tuple[str, bool] | None:
    """Return two values. The first is the first module to return an output that is not finite, or None.

    The second tells whether the input of this module is finite.
    """
    found: list[tuple[str, bool]] = []
    inputs: dict[str, bool] = {}

    def is_finite(value: Any) -> bool:
        return not value.is_floating_point() or bool(torch.isfinite(value).all())

    def before(name: str) -> Any:
        def hook(_: Any, args: Any) -> None:
            inputs[name] = is_finite(args[0])

        return hook

    def after(name: str) -> Any:
        def hook(_: Any, args: Any, result: Any) -> None:
            if not is_finite(result):
                found.append((name, inputs[name]))

        return hook

    handles = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            handles += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after(name))]
    call()
    for handle in handles:
        handle.remove()
    return found[0] if found else None


def spoil(model: Any, kind: str) -> None:
    with torch.no_grad():
        if kind == "weight":
            model.layers[2].down.weight[3, 5] = math.nan
        elif kind == "bias":
            model.layers[0].up.bias[0] = math.inf
        elif kind == "norm":
            model.layers[3].norm.weight[1] = math.nan
        elif kind == "embedding":
            model.embedding.weight[7] = math.nan
        elif kind == "head":
            model.head.bias[2] = math.inf
        elif kind == "between":  # The fault is in code of the layer, between two bricks.
            model.layers[1].factor = math.nan
        elif kind == "after":  # The fault is in code of the layer, after its last brick.
            model.layers[2].scale = math.inf


KINDS = ["weight", "bias", "norm", "embedding", "head", "between", "after"]


@first_by_default("grad", [False, True], 4, ids=["without a graph", "with a graph"])
@first_by_default("kind", KINDS, 4)
def test_the_first_faulty_module_is_the_one_that_plain_hooks_find(memory: Memory, kind: str, grad: bool) -> None:
    model = Model()
    attached = guarded(model, memory)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            model(IDS)
        assert report(memory) == GuardedSteps("", 4, steps=4)
        spoil(model, kind)
        for _ in range(3):
            model(IDS)
        found = fault(memory)
        attached.detach()
        expected = first_by_hooks(model, lambda: model(IDS))
    assert (found.module, found.given == FINITE) == expected
    assert (found.step, found.last_step, report(memory).faulty, report(memory).checked) == (5, 7, 3, 7)
    layer = found.module.split(".")[1] if found.module.startswith("layers") else None
    assert found.layer == (None if layer is None else int(layer))
    weights = {"weight": "weight", "bias": "bias", "norm": "weight", "embedding": "weight", "head": "bias"}
    assert found.weight == weights.get(kind, "")
    assert found.inside == ("layers.1" if kind == "between" else "")
    assert bool(found.brick) == (kind != "after")


def test_an_input_that_was_faulty_is_told_from_one_that_the_brick_spoilt(memory: Memory) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    guarded(model, memory)
    model(torch.ones(2, 4))
    model(torch.tensor([[math.nan, 1.0, 1.0, 1.0]]))
    assert (fault(memory).module, fault(memory).given, fault(memory).kind) == ("0", FAULTY, "NaN")


def test_a_change_that_torch_does_not_count_is_found_in_the_next_brick(memory: Memory) -> None:
    """docs/guard.md says so in its limits."""

    class Spoilt(nn.Sequential):
        def forward(self, x: Any) -> Any:
            x = self[0](x)
            x.data.mul_(math.nan)
            return self[2](self[1](x))

    model = Spoilt(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    guarded(model, memory)
    model(torch.ones(2, 4))
    assert (fault(memory).module, fault(memory).given) == ("1", FINITE)


def test_negative_infinity_is_a_fault_only_where_it_becomes_one(memory: Memory) -> None:
    class Mask(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.masked_fill(x == 0, -math.inf)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mask, self.last = nn.Linear(4, 4), Mask(), nn.LogSoftmax(-1)
            self.other = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.last(self.mask(self.first(x).relu()))

    model = Masked()
    with torch.no_grad():
        model.first.bias[0] = 100.0  # so that each row has a positive number
    guarded(model, memory)
    for _ in range(5):
        model(torch.randn(3, 4))
    assert report(memory).faulty == 0
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    # One row of the output is -Inf in all positions, so its softmax does not exist. Such a row is a fault.
    model(torch.randn(3, 4))
    assert report(memory).faulty == 1


def test_a_value_over_the_bound_is_named_with_what_made_it(memory: Memory) -> None:
    model = Model()
    guarded(model, memory, "abs<=100")
    model(IDS)
    assert report(memory).faulty == 0
    with torch.no_grad():
        model.layers[1].up.weight *= 1e5
        model(IDS)
    assert (fault(memory).module, fault(memory).kind, fault(memory).given) == (
        "layers.1.up",
        "over the bound",
        FINITE,
    )


def test_a_host_that_is_stopped_gets_an_exception_that_says_why(memory: Memory) -> None:
    model = Model()
    attached = guarded(model, memory, "stop")
    model(IDS)
    spoil(model, "weight")
    with pytest.raises(
        NotFiniteError, match=r"layers\.2\.down.*is NaN in step 2 of forward.*finite.*weight"
    ) as raised:
        model(IDS)
    assert raised.value.code == 4
    assert isinstance(raised.value, SystemExit)
    assert fault(memory).step == 2
    model(IDS)  # This fault was already reported, so the guard does not report it again.
    attached.detach()


def test_the_inputs_of_the_brick_are_saved_for_a_replay(memory: Memory, tmp_path: Path) -> None:
    model = Model()
    guarded(model, memory, f"dump:{tmp_path}/faults")
    model(IDS)
    spoil(model, "weight")
    for _ in range(3):
        model(IDS)
    (path,) = (tmp_path / "faults").iterdir()
    assert fault(memory).file == str(path)
    saved = torch.load(path, weights_only=True)
    facts = {name: saved[name] for name in ("module", "layer", "phase", "step", "kind", "kwargs")}
    assert facts == {
        "module": "layers.2.down", "layer": 2, "phase": "forward", "step": 2, "kind": "NaN", "kwargs": {},
    }  # fmt: skip
    (given,) = saved["args"]
    assert torch.isfinite(given).all()
    assert saved.keys() == facts.keys() | {"brick", "args"}
    assert torch.isnan(model.get_submodule(saved["module"])(given, **saved["kwargs"])).any()


def test_inputs_that_are_too_large_are_not_saved(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cbtop.profiler.instrument.guard_dump.MAX_DUMP_BYTES", 100)
    model = Model()
    guarded(model, memory, f"dump:{tmp_path}")
    spoil(model, "weight")
    model(IDS)
    assert fault(memory).file == ""
    assert not list(tmp_path.iterdir())
    assert "at most 100 are saved" in caplog.text


def test_padding_that_is_nan_is_no_fault_but_a_token_is(memory: Memory) -> None:
    model = Model()
    guarded(model, memory)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        model.embedding.weight[1] = math.nan  # The token 1 occurs only in the padding of the first row.
    model(IDS, attention_mask=mask)
    assert report(memory) == GuardedSteps("", 1, steps=1)
    model(IDS + 16, attention_mask=mask)
    model(IDS, attention_mask=torch.ones_like(mask))
    assert (fault(memory).module, fault(memory).step) == ("embedding", 3)


class Loop:
    """A loop that trains a model."""

    def __init__(self, *, scales: bool = False) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=2.0**126, growth_interval=1)

    def step(self, batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(batches):
            loss = nn.functional.cross_entropy(self.model(IDS).flatten(0, 1), IDS.flatten())
            self.scaler.scale(1_000 * loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_training_steps_are_guarded_and_weights_stay_the_same_to_the_bit(memory: Memory) -> None:
    bare, loop = Loop(), Loop()
    guarded(loop.model, memory)
    for _ in range(12):
        bare.step()
        loop.step()
    for one, other in zip(bare.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(one, other)
    spoil(loop.model, "weight")
    checked = report(memory).checked
    loop.step()
    assert checked >= 10
    assert (fault(memory).phase, fault(memory).module, fault(memory).given) == ("train", "layers.2.down", FINITE)
    assert fault(memory).step == 13


@first_by_default("scales", [False, True])
def test_a_training_step_has_the_number_that_its_gradients_have(memory: Memory, scales: bool) -> None:
    loop = Loop(scales=scales)
    guarded(loop.model, memory)
    for _ in range(39):
        loop.step(batches=2)
    spoil(loop.model, "weight")
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop.step(batches=2)
    of_gradients = [said for said in memory.said if isinstance(said, GradientFault)][-1]
    assert (fault(memory).phase, fault(memory).step, of_gradients.step) == ("train", 40, 40)


def test_the_micro_batches_of_a_training_step_count_as_one_step(memory: Memory) -> None:
    loop = Loop()
    guarded(loop.model, memory)
    loop.step()
    for _ in range(5):
        loop.step(batches=3)
    assert report(memory) == GuardedSteps("", 6, steps=6)
    spoil(loop.model, "weight")
    loop.step(batches=3)
    assert (report(memory).checked, report(memory).faulty, report(memory).steps) == (7, 1, 7)


def test_the_last_report_counts_the_steps_that_were_not_checked(memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory)
    attached = attach(Model(), profiler, guard="log")
    for is_watched in (True, False, False):
        attached.steps.guard.begin(memory, "decode", is_watched=is_watched)
        attached.steps.guard.end(memory)
    memory.said.clear()
    attached.detach()
    del attached
    gc.collect()
    assert report(memory) == GuardedSteps("", 1, steps=3)


def test_gradients_that_a_scaler_lets_overflow_are_no_fault(memory: Memory) -> None:
    loop = Loop(scales=True)
    guarded(loop.model, memory)
    scales = []
    for _ in range(30):
        loop.step()
        scales.append(loop.scaler.get_scale())
    assert any(after < before for before, after in pairwise(scales))
    assert report(memory).checked > 20
    assert report(memory).faulty == 0


def test_the_hosts_exception_has_no_frame_of_the_guard(memory: Memory) -> None:
    class Broken(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ValueError("broken")

    def frames() -> list[str]:
        try:
            model(IDS)
        except ValueError as error:
            return [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        return []

    model = Model()
    model.layers[1].up = Broken()
    bare = frames()
    guarded(model, memory)
    assert frames() == bare
    assert len(bare) > 3
    assert not guarded_here().open


def test_the_hosts_modes_and_random_numbers_do_not_notice_the_guard(memory: Memory) -> None:
    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    model = Model()
    with Counting() as bare:
        model(IDS)
    guarded(model, memory)
    state = torch.random.get_rng_state()
    with Counting() as watched:
        model(IDS)
    model(IDS)
    assert watched.names == bare.names
    assert torch.equal(torch.random.get_rng_state(), state)
    assert report(memory).checked >= 1


@pytest.mark.slow  # loads functorch
def test_a_transform_of_functorch_is_left_alone(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    guarded(model, memory)
    vmapped = torch.vmap(lambda one: model(one))(IDS[:, None])
    assert torch.allclose(vmapped[:, 0], model(IDS))
    assert not caplog.text


def test_an_error_of_the_guard_ends_it_and_the_host_goes_on(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    bare = model(IDS)
    attached = guarded(model, memory)
    model(IDS)

    def fails(*_: object) -> None:
        raise RuntimeError("planted in the guard")

    monkeypatch.setattr("cbtop.profiler.instrument.guard_flags.StepFlags.begin", fails)
    for _ in range(3):
        assert torch.equal(model(IDS), bare)
    assert "the guard has ended: RuntimeError: planted in the guard" in caplog.text
    attached.detach()
    assert torch.equal(model(IDS), bare)


def test_a_detached_model_is_called_as_before(memory: Memory) -> None:
    model = Model()
    attached = guarded(model, memory)
    model(IDS)
    there: Guard = attached.steps.guard
    attached.detach()
    spoil(model, "weight")
    model(IDS)
    assert report(memory).faulty == 0
    assert not there._calls


def test_a_module_that_the_host_replaces_is_guarded(memory: Memory) -> None:
    model = Model()
    guarded(model, memory)
    model(IDS)
    model.layers[1].up = nn.Linear(WIDTH, 64)
    with torch.no_grad():
        model.layers[1].up.bias[0] = math.nan
        for _ in range(20):  # The guard checks the model in only one of eight recorded steps.
            model(IDS)
    assert fault(memory).module in ("layers.1.up", "layers.1.act")


PROGRAM = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.profiler.instrument.test_guard import IDS, Model, spoil
model = Model()
for step in range(40):
    if step == 20:
        spoil(model, "weight")
    model(IDS)
print("done")
"""


@pytest.mark.slow
def test_a_run_that_the_guard_stops_ends_with_exit_code_4(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*CBTOP, "run", "--quiet", "--overhead", "100%", "--guard=stop", "--", sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (4, "")
    lines = [line for line in ran.stderr.splitlines() if line.startswith("cbtop:")]
    assert lines == [
        "cbtop: the output of layers.2.down (DownProjection down in layer 2) is NaN in step 21 of forward; its input "
        "was finite; its weight is not finite"
    ]
