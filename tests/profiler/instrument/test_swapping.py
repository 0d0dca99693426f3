"""Tests of replaced functions of torch and transformers: these functions run cbtop's code only in recorded steps.

In plain steps, and while Dynamo compiles, the functions run their own code.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.swapping import Swaps, TimedEntry
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.ring import FLAG_AMOUNTS
from tests.profiler.instrument.dynamo_state import callbacks, forget_compiled
from tests.profiler.instrument.tiny import model_of, torch, transformers, words
from tests.profiler.memory import Memory

NODE = (1 << 24) - 1  # bits of a record's tag

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def host() -> Iterator[SimpleNamespace]:
    """Yield the modules of transformers that contain the functions of a llama. No code was compiled by Dynamo."""
    gc.collect()  # Remove models of earlier tests.
    forget_compiled()
    yield SimpleNamespace(
        llama=transformers.models.llama.modeling_llama,
        attention=transformers.modeling_utils.AttentionInterface._global_mapping,
    )
    forget_compiled()


def _functions(host: SimpleNamespace) -> list[Any]:
    """Return the code objects that the replaced functions have now."""
    names = ("apply_rotary_pos_emb", "create_causal_mask", "eager_attention_forward")
    return [one.__code__ for one in [*[getattr(host.llama, name) for name in names], *host.attention.values()]]


def _seen_in(model: Any, host: SimpleNamespace) -> list[list[Any]]:
    """Return a list that records the code objects of the functions in each later call of `model`."""
    seen: list[list[Any]] = []
    model.model.norm.register_forward_hook(lambda *_: seen.append(_functions(host)))
    return seen


def _calls(memory: Memory, name: str) -> int:
    nodes = {node[0]: node[3] for node in memory.nodes}
    return [nodes[tag & NODE] for tag, *_ in memory.records if not tag & FLAG_AMOUNTS].count(name)


def test_in_a_step_that_is_not_recorded_functions_are_the_hosts_own(host: SimpleNamespace, memory: Memory) -> None:
    bare, model, profiler = _functions(host), model_of("llama"), BrickProfiler(recorder=memory, sample_every=3)
    seen = _seen_in(model, host)
    logits = model(words(1, 4)).logits
    attachment = attach(model, profiler)
    assert _functions(host) == bare
    for _ in range(6):
        assert torch.equal(model(words(1, 4)).logits, logits)
    assert [found == bare for found in seen] == [True] + 2 * [False, True, True]
    assert not set(seen[1][:3]) & set(bare)
    assert _calls(memory, "Attention (fused)") == _calls(memory, "RopeEmbedding") == 2 * 3
    model(words(1, 4))
    attachment.detach()
    assert _functions(host) == bare


def test_a_model_that_is_freed_in_a_recorded_step_leaves_no_function_timed(
    host: SimpleNamespace, memory: Memory
) -> None:
    bare, freed, model = _functions(host), model_of("llama"), model_of("llama")
    seen = _seen_in(model, host)
    attach(freed, BrickProfiler(recorder=memory))
    freed(words(1, 4))
    gc.disable()
    try:
        del freed
        attach(model, BrickProfiler(recorder=memory, sample_every=2))
        for _ in range(2):
            model(words(1, 4))
    finally:
        gc.enable()
    assert [found == bare for found in seen] == [False, True]


def test_plain_steps_of_one_model_take_no_function_from_a_recorded_one(host: SimpleNamespace, memory: Memory) -> None:
    bare, model, other = _functions(host), model_of("llama"), model_of("llama")
    attach(model, BrickProfiler(recorder=memory, sample_every=2))
    attach(other, BrickProfiler(recorder=Memory(), sample_every=3))
    other(words(1, 4))  # The first step is recorded, and the next two are not.
    beside = threading.Thread(target=lambda: [other(words(1, 4)) for _ in range(2)])

    def run(*_: Any) -> None:
        if not beside.ident:
            beside.start()
            beside.join()

    model.model.embed_tokens.register_forward_hook(run)
    model(words(1, 4))
    assert _calls(memory, "RopeEmbedding") == 3
    assert _functions(host) != bare
    model(words(1, 4))
    assert _functions(host) == bare


def _graphs_of(called: Any, graphs: list[Any]) -> int:
    for _ in range(6):
        called(words(1, 4))
    return len(graphs)


@pytest.mark.slow  # test_wrapping.py compares what is compiled
@pytest.mark.parametrize(
    ("steps_before", "resets"),
    [
        pytest.param(1, True, id="after a recorded step and a reset of Dynamo"),
        pytest.param(2, False, id="after a plain step", marks=pytest.mark.slow),
        pytest.param(1, False, id="after a recorded step", marks=pytest.mark.slow),
        pytest.param(2, True, id="after a plain step and a reset of Dynamo", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_are_compiled_once_whichever_steps_are_recorded(
    steps_before: int, resets: bool, host: SimpleNamespace, memory: Memory
) -> None:
    def run(profiler: BrickProfiler | None) -> int:
        forget_compiled()
        model, graphs = model_of("llama"), []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        if profiler is not None:
            attach(model, profiler)
        for _ in range(steps_before):
            model(words(1, 4))
        if resets:
            forget_compiled()
            model(words(1, 4))
        for layer in model.model.layers:
            layer.compile(backend=backend)
        return _graphs_of(model, graphs)

    assert run(BrickProfiler(recorder=memory, sample_every=2)) == run(None)


def test_where_dynamo_has_compiled_before_functions_stay_the_hosts_own(
    host: SimpleNamespace, profiler: BrickProfiler
) -> None:
    bare, watching = _functions(host), [*callbacks()[0]]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    model = model_of("llama")
    attachment, seen = attach(model, profiler), _seen_in(model, host)
    model(words(1, 4))
    assert seen == [bare]
    attachment.detach()
    assert _functions(host) == bare
    assert callbacks()[0] == watching


@pytest.mark.usefixtures("host")
def test_a_swap_cut_short_is_repeated_and_functions_others_set_stay() -> None:
    class Refuses(SimpleNamespace):
        fails = False

        def __setattr__(self, name: str, value: Any) -> None:
            if Refuses.fails:
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    swaps, home, model = Swaps(), Refuses(one=len, two=max), torch.nn.Identity()
    of_model: Any = ref(model)
    swaps.add(TimedEntry(home, "one", len, lambda own: sum))
    swaps.add(TimedEntry(home, "two", max, lambda own: min))

    def swap(are_in: bool) -> None:
        swaps.swap_in(of_model, Memory()) if are_in else swaps.swap_out(of_model)  # type: ignore[arg-type]

    for are_in, expected in ((True, [sum, min]), (False, [len, max])):
        Refuses.fails = True
        with contextlib.suppress(KeyboardInterrupt):
            swap(are_in)
        Refuses.fails = False
        swap(are_in)
        assert [home.one, home.two] == expected
    swap(True)
    home.two = print
    swap(False)
    assert vars(home) == {"one": len, "two": print}
    swaps.clear()
