"""Tests of model calls that C handles: their records are the same as with Python.

The governor (which limits overhead) also has the same numbers as with Python.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import attach, generation, phases, runners, uninstall
from cbtop.profiler.instrument.call_attribute import put, standing
from cbtop.profiler.instrument.governor import GovernedProfiler, Governor
from cbtop.profiler.instrument.model_call import ModelCall
from cbtop.profiler.instrument.open_step import unit
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import Recorder, RingRecorder
from cbtop.protocol.clock import perf_counter_ns
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.ring_reader import RingReader
from tests.profiler.instrument.tiny import torch
from tests.profiler.memory import Memory
from tests.representatives import first_by_default

nn = torch.nn
pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen"),
]


class Governed(GovernedProfiler):
    """A profiler with a governor (which limits overhead) that records about one in `every` steps."""

    def __init__(self, recorder: Recorder, every: int, clock_ns: Callable[[], int]) -> None:
        self.governor = Governor(1, self.announce)
        self.governor.floor = 0
        BrickProfiler.__init__(self, clock_ns=clock_ns, sample_every=4, recorder=recorder)
        self._steps.governor, self._steps.is_sampled = self.governor, self.governor.is_sampled
        self.governor.every = every
        self.governor.look_at_step = 1 << 40


class Layer(nn.Module):
    """A layer of a model. In the middle of its forward, the layer does what the test asks for."""

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
    """The attributes of a cache of transformers that cbtop reads."""

    def __init__(self, held: Any) -> None:
        self.layers = [Kept(held)]

    def get_seq_length(self) -> Any:
        return self.layers[0].get_seq_length()


class Own(torch.Tensor):  # type: ignore[name-defined, misc]
    """A tensor class of the program. A tensor of this class sees each function that is called on it."""


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
# The usual kind of call. Python handles the first calls of this kind, and C handles all later ones.
USUAL = st.just(("one", "used", "by name", "nothing"))
CALLS = st.one_of(
    USUAL,
    USUAL,
    st.tuples(st.sampled_from(sorted(TENSORS)), st.just("used"), st.just("by name"), st.just("nothing")),
    st.tuples(st.just("one"), st.sampled_from(sorted(CACHES)), st.just("by name"), st.just("nothing")),
    st.tuples(st.just("one"), st.just("used"), st.sampled_from(HOW), st.just("nothing")),
    st.tuples(st.just("one"), st.just("used"), st.just("by name"), st.sampled_from(DOES)),
)


class Host:
    """A program that calls two models. During the calls, the program also does other things that programs do."""

    def __init__(self, recorder: Recorder, every: int, *, in_python: bool, ticks: bool = True) -> None:
        self.said: list[str] = []
        self.governor: Governor | None = None
        clock_ns = count(0, 10).__next__ if ticks else perf_counter_ns
        if every > 1:
            self.profiler: BrickProfiler = Governed(recorder, every, clock_ns)
            self.governor = self.profiler.parts.steps.governor
        else:
            self.profiler = BrickProfiler(clock_ns=clock_ns, recorder=recorder)
        torch.manual_seed(1)
        self.models = [Model(), Model()]
        self._attached = [attach(model, self.profiler) for model in self.models]
        if in_python:
            for model in self.models:
                _call_in_python(model)

    def call(self, tensor: str, cache: str, how: str, does: str) -> None:
        try:
            self.call_model(self.models[0], tensor, cache, how, functools.partial(self.do, does))
        except (ValueError, KeyboardInterrupt) as error:
            self.said.append(repr(error))
        position = self.profiler.parts.paths.own.position
        scope, open_ = position.scope.node, position.unit and len(position.unit.open)
        self.said.append(f"{position.step} {position.recording} {position.lane} {scope} {open_}")

    def call_model(self, model: Any, tensor: str, cache: str, how: str, do: Callable[[], None]) -> None:
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

    def do(self, what: str) -> None:
        profiler = self.profiler
        step: Any = profiler.parts.paths.own.position.step
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
            self.call_model(self.models[what == "another"], "one", "used", "by name", _nothing)
        elif what == "in a thread":
            thread = threading.Thread(target=self._call_thrice)
            thread.start()
            thread.join()
        elif what == "cancel" and step is not None:
            step.cancel()
        elif what in ("switch off", "switch on"):
            (profiler.disable if what == "switch off" else profiler.enable)()
        elif what == "record all" and self.governor is not None:
            self.governor.begun.clear()
        elif what == "ask for a burst" and isinstance(profiler.parts.recorder, RingRecorder):
            profiler.parts.recorder.asked_word = (7,)
        elif what == "look":
            self.said += _slots_here()

    def _call_thrice(self) -> None:
        """Call the second model during the step of the first. C handles it from its second call on."""
        for _ in range(3):
            self.call_model(self.models[1], "one", "used", "by name", _nothing)

    @property
    def known(self) -> Any:
        """Return what is known about steps and costs, without times."""
        governor = self.governor
        if governor is None:
            of_models = [(one.steps.looks, len(one.steps.recorded_steps)) for one in self._attached]
            return self.profiler.parts.steps.lanes.free, of_models
        kinds = {
            key: (kind.seen, kind.recent, kind.counts, [sort for sort, _ in kind.waiting], kind.plain_ns is None)
            for key, kind in governor.kinds.items()
        }
        models = {
            name: (model.calls_are_in, model.recorded, len(model.running)) for name, model in governor.models.items()
        }
        return kinds, models, governor.begun, governor.seen, governor.recorded, len(governor.own_ns)


def _call_in_python(model: Any) -> None:
    for module in model.modules():
        there = standing(module)
        if type(there) is ModelCall:
            put(module, functools.partial(ModelCall.__call__, there))


def _ran(calls: list[tuple[str, str, str, str]], every: int, *, in_python: bool, ring: bool) -> Any:
    """Run these calls in a new program. Return the messages and records that result.

    One step in `every` is recorded.
    """
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
    # Python handles these three calls. C can handle the call after them.
    first = [("one", "used", "by name", "nothing")] * 3
    in_python, in_c = (_ran([*first, *calls], every, in_python=python, ring=ring) for python in (True, False))
    assert in_c == in_python


@first_by_default("in_python", [False, True], ids=["in C", "in Python"])
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


@first_by_default("every", [10_000, 1], ids=["plain", "recorded"])
def test_what_is_compared_is_c_and_python(every: int, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0
    described = ModelCall.describe

    def describe(*args: Any) -> Any:
        nonlocal ran
        ran += 1
        return described(*args)

    monkeypatch.setattr(ModelCall, "describe", describe)
    # If C code wraps the calls, Python code describes at most the first two of the seven calls.
    for in_python, wanted in ((False, 2), (True, 7)):
        host = Host(Memory(), every, in_python=in_python)
        ran = 0
        for _ in range(7):
            host.call("one", "used", "by name", "nothing")
        uninstall()
        assert ran <= wanted if not in_python else ran == wanted


class Nameless(Body):
    """A model with one argument. cbtop does not know the name of this argument."""

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
@first_by_default("what", NAMELESS, 5)
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
    assert 1 <= len(ran) <= 3  # Python describes at most the first three calls. C handles all later calls.


TIMES = {"_begun_ns", "own_ns", "prepared", "returned_ns", "_start", "_start_ns"}
HIDDEN = {"__weakref__"}


def _slots_here() -> list[str]:
    """Return the open steps of this thread as text, without their times."""
    found = []
    for step in unit().open:
        for thing in (step, step.active, step.generation):
            for name in (name for name in getattr(type(thing), "__slots__", ()) if name not in HIDDEN):
                value = getattr(thing, name, None)
                is_shown = name not in TIMES and isinstance(value, str | int | tuple | dict | None)
                shown = str(value).partition(" object at ")[0] if is_shown else type(value).__name__
                found.append(f"{type(thing).__name__}.{name} {shown}")
    return found


class Token(NamedTuple):
    """One generated token: how the program calls the model for it, and what else the program does, at `when`."""

    is_prepared: bool = True
    tensor: str = "one"
    cache: str = "used"
    when: str = "forward"
    does: str = "nothing"
    chosen: str = "tensor"


CHOSEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "tensor": lambda: (torch.ones(2, 5),),
    "longer": lambda: (torch.ones(1, 9),),
    "own": lambda: (torch.ones(1, 9).as_subclass(Own),),
    "number": lambda: (torch.tensor(3),),
    "none": lambda: (None,),
    "nothing": tuple,
}
WHEN = ("inputs", "forward", "scores", "criteria", "between")
AT_A_TOKEN = (*DOES, "look", "generate", "assist")


def _tokens(**chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[Token]:
    return st.fixed_dictionaries(chosen).map(lambda given: Token(**given))


TOKENS = st.one_of(
    st.just(Token()),
    st.just(Token(does="look", when="scores")),
    _tokens(when=st.sampled_from(WHEN), does=st.sampled_from(AT_A_TOKEN)),
    _tokens(tensor=st.sampled_from(sorted(TENSORS)), cache=st.sampled_from(sorted(CACHES))),
    _tokens(is_prepared=st.booleans(), chosen=st.sampled_from([*sorted(CHOSEN), "never"])),
)
GENERATES = st.tuples(st.sampled_from([0, 0, 0, 1]), st.lists(TOKENS, max_size=4))


def _does(do: Callable[[], None], *_: Any) -> None:
    do()


class Generating(Host):
    """A program that generates like transformers.

    It prepares inputs, calls the model, processes scores, and checks whether the end is reached.
    """

    def __init__(self, recorder: Recorder, every: int, *, in_python: bool) -> None:
        super().__init__(recorder, every, in_python=in_python, ticks=False)
        with pytest.MonkeyPatch.context() as patch:
            if in_python:
                patch.setattr(generation, "_compiled", lambda wrapper: wrapper)
            self.prepare, self.process, self.is_done = (
                wrap(_does) for wrap in (generation.prepares, generation.scores, generation.chooses)
            )
        self._generate = generation.generates(self._loop)

    def generate(self, owner: int, tokens: list[Token]) -> None:
        try:
            self._generate(self.models[owner], tokens)
        except (ValueError, KeyboardInterrupt) as error:
            self.said.append(repr(error))
        position = self.profiler.parts.paths.own.position
        here = unit()
        self.said.append(f"{position.step} {position.recording} {len(here.open)} {len(here.generations)}")

    def _loop(self, _: Any, tokens: list[Token]) -> None:
        for token in tokens:
            do = {token.when: functools.partial(self.do, token.does)}
            # With a star in the call, Python 3.11 creates no frame of the wrapper.
            if token.is_prepared:
                self.prepare(*(do.get("inputs", _nothing),))
            self.call_model(self.models[0], token.tensor, token.cache, "by name", do.get("forward", _nothing))
            do.get("between", _nothing)()
            self.process(*(do.get("scores", _nothing),))
            if token.chosen != "never":
                self.is_done(*(do.get("criteria", _nothing), *CHOSEN[token.chosen]()))

    def do(self, what: str) -> None:
        if what == "generate":
            self._generate(self.models[0], [Token(), Token()])
        elif what == "assist":
            generation.assists(_nothing)()
        else:
            super().do(what)


def _without_times(records: list[tuple[int, int, int, int]]) -> list[tuple[int, ...]]:
    # Records contain times since the machine started, so they differ between runs. Keep only the tag and the
    # elements.
    return [row if row[2] < 1 << 32 else (row[0], row[3]) for row in records]


def _generated(calls: list[tuple[int, list[Token]]], every: int, *, in_python: bool) -> Any:
    memory = Memory()
    host = Generating(memory, every, in_python=in_python)
    for owner, tokens in calls:
        host.generate(owner, tokens)
    host.profiler.enable()
    known = host.known
    host.profiler.close()
    uninstall()
    return host.said, known, _without_times(memory.records), memory.nodes


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(GENERATES, max_size=4), st.sampled_from([2, 5, 10_000, 10_000]))
def test_any_tokens_that_are_generated_leave_in_c_what_they_leave_in_python(
    calls: list[tuple[int, list[Token]]], every: int
) -> None:
    first = (0, [Token()] * 4)  # Python handles the first tokens. C can handle the token after them.
    in_python, in_c = (_generated([first, *calls], every, in_python=python) for python in (True, False))
    assert in_c == in_python


@first_by_default("in_python", [False, True], ids=["in C", "in Python"])
def test_a_plain_step_of_generate_lasts_from_its_inputs_to_its_token(in_python: bool, memory: Memory) -> None:
    host = Generating(memory, 10_000, in_python=in_python)
    host.generate(0, [Token()] * 4)
    before, begun_ns, ended = len(memory.records), [], []
    host.do = lambda what: begun_ns.append(perf_counter_ns())  # type: ignore[method-assign]
    for when in ("inputs", "criteria"):
        host.generate(0, [Token(when=when)])
        (_, start_ns, end_ns, _), _ = memory.records[before:]
        before = len(memory.records)
        ended.append((start_ns, end_ns))
    assert ended[0][0] <= begun_ns[0]
    assert begun_ns[1] <= ended[1][1]
    assert unit().open == []


@first_by_default("in_python", [False, True], ids=["in C", "in Python"])
def test_what_cbtop_pays_beside_the_model_is_counted_in_the_step(in_python: bool, memory: Memory) -> None:
    host = Generating(memory, 10_000, in_python=in_python)
    host.generate(0, [Token()] * 6)
    own_ns: list[int] = []

    def note() -> None:
        here = unit()
        own_ns.append(here.open[-1].active.own_ns if here.open else here.generations[-1].own_ns)

    def token(model: Any) -> None:
        host.prepare(*(_nothing,))
        note()
        host.call_model(model, "one", "used", "by name", note)
        note()
        host.process(*(note,))
        host.is_done(*(note, torch.ones(1, 9)))

    generation.generates(token)(host.models[0])
    assert own_ns[0] > 0
    # The cost of the step grows in four parts: the call of the model, its return, and both steps of processing
    # scores.
    assert own_ns == sorted(own_ns)
    assert len(set(own_ns)) == 4
    assert host.governor is not None
    assert own_ns[-1] < host.governor.own_ns[-1] < 10_000_000


RUNS = st.tuples(
    st.sampled_from(["decode", "decode", "prefill", "mixed", "verify"]),
    st.sampled_from([0, 1, 1, 7]),
    st.sampled_from([None, 0, 9]),
    st.booleans(),
    st.sampled_from(["run", "between", "sample"]),
    st.sampled_from(["nothing", "nothing", "look", "raise", "again", "another", "step", "cancel", "in a thread"]),
)


class Runner:
    """A runner of an inference engine. The runner has one method for each half of a step."""


class Running(Host):
    """A program that calls its first model through a runner of an inference engine."""

    def __init__(self, recorder: Recorder, every: int, *, in_python: bool, patch: pytest.MonkeyPatch) -> None:
        super().__init__(recorder, every, in_python=in_python)
        if in_python:
            patch.setattr(runners, "_begin_run", None)
            patch.setattr(runners, "_end_run", None)
        self._samples_later = False
        patch.setattr(runners, "installed", lambda: self.profiler)
        engine = runners.Engine(
            "engine",
            model_of=lambda runner: self.models[0],
            bricks=lambda runner: (True, ""),
            describe=lambda call, do: call,
            samples_later=lambda result: self._samples_later,
        )
        self._runner = Runner()
        self._run = runners.runs(lambda runner, call, do: self._runs(do), engine)
        self._sample = runners.ends(lambda runner, do: do(), lambda result: 5)

    def _runs(self, do: Callable[[], None]) -> None:
        self.call_model(self.models[0], "one", "used", "by name", do)

    def run(self, phase: str, tokens: int, cached: int | None, later: bool, when: str, does: str) -> None:
        do = {when: functools.partial(self.do, does)}
        self._samples_later = later
        try:
            self._run(self._runner, phases.Call(phase, tokens, 1, cached), do.get("run", _nothing))
            do.get("between", _nothing)()
            if later:
                self._sample(self._runner, do.get("sample", _nothing))
        except ValueError as error:
            self.said.append(repr(error))
        position = self.profiler.parts.paths.own.position
        step = type(position.step).__name__
        self.said.append(f"{step} {position.recording} {position.lane} {len(unit().open)}")


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(RUNS, max_size=6), st.sampled_from([2, 10_000, 10_000]))
def test_any_runs_of_a_runner_leave_in_c_what_they_leave_in_python(runs: list[Any], every: int) -> None:
    found = []
    for in_python in (True, False):
        # If the program raises while a step waits for its token, this step stays open until the next step.
        unit().open.clear()
        memory = Memory()
        with pytest.MonkeyPatch.context() as patch:
            host = Running(memory, every, in_python=in_python, patch=patch)
            for run in [("decode", 1, 9, True, "run", "nothing")] * 4 + runs:
                host.run(*run)
            known = host.known
            host.profiler.close()
        uninstall()
        found.append((host.said, known, memory.records, memory.nodes))
    assert found[0] == found[1]
