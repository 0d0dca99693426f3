"""Tests of models on a fake CUDA device: torch computes on the CPU, and time stamps go to a fake driver."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.stamp_clock import StampClock
from cbtop.profiler.instrument import attach, eager_stamps, trouble, uninstall, work
from cbtop.profiler.instrument import attachment as attachment_module
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.device.fake_driver import FakeDriver
from tests.profiler.instrument.tiny import model_of, torch, words
from tests.profiler.memory import Memory

pytestmark = pytest.mark.usefixtures("without_gradients")
STREAM = 7
UNTIL_THERE, LAUNCHES = "torch on cuda: until the device got there", "torch on cuda: launches"


class Machine:
    """A fake CUDA device, and the models that pretend to be on it."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.there: list[Any] = []
        self.stream: int | None = STREAM

    def clock(self) -> StampClock:
        return StampClock(lambda: self.stream, self.driver, self.driver.now_ns, measures_cost=True, index=0)

    def device_of(self, *modules: Any) -> str:
        there = {id(part) for model in self.there for part in model.modules()}
        return "cuda" if any([id(module) in there for module in modules]) else "cpu"

    def model(self, kind: str = "llama") -> Any:
        model = model_of(kind)
        self.there.append(model)
        return model


@pytest.fixture
def machine(stamping: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(work, "device_of", machine.device_of)
    monkeypatch.setattr(eager_stamps, "_kinds_of_devices", lambda model: {machine.device_of(model)})
    monkeypatch.setattr(eager_stamps, "_only_cuda_device", lambda model: 0)
    state_of = attachment_module.state_of
    monkeypatch.setattr(attachment_module, "state_of", lambda root: [machine.device_of(root), *state_of(root)])
    monkeypatch.setattr(eager_stamps, "torch_clock", machine.clock)
    monkeypatch.setattr(eager_stamps, "_said", set())
    monkeypatch.setattr(trouble, "_said", {})
    for name, value in (("current_device", 0), ("is_current_stream_capturing", False), ("_is_in_bad_fork", False)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    yield machine
    uninstall()


def _profiler(machine: Machine, memory: Memory, **more: Any) -> BrickProfiler:
    return BrickProfiler(recorder=memory, clock_ns=machine.driver.now_ns, **more)


def _bricks(memory: Memory) -> dict[int, Node]:
    return {node.id: node for node in memory.said if isinstance(node, Node) and node.kind is NodeKind.BRICK}


def _recorded(memory: Memory) -> list[Node]:
    """Return the brick of each record of a brick, in the order of the records."""
    bricks = _bricks(memory)
    return [bricks[tag & 0xFFFFFF] for tag, *_ in memory.records if tag & 0xFFFFFF in bricks]


def test_models_on_the_device_are_stamped_and_models_on_the_cpu_never_are(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    on_cpu, on_cuda = model_of("llama"), machine.model("gpt2")
    attach(on_cpu, profiler)
    attach(on_cuda, profiler)
    launched = machine.driver.launched
    on_cpu(words(1, 5))
    assert machine.driver.launched == launched
    assert {node.backend for node in _recorded(memory)} == {"torch"}
    memory.records.clear()
    on_cuda(words(1, 5))
    assert machine.driver.launched > launched
    assert not memory.records
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    assert {node.backend for node in _recorded(memory)} == {UNTIL_THERE}


def test_functions_and_sampling_in_generate_are_stamped_too(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model, inputs = machine.model(), words(2, 7)
    expected = model.generate(inputs, max_new_tokens=3, do_sample=False)
    attach(model, profiler)
    assert torch.equal(model.generate(inputs, max_new_tokens=3, do_sample=False), expected)
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    found = {node.name: node.backend for node in _recorded(memory)}
    for name in ("RopeEmbedding", "Attention (fused)", "KvWrite", "Sampling", "QkvProjection"):
        assert found[f"{name}, launch-bound"] == UNTIL_THERE
    steps = [node.name for node in memory.said if isinstance(node, Node) and node.kind is NodeKind.STEP]
    assert steps == ["prefill", "decode"]
    assert not [tag for tag, *_ in memory.records if tag & 0xFFFFFF == NO_NODE]


def test_where_the_device_is_behind_rates_are_made_of_the_times(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model = machine.model()
    attach(model, profiler)
    model(words(1, 5))
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    memory.records.clear()
    machine.driver.work(STREAM, 50_000_000)  # The device is still busy with work of an earlier step.
    model(words(1, 5))
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    bricks = _recorded(memory)
    assert {node.backend for node in bricks} == {"torch on cuda"}
    assert all(node.work.flops_per_element for node in bricks if node.name == "QkvProjection")
    manifests = [said.backend for said in memory.said if isinstance(said, Manifest)]
    assert manifests == ["torch on cuda"]


def test_a_step_that_is_not_sampled_launches_nothing(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory, sample_every=4)
    model = machine.model()
    attach(model, profiler)
    model(words(1, 5))
    launched = machine.driver.launched
    for _ in range(3):
        model(words(1, 5))
    assert machine.driver.launched == launched
    model(words(1, 5))
    assert machine.driver.launched > launched


def test_a_failed_launch_is_one_line_and_the_host_times_the_model_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model, inputs = machine.model(), words(1, 5)
    expected = model(inputs).logits
    attach(model, profiler)
    model(inputs)
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    good, launches = machine.driver.launch, 0

    def fails_later(kernel: int, stream: int, arguments: int) -> None:
        nonlocal launches
        launches += stream == STREAM
        if launches > 20:
            raise DriverError("CUDA_ERROR_LAUNCH_FAILED")
        good(kernel, stream, arguments)

    monkeypatch.setattr(machine.driver, "launch", fails_later)
    memory.records.clear()
    assert torch.equal(model(inputs).logits, expected)
    assert torch.equal(model(inputs).logits, expected)
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    assert profiler.recording
    assert {node.backend for node in _recorded(memory)} == {LAUNCHES}
    assert all(node.work.flops_per_element is None for node in _recorded(memory))
    manifests = [said.backend for said in memory.said if isinstance(said, Manifest)]
    assert manifests == ["torch on cuda", LAUNCHES]
    said = [line for line in caplog.messages if "launches" in line]
    assert len(said) == 1
    assert "CUDA_ERROR_LAUNCH_FAILED" in said[0]


def test_where_no_clock_can_be_made_the_host_times_the_model(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory() -> StampClock:
        raise DriverError("cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(eager_stamps, "torch_clock", no_memory)
    memory = Memory()
    profiler = _profiler(machine, memory)
    for model in (machine.model(), machine.model("gpt2")):
        attach(model, profiler)
        model(words(1, 5))
    assert {node.backend for node in _recorded(memory)} == {LAUNCHES}
    assert len([line for line in caplog.messages if "CUDA_ERROR_OUT_OF_MEMORY" in line]) == 1


def test_after_detach_nothing_is_left_on_the_device(machine: Machine) -> None:
    profiler = _profiler(machine, Memory())
    models = [machine.model(), machine.model("gpt2")]
    attachments = [attach(model, profiler) for model in models]
    for model in models:
        model(words(1, 5))
    attachments[0].detach()
    models[1](words(1, 5))
    assert machine.driver.left
    machine.driver.pass_time(100_000_000)
    clock = weakref.ref(attachments[1].timing.path.clock)  # type: ignore[attr-defined]  # a DevicePath's
    attachments[1].detach()
    assert not machine.driver.left
    gc.collect()
    assert clock() is None
    launched = machine.driver.launched
    for model in models:
        model(words(1, 5))
    assert machine.driver.launched == launched


def test_a_model_that_is_attached_again_keeps_its_nodes(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model = machine.model()
    known: list[int] = []
    for _ in range(3):
        attachment = attach(model, profiler)
        model(words(1, 5))
        machine.driver.pass_time(100_000_000)
        profiler.finalize()
        known.append(len(memory.nodes))
        attachment.detach()
    assert known[0] == known[1] == known[2]


def test_a_model_that_the_host_drops_is_gone(machine: Machine) -> None:
    profiler = _profiler(machine, Memory())
    model = machine.model()
    attach(model, profiler)
    model(words(1, 5))
    gone = weakref.ref(model)
    machine.there.clear()
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_is_moved_to_the_device_is_stamped_from_then_on(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model = model_of("llama")
    attachment = attach(model, profiler)
    model(words(1, 5))
    machine.there.append(model)
    for _ in range(9):
        model(words(1, 5))
    assert attachment.timing.is_there
    launched = machine.driver.launched
    model(words(1, 5))
    assert machine.driver.launched > launched


def test_a_model_called_while_its_stream_is_captured_enqueues_no_stamp(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model = machine.model()
    attach(model, profiler)
    model(words(1, 5))
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    memory.records.clear()
    launched, machine.stream = machine.driver.launched, None
    model(words(1, 5))
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    assert machine.driver.launched == launched
    assert not memory.records


def test_a_given_clock_is_used_and_not_closed(machine: Machine) -> None:
    memory, clock = Memory(), machine.clock()
    profiler = _profiler(machine, memory, device_clock=clock)
    model, on_cpu = machine.model(), model_of("gpt2")
    attachment = attach(model, profiler)
    attach(on_cpu, profiler)
    with profiler.brick("own"):
        model(words(1, 5))
    on_cpu(words(1, 5))
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    assert {node.backend for node in _recorded(memory)} == {UNTIL_THERE, "torch", ""}
    attachment.detach()
    clock.mark()
    assert machine.driver.left


@pytest.mark.parametrize("make", [BrickProfiler, lambda **more: GovernedProfiler(1.0, recorder=more["recorder"])])
def test_bricks_and_gaps_add_up_to_each_step_whoever_chooses_the_steps(
    machine: Machine, make: Callable[..., BrickProfiler]
) -> None:
    memory = Memory()
    profiler = make(recorder=memory)
    model = machine.model()
    attach(model, profiler)
    for _ in range(6):
        model(words(1, 5))
        machine.driver.pass_time(10_000_000)
    machine.driver.pass_time(100_000_000)
    profiler.finalize()
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    inside: list[tuple[int, int]] = []
    steps = 0
    for tag, start, end, _ in memory.records:
        node = nodes.get(tag & 0xFFFFFF)
        if node is None or tag & (1 << 27):
            continue
        if node.kind is NodeKind.STEP:
            assert inside
            assert all(start <= begun <= ended <= end for begun, ended in inside)
            inside, steps = [], steps + 1
        else:
            inside.append((start, end))
    assert steps >= 1


def test_a_forked_child_does_nothing(machine: Machine) -> None:
    memory = Memory()
    profiler = _profiler(machine, memory)
    model = machine.model()
    attach(model, profiler)
    model(words(1, 5))
    launched = machine.driver.launched
    child = os.fork()
    if child == 0:
        torch.cuda._is_in_bad_fork = lambda: True
        torch.set_num_threads(1)
        model(words(1, 5))
        profiler.finalize()
        os._exit(machine.driver.launched != launched)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
