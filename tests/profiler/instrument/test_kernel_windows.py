"""Tests of CUPTI windows with several steps, with a fake CUDA in torch."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device import kernel_burst  # noqa: E402
from cbtop.profiler.instrument import kernel_bursts, kernel_steps, kernel_windows  # noqa: E402
from cbtop.profiler.instrument.attachment import attach  # noqa: E402
from cbtop.profiler.instrument.kernel_windows import WindowRecording  # noqa: E402
from cbtop.profiler.instrument.model_call import ModelCall  # noqa: E402
from cbtop.profiler.instrument.open_step import unit  # noqa: E402
from cbtop.protocol import clock  # noqa: E402
from cbtop.protocol.attributes import Work  # noqa: E402
from tests.profiler.device.fake_cupti import FakeCupti  # noqa: E402
from tests.profiler.instrument import test_captured_graphs as played  # noqa: E402
from tests.profiler.instrument import test_kernel_bursts as bursts  # noqa: E402
from tests.profiler.instrument.test_kernel_steps import LAYERS, Host, world  # noqa: E402, F401


@pytest.fixture
def windows(world: bursts.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WindowRecording]]:  # noqa: F811
    """All windows that the program of a test opens. After the first one, each may have four steps."""
    found: list[WindowRecording] = []
    original = WindowRecording.__init__

    def opened(self: WindowRecording, *args: Any) -> None:
        original(self, *args)
        found.append(self)

    monkeypatch.setattr(WindowRecording, "__init__", opened)
    monkeypatch.setattr(kernel_steps, "steps_for", lambda steps, fixed_ns, missing: 4)
    monkeypatch.setattr(kernel_windows, "MOST_OPEN_NS", 60_000_000_000)
    monkeypatch.setattr(kernel_windows, "LEAST_WAIT_NS", 60_000_000_000)
    monkeypatch.setattr(kernel_windows, "MOST_WAIT_NS", 60_000_000_000)
    kernel_bursts.replaying.clear()
    yield found
    kernel_bursts.replaying.clear()
    for window in found:
        window.close()


def until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def open_one(host: Host, windows: list[WindowRecording]) -> WindowRecording:
    """Call the model until a window is open between two of its steps. Returns the window."""
    for _ in range(2_000):
        host.call(1)
        if windows and windows[-1].is_between:
            return windows[-1]
    raise AssertionError("no window with several steps in 2,000 steps")


def test_a_window_records_several_steps_in_a_row(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    host.call_until(lambda: len(windows) > 2 and not windows[2].window.is_on)
    assert [len(one.steps) for one in windows[:3]] == [1, 4, 4]
    steps = host.steps()
    assert len(steps) >= 9
    assert all([name for name, _, _ in step].count("RmsNorm") == LAYERS for step in steps)
    assert len({tuple(step[:-1]) for step in steps}) == 1
    assert world.finalized >= 3


def test_the_steps_of_a_window_do_not_overlap(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    host.call_until(lambda: len(windows) > 2 and not windows[2].window.is_on)
    nodes = host.step_nodes()
    spans = [(start_ns, end_ns) for tag, start_ns, end_ns, _ in host.memory.records if tag & 0xFFFF in nodes]
    recorded = sorted(spans)[5:9]  # the third window, because each step is as long as a plain step of its window
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(recorded))


def test_each_step_of_a_window_has_its_own_tokens_and_elements(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    window.most = len(window.steps) + 2
    recorded = len(host.steps())
    for tokens in (3, 5):
        host.model(torch.ones(2, tokens, dtype=torch.long))
    assert not window.window.is_on
    steps = host.steps()[recorded:][-2:]
    assert [step[-1][2] for step in steps] == [6, 10]
    assert [{elements for name, _, elements in step if name == "RmsNorm"} for step in steps] == [{6}, {10}]


def test_kernels_between_two_steps_are_in_no_step(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    world.eager(1_000_000)
    host.call(3)
    assert not window.window.is_on
    assert {step.busy_ns for step in window.steps} == {window.steps[0].busy_ns}
    assert window.results.unplaced == 0


def test_a_window_that_no_step_follows_is_closed_soon(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_windows, "LEAST_WAIT_NS", 1_000_000)
    monkeypatch.setattr(kernel_windows, "MOST_WAIT_NS", 1_000_000)
    host = Host(world)
    window = open_one(host, windows)
    until(lambda: not kernel_bursts.one_at_a_time.locked())
    assert not window.window.is_on
    assert 1 <= len(window.steps) < 4
    until(lambda: len(host.steps()) >= 2)
    recorded = len(host.steps())
    host.call_until(lambda: len(host.steps()) > recorded)


def test_a_window_is_closed_before_a_graph_is_captured_or_replayed(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    graph = played.captured(host.model)
    open_one(host, windows)
    graph.replay()
    assert not windows[-1].window.is_on
    assert not windows[-1].window.is_left_on
    open_one(host, windows)
    played.captured(host.model)
    assert not windows[-1].window.is_on
    assert not windows[-1].window.is_left_on


def test_a_window_is_closed_before_the_profiler_of_torch_starts(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    is_on = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        is_on.append(window.window.is_on)
    assert is_on == [False]
    assert not kernel_bursts.one_at_a_time.locked()
    host.attachment.detach()
    assert "cbtop" not in torch.autograd.profiler.profile._prepare_trace.__code__.co_filename


def test_other_threads_that_replay_graphs_make_windows_short(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    graph = played.captured(host.model)
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    host.call_until(lambda: len(windows) > 3 and not windows[3].window.is_on)
    assert {len(one.steps) for one in windows[:4]} == {1}


def test_the_first_replay_in_another_thread_closes_the_window(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    graph = played.captured(host.model)
    window = open_one(host, windows)
    thread = threading.Thread(target=graph.replay)
    thread.start()
    thread.join()
    assert not window.window.is_on
    assert not window.window.is_left_on


def test_a_window_that_its_thread_closes_leaves_no_external_id(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    owner = world.owner
    assert isinstance(owner, FakeCupti)
    assert any(owner.stacks.values())
    window.close()
    assert not any(owner.stacks.values())


@pytest.mark.parametrize("in_thread", [False, True])
def test_models_that_take_turns_share_an_open_window(
    in_thread: bool,
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    other = played.model_of(world, LAYERS)
    attach(other, host.profiler)
    window = open_one(host, windows)
    window.most = len(window.steps) + 3
    recorded, governor = len(host.steps()), host.profiler.governor
    tokens = torch.ones(2, 1, dtype=torch.long)

    def call_other() -> None:
        thread = threading.Thread(target=other, args=(tokens,))
        thread.start() if in_thread else other(tokens)
        if in_thread:
            thread.join()

    for _ in range(3):
        call_other()
        assert window.is_between
        host.call(1)
    assert not window.window.is_on
    *_, kind = governor.kinds.values()  # of the other model
    assert kind.counts == [0, 0, 0, 3]  # while the window is open, no step is plain
    steps = host.steps()[recorded:]
    assert [sum(name == "RmsNorm" for name, _, _ in step) for step in steps] == [LAYERS] * len(window.steps)
    call_other()
    assert kind.counts == [1, 0, 0, 3]


def test_steps_of_a_window_may_run_in_different_threads(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    window.most = len(window.steps) + 3
    recorded = len(host.steps())
    for _ in range(2):
        thread = threading.Thread(target=host.call, args=(1,))
        thread.start()
        thread.join()
        assert window.is_between
        world.kernel(5_000)  # in the thread of an earlier step
    host.call(1)
    assert not window.window.is_on
    steps = host.steps()[recorded:]
    assert len({tuple(step[:-1]) for step in steps}) == 1
    assert len(steps) == len(window.steps)
    assert not kernel_bursts.one_at_a_time.locked()


def test_a_step_beside_a_step_of_the_window_is_plain(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    window.most = len(window.steps) + 1
    thread = threading.Thread(target=host.call, args=(1,))
    count = len(window.steps)

    def beside(*_: object) -> None:
        handle.remove()
        thread.start()
        thread.join()

    handle = host.model.layers[0].register_forward_pre_hook(beside)
    host.call(1)
    assert not window.window.is_on
    assert len(window.steps) == count + 1


def test_a_detached_model_leaves_no_window_open(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    host.attachment.detach()
    assert not window.window.is_on
    assert not kernel_bursts.one_at_a_time.locked()


def test_a_forked_child_does_not_touch_an_open_window(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # a real CUDA would be in a bad fork here
        monkeypatch.setattr(kernel_steps, "is_in_bad_fork", lambda: True)
        monkeypatch.setattr(kernel_windows, "is_in_bad_fork", lambda: True)
        before = world.finalized
        host.call(3)
        window.close()
        os.write(writer, b"untouched" if world.finalized == before and window.window.is_on else b"touched")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"untouched"
    host.call(3)
    assert not window.window.is_on


def test_a_module_that_the_host_drops_is_freed(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    open_one(host, windows)
    dropped = weakref.ref(host.model.layers[LAYERS - 1])
    del host.model.layers[LAYERS - 1]
    gc.collect()
    assert dropped() is None
    model = weakref.ref(host.model)
    del host.model
    gc.collect()
    assert model() is None


def test_a_recorded_step_has_the_bricks_of_its_own_autocast_and_adapters(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    before, steps = len(window.steps), host.attachment.steps
    products = [call for call in steps.calls if getattr(call.key, "name", "") == "DownProjection"]
    under_autocast = replace(products[0].key, work=Work(dtype="bfloat16"))

    def follow_mode(autocast: Any, adapters: Any) -> None:
        for call in products:
            call._key = under_autocast

    monkeypatch.setattr(steps, "follow_mode", follow_mode)
    monkeypatch.setattr(steps, "_asked", (torch.bfloat16, None))
    host.call(1)
    bricks = {brick for _, *inside in window.steps[before].elements for brick in inside}
    assert under_autocast in bricks
    assert {brick.work.dtype for brick in bricks if brick.name == "DownProjection"} == {"bfloat16"}


def test_a_child_that_is_forked_in_a_recorded_step_does_not_end_it(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    reader, writer = os.pipe()
    parent = os.getpid()

    def fork(*_: Any) -> None:
        if os.fork():
            os.wait()
        else:  # a real CUDA would be in a bad fork here
            monkeypatch.setattr(kernel_steps, "is_in_bad_fork", lambda: True)
            monkeypatch.setattr(kernel_windows, "is_in_bad_fork", lambda: True)

    hook = host.model.layers[0].register_forward_hook(fork)
    window.most = len(window.steps) + 1
    before = world.finalized
    host.call(1)
    if os.getpid() != parent:
        os.write(writer, b"untouched" if world.finalized == before and window.window.is_on else b"touched")
        os._exit(0)
    hook.remove()
    assert os.read(reader, 100) == b"untouched"
    assert not window.window.is_on


def test_a_step_of_a_window_takes_until_its_token_is_chosen(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    monkeypatch.setattr(ModelCall, "waits", True)
    window.most = len(window.steps) + 2
    host.call(1)
    (step,) = unit().open
    time.sleep(0.05)
    step.end_sampling(None, clock.perf_counter_ns())
    recorded = window.steps[-1]
    assert recorded.took_ns >= 50_000_000
    assert recorded.ended_ns - recorded.began_ns <= recorded.took_ns - 50_000_000


class StoppedError(Exception):
    """Raised by the model of a test."""


def test_a_step_that_raises_an_exception_is_not_recorded(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    before = len(window.steps)

    def fail(*_: Any) -> None:
        raise StoppedError

    hook = host.model.layers[1].register_forward_hook(fail)
    with pytest.raises(StoppedError):
        host.call(1)
    hook.remove()
    recorded = len(host.steps())
    host.call(3 - before)
    assert not window.window.is_on
    assert [step.has_failed for step in window.steps] == [False] * before + [True] + [False] * (3 - before)
    steps = host.steps()[recorded:]
    assert len(steps) == 3
    assert all([name for name, _, _ in step].count("RmsNorm") == LAYERS for step in steps)


def test_a_window_whose_steps_all_raise_is_paid_for(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    for step in window.steps:
        step.has_failed = True
    monkeypatch.setattr(kernel_steps, "MOST_PAUSE_NS", 60_000_000_000)
    window.close()
    cost_ns = window.opened_ns - window.begun_ns  # closing takes some time, too
    by_kernels = host.attachment.steps.kernel_steps
    assert by_kernels is not None
    assert by_kernels._due_ns > window.closing_ns + 9 * cost_ns


INTERRUPTED = {  # where a signal handler raises -> the object and the method that it interrupts
    "opening": (kernel_bursts, "enter_here"),
    "the begin of a step": (WindowRecording, "begin_step"),
    "noting the calls": (kernel_steps, "PlacedCalls"),
    "the end of a step": (WindowRecording, "_wait_for_step"),
    "before the end of a step": (WindowRecording, "end_step"),
    "closing": (kernel_windows.KernelRecording, "end_step"),
    "waiting for the device": (bursts.World, "is_done"),
    "reading the records": (kernel_windows.KernelWindow, "_read"),
    "recording the steps": (kernel_steps.KernelSteps, "_count"),
}


@pytest.mark.parametrize("interrupted", INTERRUPTED)
def test_after_an_interrupt_no_window_stays_open_and_the_next_is_recorded(
    interrupted: str,
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    host.call_until(lambda: len(windows) > 1)
    where, name = INTERRUPTED[interrupted]
    original = getattr(where, name)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(where, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        host.call(200)
    window = windows[-1]
    host.call(5)
    assert not window.window.is_on
    count, recorded = len(windows), len(host.steps())
    host.call_until(lambda: len(windows) > count + 1 and len(host.steps()) > recorded + 2)
    assert world.owner is None or windows[-1].window.is_on
    assert host.attachment.is_attached


def test_a_step_that_waits_for_the_closing_thread_opens_no_window(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    is_closing = threading.Event()
    read = kernel_windows.KernelWindow._read

    def slow(*args: Any) -> Any:
        is_closing.set()
        time.sleep(0.2)
        return read(*args)

    monkeypatch.setattr(kernel_windows.KernelWindow, "_read", slow)
    thread = threading.Thread(target=window.close)
    thread.start()
    assert is_closing.wait(20)
    host.call(1)
    thread.join()
    assert not window.window.is_on
    assert windows[-1] is window
    by_kernels = host.attachment.steps.kernel_steps
    assert by_kernels is not None
    assert by_kernels.times_host  # The host's times are measured later, half-way to the next window.


def test_lost_records_of_several_steps_do_not_end_the_recording(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    recorded = len(host.steps())
    records = 2 * (3 * LAYERS + 1)  # of one step
    monkeypatch.setattr(kernel_burst, "MAX_RECORDS", 3 * records // 2)
    host.call(3)
    assert not window.window.is_on
    assert len(host.steps()) == recorded
    host.call_until(lambda: len(host.steps()) > recorded + 2)
    following = windows[windows.index(window) + 1 :][:3]
    assert {len(one.steps) for one in following} == {1}


def test_a_window_that_is_open_for_long_gets_no_more_steps(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    monkeypatch.setattr(kernel_windows, "MOST_OPEN_NS", 1)
    host.call(1)
    assert not window.window.is_on


def test_without_a_thread_to_close_it_a_window_has_a_single_step(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kernel_windows._thread, "start_new_thread", refuse)
    host = Host(world)
    host.call_until(lambda: len(windows) > 3 and not windows[3].window.is_on)
    assert {len(one.steps) for one in windows[:4]} == {1}
    assert host.attachment.is_attached


def test_an_error_in_the_closing_thread_is_logged_and_stamps_time_the_model(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("played")

    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    host = Host(world)
    window = open_one(host, windows)
    monkeypatch.setattr(kernel_steps.KernelSteps, "_count", fail)
    window._due_ns = 0
    kernel_windows._thread.start_new_thread(window._close_late, ())
    until(lambda: not host.profiler.parts.by_kernels)
    until(lambda: any("ValueError: played" in record.getMessage() for record in caplog.records))
    host.call(1)
    assert host.attachment.is_attached
    assert not raised


def test_another_thread_closes_a_window_on_the_device_of_the_window(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[tuple[int, bool]] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append((index, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    host = Host(world)
    window = open_one(host, windows)
    window._device = 3
    thread = threading.Thread(target=window.close)
    thread.start()
    thread.join()
    assert entered == [(3, True)]


def test_a_plain_step_that_raises_leaves_the_model_attached(world: bursts.World) -> None:  # noqa: F811
    host = Host(world)
    host.call(40)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = host.model.layers[1].register_forward_hook(interrupt)
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            host.call(1)
    hook.remove()
    assert host.attachment.is_attached


def test_a_signal_handler_cannot_close_a_window_that_is_being_closed(
    world: bursts.World,  # noqa: F811
    windows: list[WindowRecording],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(world)
    window = open_one(host, windows)
    monkeypatch.setattr(world, "is_done", lambda stream: window.abandon() is None)  # A handler calls the model.
    host.call(3)
    assert not window.window.is_on
    assert not kernel_bursts.one_at_a_time.locked()
    assert host.attachment.is_attached
