"""Tests of the start of instrumentation: it happens once, before the first call of a module.

No caller waits for this start.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

import torch
from torch import nn

from cbtop.profiler import instrument
from cbtop.profiler.instrument import attachment, first_call, trouble
from cbtop.profiler.instrument.awaited import stop_awaiting
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(first_call, "EARLIER", ("no_such_module",))
    compile_before = nn.Module.compile
    yield Memory()
    instrument.uninstall()
    stop_awaiting()
    assert nn.Module._compiled_call_impl is None
    assert nn.Module.compile is compile_before


def await_it(memory: Memory) -> list[str]:
    begun: list[str] = []

    def begin() -> None:
        begun.append(threading.current_thread().name)
        instrument.install(BrickProfiler(recorder=memory))

    first_call.await_first_call(begin)
    return begun


def steps(memory: Memory) -> int:
    names = {message.id for message in memory.said if isinstance(message, Node) and message.kind is NodeKind.STEP}
    return sum(record[0] & 0xFFFF in names and not record[0] & FLAG_AMOUNTS for record in memory.records)


@pytest.mark.parametrize("first", [lambda model: None, lambda model: model.compile(backend="eager")])
def test_the_first_call_of_a_model_is_its_first_step(memory: Memory, first: Callable[[nn.Module], None]) -> None:
    model, x = Model(), torch.ones(1, 4)
    bare = model(x)
    begun = await_it(memory)
    assert not begun
    first(model)
    assert torch.equal(model(x), bare)
    model(x)
    assert len(begun) == 1
    assert steps(memory) == 2


def test_the_first_of_several_threads_begins_and_the_others_do_not_wait(memory: Memory) -> None:
    begun, models = await_it(memory), [Model() for _ in range(8)]
    threads = [threading.Thread(target=model, args=(torch.ones(1, 4),)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1


def test_what_fails_leaves_torch_as_it_was(memory: Memory) -> None:
    # The callback raises an error inside. The error is reported and does not reach the program.
    first_call.await_first_call(lambda: None)
    assert Model()(torch.ones(1, 4)).shape == (1, 4)
    assert nn.Module._compiled_call_impl is None


def test_the_next_call_attaches_if_a_signal_handler_raised_during_the_first(memory: Memory) -> None:
    times: list[None] = []

    def begin() -> None:
        times.append(None)
        if len(times) == 1:
            signal.raise_signal(signal.SIGUSR1)
        instrument.install(BrickProfiler(recorder=memory))

    def deadline(number: int, frame: object) -> None:
        raise TimeoutError("of the host")

    model, x = Model(), torch.ones(1, 4)
    first_call.await_first_call(begin)
    before = signal.signal(signal.SIGUSR1, deadline)
    try:
        with pytest.raises(TimeoutError, match="of the host"):
            model(x)
        model(x)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (len(times), steps(memory)) == (2, 1)


def test_a_model_runs_and_is_reported_if_signal_handlers_cut_attaching_short(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def deadline(number: int, frame: object) -> None:
        raise TimeoutError("of the host")

    def looks(*args: object) -> None:
        # A signal handler of the program raises while cbtop searches the module for a model.
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(attachment, "holds_a_stack", looks)
    monkeypatch.setattr(trouble, "_said", {})
    before = signal.signal(signal.SIGUSR1, deadline)
    try:
        instrument.install(BrickProfiler(recorder=memory))
        model, given = Model(), torch.ones(1, 4)
        for _ in range(attachment.MOST_TRIES):
            with pytest.raises(TimeoutError, match="of the host"):
                model(given)
        assert model(given).shape == (1, 4)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "Model is not shown: the program's signal handlers cut attaching short 3 times" in caplog.text


def test_a_full_stack_is_no_signal_handler(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[object] = []

    def fills(*args: object) -> None:
        calls.append(args)
        raise RecursionError

    monkeypatch.setattr(trouble, "_said", {})
    instrument.install(BrickProfiler(recorder=memory))
    model, given = Model(), torch.ones(1, 4)
    with monkeypatch.context() as full:
        full.setattr(attachment, "_look_at", fills)
        full.setattr(attachment, "log_own_error", fills)  # the stack is so full that the error cannot be handled
        for _ in range(attachment.MOST_TRIES):
            with contextlib.suppress(RecursionError):
                model(given)
    assert len(calls) >= 2 * attachment.MOST_TRIES
    model(given)
    assert attachment.attachments()
    assert not caplog.text


def test_a_model_has_steps_again_after_the_host_deletes_its_call_attribute(memory: Memory) -> None:
    instrument.install(BrickProfiler(recorder=memory))
    model, given = Model(), torch.ones(1, 4)
    expected = model(given)
    model._compiled_call_impl = model._call_impl
    assert torch.equal(model(given), expected)
    del model._compiled_call_impl  # undoes Module.compile

    assert torch.equal(model(given), expected)
    assert torch.equal(model(given), expected)

    assert steps(memory) == 4
