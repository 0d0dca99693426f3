"""Tests of samplers (of devices). Samplers run only while there are listeners, each in its own thread.

A sampler that hangs or fails does not block other samplers.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from cbtop.daemon.devices import sampling
from cbtop.daemon.devices.sampling import NewestSamples
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample
from cbtop.protocol.vocabulary import DeviceKind
from tests.integration.hosts import eventually


class Quick:
    """A sampler that answers at once and counts its calls."""

    name = "quick"
    asked: ClassVar[list[frozenset[int]]] = []
    closed: ClassVar[list[bool]] = []

    def sample(self, pids: Collection[int]) -> DeviceSample:
        self.asked.append(frozenset(pids))
        return DeviceSample(self.name, len(self.asked))

    def close(self) -> None:
        self.closed.append(True)


class Hanging(Quick):
    """A sampler that names a process. From its second sample on, the sampler hangs until the test sets `goes_on`."""

    name = "hanging"
    asked: ClassVar[list[frozenset[int]]] = []
    closed: ClassVar[list[bool]] = []
    goes_on = threading.Event()

    def sample(self, pids: Collection[int]) -> DeviceSample:
        if self.asked:
            self.goes_on.wait()
        self.asked.append(frozenset(pids))
        gpu = Device("GPU-0", DeviceKind.GPU, 0, "H100", processes=(DeviceProcess(7),))
        return DeviceSample(self.name, len(self.asked), devices=(gpu,))


class Failing(Quick):
    """A sampler that always fails."""

    name = "failing"
    asked: ClassVar[list[frozenset[int]]] = []
    closed: ClassVar[list[bool]] = []

    def sample(self, pids: Collection[int]) -> DeviceSample:
        self.asked.append(frozenset(pids))
        raise RuntimeError("it is broken")


@contextmanager
def sampled(*samplers: type[Quick]) -> Iterator[NewestSamples]:
    for each in samplers:
        each.asked.clear()
        each.closed.clear()
    Hanging.goes_on.clear()
    made = NewestSamples(samplers, interval_s=0.001)
    try:
        yield made
    finally:
        Hanging.goes_on.set()
        made.close()


def newest(made: NewestSamples, name: str) -> DeviceSample:
    return next(sample for sample in made.latest() if sample.sampler == name)


def test_nothing_is_asked_before_anyone_listens_or_after_everyone_has_left() -> None:
    with sampled(Quick) as made:
        assert made.latest() == made.fresh() == []
        made.listen((1, 2))
        eventually(lambda: len(Quick.asked) > 3)
        assert set(Quick.asked) == {frozenset((1, 2))}
        made.rest()
        assert made.latest() == []
        made.listen((3,))
        eventually(lambda: frozenset((3,)) in Quick.asked)
    assert Quick.closed


def test_a_sample_is_given_as_fresh_once() -> None:
    with sampled(Hanging) as made:
        made.listen(())
        found: list[DeviceSample] = []
        eventually(lambda: found.extend(made.fresh()) or (found and found[-1].devices))
        # At most two samples arrive: one says that the sampler has started, the other is its first answer.
        assert len(found) <= 2
        assert made.fresh() == []
        assert made.latest() == found[-1:]


def test_a_hanging_sampler_keeps_its_values_and_delays_no_other_and_no_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "LEAVE_S", 0.01)
    with sampled(Hanging, Quick, Failing) as made:
        made.listen(())
        eventually(lambda: newest(made, "hanging").devices)
        before = len(Quick.asked)
        made.listen(())
        eventually(lambda: len(Quick.asked) > before + 3 and len(Failing.asked) > 3)
        assert newest(made, "hanging").monotonic_ns == 1
        made.close()
        # The quick sampler is closed by its own thread, which may happen a moment after `close` returns.
        eventually(lambda: Quick.closed == [True])
        assert Hanging.closed == []
    eventually(lambda: Hanging.closed)  # After the driver answers, the sampler's own thread closes it.


def test_before_its_first_answer_it_is_said_that_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hanging, "sample", lambda *_: Hanging.goes_on.wait() and DeviceSample("hanging", 1))
    with sampled(Hanging) as made:
        made.listen(())
        (sample,) = made.fresh()
        assert sample.trouble == "it has not answered yet"


def test_one_that_fails_says_why_and_is_asked_again() -> None:
    with sampled(Failing) as made:
        made.listen(())
        eventually(lambda: len(Failing.asked) > 2)
        assert newest(made, "failing").trouble == "it failed: it is broken"


def test_processes_that_one_finds_are_asked_of_the_others() -> None:
    with sampled(Hanging, Quick) as made:
        made.listen((1,))
        eventually(lambda: newest(made, "hanging").devices)
        made.listen((1,))
        eventually(lambda: frozenset((1, 7)) in Quick.asked)
