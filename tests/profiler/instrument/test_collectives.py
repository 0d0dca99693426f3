"""Tests of collectives: in a step they are bricks with sizes. Afterwards torch.distributed is as it was before.

The group of four ranks is torch's own `fake` backend. Real groups are tested in tests/integration.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.instrument import attach, collectives, trouble
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.ring import MAX_NODE
from cbtop.protocol.vocabulary import BrickCategory
from tests.profiler.instrument.dynamo_state import forget_compiled, graphs_and_breaks
from tests.profiler.instrument.tiny import torch
from tests.profiler.memory import Memory

import torch.distributed as dist  # isort: skip
import torch.distributed._functional_collectives as functional  # isort: skip
from torch import nn  # isort: skip
from torch.distributed import all_reduce as imported_before  # isort: skip
from torch.distributed.distributed_c10d import Work as TorchWork  # isort: skip
from torch.distributed.distributed_c10d import _coalescing_manager  # isort: skip
from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # isort: skip
from tests.representatives import first_by_default

RANKS = 4
SHAPE = (2, 3, 8)
COUNT = 48


@pytest.fixture(autouse=True)
def group(without_gradients: None) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self, does: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.does = nn.Linear(8, 16), nn.Linear(16, 8), does

    def forward(self, x: Any) -> Any:
        self.does(x)
        return self.down_proj(self.up_proj(x))


class Model(nn.Module):
    """A model of two layers. Each layer calls `does` with its input, a tensor with the shape SHAPE."""

    def __init__(self, does: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(does) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def _gathered(x: Any) -> list[Any]:
    return [torch.empty_like(x) for _ in range(RANKS)]


def _all_to_all_by_functional(x: Any) -> None:
    functional.all_to_all_single(x.reshape(8, 6), None, None, dist.group.WORLD).tolist()


def _in_a_batch(x: Any) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)]):
        work.wait()


def _coalesced(x: Any) -> None:
    with _coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)


# Collectives by name: a call, and the bricks that the call must become. Each brick has the number of elements of all
# ranks.
CALLS: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "all_reduce": (lambda x: dist.all_reduce(x), {"AllReduce": COUNT}),
    "imported before": (lambda x: imported_before(tensor=x, group=None), {"AllReduce": COUNT}),
    "all_reduce of a group": (lambda x: dist.all_reduce(x, group=dist.group.WORLD), {"AllReduce": COUNT}),
    "all_gather": (lambda x: dist.all_gather(_gathered(x), x), {"AllGather": RANKS * COUNT}),
    "all_gather_into_tensor": (
        lambda x: dist.all_gather_into_tensor(x.new_empty(RANKS * COUNT), x.reshape(-1)),
        {"AllGather": RANKS * COUNT},
    ),
    "reduce_scatter": (lambda x: dist.reduce_scatter(x, _gathered(x)), {"ReduceScatter": RANKS * COUNT}),
    "reduce_scatter_tensor": (
        lambda x: dist.reduce_scatter_tensor(x.new_empty(COUNT // RANKS), x.reshape(-1)),
        {"ReduceScatter": COUNT},
    ),
    "all_to_all": (lambda x: dist.all_to_all(_gathered(x), _gathered(x)), {"AllToAll": RANKS * COUNT}),
    "all_to_all_single": (
        lambda x: dist.all_to_all_single(x.new_empty(COUNT), x.reshape(-1)),
        {"AllToAll": COUNT},
    ),
    "broadcast": (lambda x: dist.broadcast(x, 0), {"Broadcast": COUNT}),
    "reduce": (lambda x: dist.reduce(x, 0), {"Reduce": COUNT}),
    "gather": (lambda x: dist.gather(x, _gathered(x), dst=0), {"Gather": RANKS * COUNT}),
    "scatter": (lambda x: dist.scatter(x, _gathered(x), src=0), {"Scatter": RANKS * COUNT}),
    "send": (lambda x: dist.send(x, 1), {"Send": COUNT}),
    "recv": (lambda x: dist.recv(x, 1), {"Recv": COUNT}),
    "barrier": (lambda _: dist.barrier(), {"Barrier": 0}),
    "async": (lambda x: dist.all_reduce(x, async_op=True), {"AllReduce (launch)": COUNT}),
    "isend": (lambda x: dist.isend(x, 1), {"Send (launch)": COUNT}),
    "irecv": (lambda x: dist.irecv(x, 1), {"Recv (launch)": COUNT}),
    "functional": (
        lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
        {"AllReduce (launch)": COUNT, "Wait": 0},
    ),
    "functional, by a name": (
        lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD.group_name).tolist(),
        {"AllGather (launch)": RANKS * COUNT, "Wait": 0},
    ),
    "functional, waited for inside": (
        lambda x: functional.all_gather_tensor(x, 1, (init_device_mesh("cpu", (RANKS,)), 0)),
        {"AllGather (launch)": RANKS * COUNT, "Wait": 0},
    ),
    "functional, to all": (_all_to_all_by_functional, {"AllToAll (launch)": COUNT, "Wait": 0}),
}


def _run(model: Any) -> None:
    with warnings.catch_warnings():
        # torch 2.13 warns that `all_gather_into_tensor` and similar functions are deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        model(torch.ones(SHAPE))


def _bricks(memory: Memory) -> dict[str, list[Node]]:
    """Return the nodes of bricks for communication, by their names."""
    found: dict[str, list[Node]] = {}
    for said in memory.said:
        if isinstance(said, Node) and said.category is BrickCategory.COMMUNICATION:
            found.setdefault(said.name, []).append(said)
    return found


def _elements(memory: Memory, node: Node) -> list[int]:
    return [elements for tag, _, _, elements in memory.records if tag & MAX_NODE == node.id]


@first_by_default("name", CALLS, 6)
def test_each_collective_is_a_brick_of_its_layer_with_all_elements(
    name: str, profiler: BrickProfiler, memory: Memory
) -> None:
    does, expected = CALLS[name]
    model = Model(does)
    attach(model, profiler)
    _run(model)
    found = _bricks(memory)
    assert set(found) == set(expected)
    for kind, nodes in found.items():
        assert len(nodes) == 2  # one for each layer
        elements = expected[kind]
        assert [_elements(memory, node) for node in nodes] == [[elements]] * 2
        for node in nodes:
            is_over = "launch" not in kind
            assert node.work.size_bytes(1, elements) == (4 * elements if elements else None)
            assert (node.work.bytes(1, elements) is not None) == (is_over and elements > 0)
            assert node.label == (f"{RANKS} ranks" if "Wait" not in kind and name not in ("isend", "irecv") else "")


def test_what_is_called_of_a_group_of_others_is_no_brick(profiler: BrickProfiler, memory: Memory) -> None:
    others = dist.new_group([1, 2])
    model = Model(lambda x: dist.all_reduce(x, group=others))
    attach(model, profiler)
    with pytest.warns(UserWarning, match="does not belong to the given group"):
        _run(model)
    assert not _bricks(memory)


def test_of_parts_that_differ_in_size_no_bus_bytes_are_said(profiler: BrickProfiler, memory: Memory) -> None:
    parts = [torch.ones(1 + rank) for rank in range(RANKS)]
    model = Model(lambda _: dist.all_to_all([torch.empty_like(part) for part in parts], parts))
    attach(model, profiler)
    _run(model)
    (node, _) = _bricks(memory)["AllToAll"]
    assert _elements(memory, node) == [1 + 2 + 3 + 4]
    assert (node.work.size_bytes(1, 10), node.work.bytes(1, 10)) == (40, None)


def test_in_a_batch_each_send_and_receive_is_a_launch(profiler: BrickProfiler, memory: Memory) -> None:
    model = Model(_in_a_batch)
    attach(model, profiler)
    _run(model)
    assert set(_bricks(memory)) >= {"Send (launch)", "Recv (launch)"}


def test_waiting_for_what_was_launched_is_a_brick_that_says_of_which_kind(
    profiler: BrickProfiler, memory: Memory
) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model(lambda x: (dist.all_reduce(x, async_op=True).wait(), dist.all_reduce(x)))
    attach(model, profiler)
    _run(model)
    counts = {kind: sum(len(_elements(memory, node)) for node in nodes) for kind, nodes in _bricks(memory).items()}
    assert counts == {"AllReduce (launch)": 2, "Wait (AllReduce)": 2, "AllReduce": 2}


def test_what_is_gathered_to_be_launched_together_has_no_rate(profiler: BrickProfiler, memory: Memory) -> None:
    model = Model(_coalesced)
    attach(model, profiler)
    _run(model)
    (node, _) = _bricks(memory)["AllReduce (launch)"]
    assert node.work.bytes(1, COUNT) is None


def test_no_collective_is_recorded_outside_steps_and_detach_restores_torch(
    profiler: BrickProfiler, memory: Memory
) -> None:
    def state() -> list[object]:
        c10d: Any = dist.distributed_c10d
        closed_over = [
            function.__closure__[0].cell_contents
            for function in vars(c10d).values()
            if type(function) is FunctionType and function.__closure__
        ]
        return [*vars(dist).values(), *closed_over, *vars(functional).values(), *vars(TorchWork).values(),
                *vars(dist.ProcessGroup).values()]  # fmt: skip

    before = state()
    model = Model(lambda x: dist.all_reduce(x))
    attachment = attach(model, profiler)
    # torch compares its functions by identity, so attaching must not replace them.
    assert dist.all_reduce is imported_before
    _run(model)
    records = len(memory.records)
    dist.all_reduce(torch.ones(3))
    attachment.detach()
    _run(model)
    assert len(memory.records) == records
    after = state()
    assert len(after) == len(before)
    assert all(one is other for one, other in zip(before, after, strict=True))


class Inherits(dist.ProcessGroup):
    """A process group that is written in Python. torch does the sending."""


class InheritsWait(TorchWork):
    pass


def test_classes_of_pythons_that_inherit_what_is_timed_do_as_without_us(profiler: BrickProfiler) -> None:
    def said() -> list[str]:
        calls: list[Callable[[], object]] = [
            lambda: Inherits(0, 1).send([torch.ones(1)], 0, 0),
            lambda: Inherits(0, 1).recv([torch.ones(1)], 0, 0),
            lambda: InheritsWait().wait(timedelta(milliseconds=1)),
        ]
        found = []
        for call in calls:
            with pytest.raises(RuntimeError) as raised:
                call()
            found.append(f"{raised.type} {raised.value}".splitlines()[0])
        return found

    bare, in_steps = said(), []
    attach(Model(lambda _: None), profiler)
    model = Model(lambda _: in_steps.append(said()))
    attach(model, profiler)
    assert said() == bare
    _run(model)
    assert in_steps == [bare, bare]


def test_where_something_of_ours_fails_the_collective_is_called_all_the_same(
    profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()

    def fails(group: object) -> int:
        calls["asked"] += 1
        raise LookupError("no such group")

    monkeypatch.setattr(collectives, "ranks_of", fails)
    monkeypatch.setattr(trouble, "_said", {})
    model = Model(lambda x: calls.update(called=1) or dist.all_reduce(x))
    attach(model, profiler)
    _run(model)
    assert calls == {"asked": 2, "called": 2}
    assert trouble.first_said() == "some calls of AllReduce are not timed: LookupError: no such group"


@pytest.mark.slow
@first_by_default("name", ["all_reduce", "functional", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_dynamo_compiles_collectives_into_the_graphs_of_the_bare_model(name: str, profiler: BrickProfiler) -> None:
    does, _ = CALLS[name]

    def counted(is_attached: bool) -> tuple[int, int]:
        forget_compiled()
        model = Model(does)
        if is_attached:
            # cbtop wraps torch's functions when it is attached to a model. This model only serves for attaching and
            # never runs.
            attach(Model(does), profiler)
            attach(model, profiler)
        compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(SHAPE))
        return graphs_and_breaks()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo warns about code that it skips, and torch warns about itself
        try:
            assert counted(False) == counted(True)
        finally:
            # Forget the compiled models: if models of this class were compiled, cbtop would not wrap functions.
            forget_compiled()


def test_the_weights_of_a_model_sharded_over_ranks_are_those_of_this_rank(
    profiler: BrickProfiler, memory: Memory
) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Model(lambda _: None)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for layer in model.layers:
        for linear in (layer.up_proj, layer.down_proj):
            for name, weight in list(linear.named_parameters()):
                part = weight.detach()[: len(weight) // RANKS]
                linear.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)])))
    attach(model, profiler)
    (manifest,) = [said for said in memory.said if isinstance(said, Manifest)]
    assert manifest.weights_bytes == whole // RANKS


def _carried_by_a_link(kind: str, ranks: int, size: int) -> float:
    """Return how many bytes each rank in a ring of ranks sends, counted send by send.

    `size` is the number of bytes of the whole tensor.
    """
    part = size / ranks
    # An all-reduce goes around the ring twice: first to reduce, then to gather.
    passes = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1}[kind]
    return sum(part for _ in range(passes) for _ in range(ranks - 1))


@given(
    st.sampled_from(["AllReduce", "AllGather", "ReduceScatter"]),
    st.integers(1, 4096),
    st.integers(0, 2**40),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_bus_bytes_are_what_a_link_carries_in_a_ring(kind: str, ranks: int, elements: int, itemsize: int) -> None:
    work: Any = collectives.collective_brick(kind, ranks, itemsize, has_bus=True).work
    assert work.size_bytes(1, elements) == elements * itemsize
    assert work.bytes(1, elements) == pytest.approx(_carried_by_a_link(kind, ranks, elements * itemsize))
