"""What a model's call does in C is what it does in Python: the same records, and the same in the governor."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import attach, phases, uninstall
from cbtop.profiler.instrument.call_attribute import put, standing
from cbtop.profiler.instrument.governor import GovernedProfiler, Governor
from cbtop.profiler.instrument.model_call import ModelCall
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import Recorder, RingRecorder
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.ring_reader import RingReader
from tests.profiler.instrument.tiny import torch
from tests.profiler.memory import Memory

nn = torch.nn
pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen"),
]


class Governed(GovernedProfiler):
    """One with a clock that ticks, of whose steps about one in `every` is recorded."""

    def __init__(self, recorder: Recorder, every: int) -> None:
        self.governor = Governor(1, self.announce)
        self.governor.floor = 0
        BrickProfiler.__init__(self, clock_ns=count(0, 10).__next__, sample_every=4, recorder=recorder)
        self._steps.governor, self._steps.is_sampled = self.governor, self.governor.is_sampled
        self.governor.every = every
        self.governor._look_at_step = 1 << 40


class Layer(nn.Module):
    """One of a stack; does what its host wants meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Any, do: Callable[[], None]) -> Any:
        do()
        return self.norm(x)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Any, do: Callable[[], None]) -> Any:
        for layer in self.layers:
            x, do = layer(x, do), _nothing
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(
        self,
        input_ids: Any = None,
        past_key_values: Any = None,
        do: Callable[[], None] | None = None,
        start_pos: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        return self.body(torch.ones(1, 4), do or _nothing)


def _nothing() -> None:
    pass


class Kept:
    """A layer of a cache."""

    def __init__(self, held: Any) -> None:
        self.is_initialized = held is not None
        self.keys = torch.ones(1, 1, held if isinstance(held, int) else 1, 1)
        self._held = held

    def get_seq_length(self) -> Any:
        if self._held == "odd":
            raise RuntimeError("of the host's cache")
        return self._held


class Cache:
    """A cache of transformers, as far as it is asked."""

    def __init__(self, held: Any) -> None:
        self.layers = [Kept(held)]

    def get_seq_length(self) -> Any:
        return self.layers[0].get_seq_length()


class Own(torch.Tensor):  # type: ignore[name-defined, misc]
    """A tensor of the host's own kind, which is told who asks."""


TENSORS = {
    "one": lambda: torch.ones(1, 1, dtype=torch.long),
    "several": lambda: torch.ones(2, 3, dtype=torch.long),
    "embedded": lambda: torch.ones(1, 5, 4),
    "picture": lambda: torch.ones(1, 3, 4, 4),
    "row": lambda: torch.ones(7, dtype=torch.long),
    "number": lambda: torch.tensor(3),
    "none": lambda: torch.ones(0, 1, dtype=torch.long),
    "own": lambda: torch.ones(1, 2).as_subclass(Own),
}
CACHES: dict[str, Callable[[], Any]] = {
    "without": lambda: None,
    "fresh": lambda: Cache(None),
    "empty": lambda: Cache(0),
    "used": lambda: Cache(9),
    "tuple": lambda: ((torch.ones(1, 1, 6, 1),),),
    "unknown": object,
    "tensor": lambda: Cache(torch.tensor(5)),
}
HOW = ("by position", "by name", "embedded by name", "where it stands", "as a mapping", "with more")
DOES = (
    "raise", "interrupt", "brick", "step", "again", "another", "in a thread", "cancel", "switch off", "switch on",
    "ask for a burst", "record all",
)  # fmt: skip
USUAL = st.just(("one", "used", "by name", "nothing"))  # which C does, where Python has begun the first ones
CALLS = st.one_of(
    USUAL,
    USUAL,
    st.tuples(st.sampled_from(sorted(TENSORS)), st.just("used"), st.just("by name"), st.just("nothing")),
    st.tuples(st.just("one"), st.sampled_from(sorted(CACHES)), st.just("by name"), st.just("nothing")),
    st.tuples(st.just("one"), st.just("used"), st.sampled_from(HOW), st.just("nothing")),
    st.tuples(st.just("one"), st.just("used"), st.just("by name"), st.sampled_from(DOES)),
)


class Host:
    """Calls two models, and does in their calls what else a host does."""

    def __init__(self, recorder: Recorder, every: int, *, in_python: bool) -> None:
        self.said: list[str] = []
        self.governor: Governor | None = None
        if every > 1:
            self.profiler: BrickProfiler = Governed(recorder, every)
            self.governor = self.profiler._steps.governor
        else:
            self.profiler = BrickProfiler(clock_ns=count(0, 10).__next__, recorder=recorder)
        torch.manual_seed(1)
        self.models = [Model(), Model()]
        self._attached = [attach(model, self.profiler) for model in self.models]
        if in_python:
            for model in self.models:
                _call_in_python(model)

    def call(self, tensor: str, cache: str, how: str, does: str) -> None:
        try:
            self._call(self.models[0], tensor, cache, how, functools.partial(self._do, does))
        except (ValueError, KeyboardInterrupt) as error:
            self.said.append(repr(error))
        position = self.profiler._path.position
        scope, open_ = position.scope.node, position.unit and len(position.unit.open)
        self.said.append(f"{position.step} {position.recording} {position.lane} {scope} {open_}")

    def _call(self, model: Any, tensor: str, cache: str, how: str, do: Callable[[], None]) -> None:
        new, held = TENSORS[tensor](), CACHES[cache]()
        if how == "by position":
            model(new, held, do)
        elif how == "embedded by name":
            model(do=do, past_key_values=held, inputs_embeds=new)
        elif how == "where it stands":
            model(new, start_pos=3, do=do)
        elif how == "as a mapping":
            model({"input_ids": new, "past_key_values": held}, do=do)
        elif how == "with more":
            model(new, past_key_values=held, do=do, cu_seq_lens_q=None, cache_params=None, more=[1])
        else:
            model(input_ids=new, past_key_values=held, do=do)

    def _do(self, what: str) -> None:
        profiler = self.profiler
        step: Any = profiler._path.position.step
        if what == "raise":
            raise ValueError("of the host")
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "brick":
            with profiler.brick("of the host"):
                pass
        elif what == "step":
            with profiler.step("mine", tokens=3):
                pass
        elif what in ("again", "another"):
            self._call(self.models[what == "another"], "one", "used", "by name", _nothing)
        elif what == "in a thread":
            thread = threading.Thread(target=self._call_thrice)
            thread.start()
            thread.join()
        elif what == "cancel" and step is not None:
            step.cancel()
        elif what in ("switch off", "switch on"):
            (profiler.disable if what == "switch off" else profiler.enable)()
        elif what == "record all" and self.governor is not None:
            self.governor._begun.clear()
        elif what == "ask for a burst" and isinstance(profiler._recorder, RingRecorder):
            profiler._recorder.asked_word = (7,)

    def _call_thrice(self) -> None:
        """Beside the step that runs: in C from the second one on."""
        for _ in range(3):
            self._call(self.models[1], "one", "used", "by name", _nothing)

    @property
    def known(self) -> Any:
        """What is known of steps, and to the governor, but for times."""
        governor = self.governor
        if governor is None:
            of_models = [(one.steps.looks, len(one.steps.recorded_steps)) for one in self._attached]
            return self.profiler._steps.lanes.free, of_models
        kinds = {
            key: (kind.seen, kind.recent, kind.counts, [sort for sort, _ in kind.waiting], kind.plain_ns is None)
            for key, kind in governor._kinds.items()
        }
        models = {
            name: (model.calls_are_in, model.recorded, len(model.running)) for name, model in governor._models.items()
        }
        return kinds, models, governor._begun, governor._seen, governor._recorded, len(governor._own)


def _call_in_python(model: Any) -> None:
    for module in model.modules():
        there = standing(module)
        if type(there) is ModelCall:
            put(module, functools.partial(ModelCall.__call__, there))


def _ran(calls: list[tuple[str, str, str, str]], every: int, *, in_python: bool, ring: bool) -> Any:
    """What is said and recorded of these calls, where one step in `every` is recorded."""
    with tempfile.TemporaryDirectory() as directory:
        recorder: Any = RingRecorder(Path(directory)) if ring else Memory()
        host = Host(recorder, every, in_python=in_python)
        for call in calls:
            host.call(*call)
        host.profiler.enable()
        known, records = host.known, None
        if ring:
            files = list(Path(directory).glob("*.ring"))
            if files:
                reader = RingReader(files[0])
                batch = reader.read()
                columns = (batch.node, batch.flags, batch.start_ns, batch.end_ns, batch.elements)
                records = [column.tolist() for column in columns]
                reader.close()
        else:
            records = [recorder.records, recorder.nodes]
        host.profiler.close()
        uninstall()
    return host.said, known, records


@given(st.lists(CALLS, max_size=12), st.sampled_from([1, 2, 5, 10_000]), st.booleans())
def test_any_calls_of_models_leave_in_c_what_they_leave_in_python(
    calls: list[tuple[str, str, str, str]], every: int, ring: bool
) -> None:
    first = [("one", "used", "by name", "nothing")] * 3  # the next is as usual
    in_python, in_c = (_ran([*first, *calls], every, in_python=python, ring=ring) for python in (True, False))
    assert in_c == in_python


@pytest.mark.parametrize("in_python", [False, True], ids=["in C", "in Python"])
def test_a_plain_call_of_a_model_is_shown_with_its_tokens_while_it_runs(in_python: bool, runtime: Path) -> None:
    recorder = RingRecorder(runtime)
    host = Host(recorder, 10_000, in_python=in_python)
    found: list[tuple[int, int]] = []

    def look(module: Any, arguments: Any) -> None:
        (ring,) = runtime.glob("*.ring")
        reader = RingReader(ring)
        found.extend((flight.node, flight.size) for flight in reader.in_flight())
        reader.close()

    for _ in range(3):
        host.call("one", "used", "by name", "nothing")
    model = host.models[0]
    (part, *_) = [module for module in model.modules() if module is not model]
    handle = part.register_forward_pre_hook(look)
    for _ in range(4):
        host.call("one", "used", "by name", "nothing")
    handle.remove()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert min(found[0]) > 0
    (ring,) = runtime.glob("*.ring")
    assert RingReader(ring).in_flight() == []


@pytest.mark.parametrize("every", [10_000, 1], ids=["plain", "recorded"])
def test_what_is_compared_is_c_and_python(every: int, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0
    described = ModelCall.describe

    def describe(*args: Any) -> Any:
        nonlocal ran
        ran += 1
        return described(*args)

    monkeypatch.setattr(ModelCall, "describe", describe)
    for in_python, wanted in ((False, 2), (True, 7)):  # the first two are recorded, and swap calls in and out
        host = Host(Memory(), every, in_python=in_python)
        ran = 0
        for _ in range(7):
            host.call("one", "used", "by name", "nothing")
        uninstall()
        assert ran <= wanted if not in_python else ran == wanted


class Nameless(Body):
    """A model without an argument of a known name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(1))

    def forward(self, x: Any, y: Any = None) -> Any:
        return super().forward(torch.ones(1, 4), _nothing)


NAMELESS = {
    "a picture": torch.ones(2, 3, 4, 4),
    "a sequence of vectors": torch.ones(2, 3, 4),
    "rows": torch.ones(5, 4),
    "ids": torch.ones(2, 7, dtype=torch.long),
    "short ids": torch.ones(2, 7, dtype=torch.int32),
    "a row of ids": torch.ones(7, dtype=torch.long),
    "a mask": torch.ones(2, 7, dtype=torch.bool),
    "bytes": torch.ones(2, 7, dtype=torch.uint8),
    "complex numbers": torch.ones(2, 7, dtype=torch.complex64),
    "a number": torch.tensor(3),
}


@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
@pytest.mark.parametrize("what", NAMELESS)
def test_a_call_without_known_names_is_described_in_c_too(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, ran, memory = NAMELESS[what], [], Memory()
    described = ModelCall.describe
    monkeypatch.setattr(ModelCall, "describe", lambda *args: ran.append(args) or described(*args))
    model = Nameless()
    with contextlib.closing(BrickProfiler(recorder=memory)) as profiler:
        attach(model, profiler)
        for _ in range(6):
            model(argument)
    names = {node.id: node.name for node in memory.said if isinstance(node, Node)}
    found = [
        tokens
        for tag, _, _, tokens in memory.records
        if names.get(tag & 0xFFFF) == "forward" and not tag & FLAG_AMOUNTS
    ]
    assert found == [phases.describe((argument,), {}, has_cache=False).tokens] * 6
    assert 1 <= len(ran) <= 3  # the first ones
