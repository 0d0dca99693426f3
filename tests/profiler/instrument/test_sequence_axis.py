"""Tests of the axis of sequences in the input of a model with a module in the order (tokens, sequences)."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

import torch
from torch import nn

from cbtop.profiler.instrument import attach
from cbtop.profiler.instrument.call_attribute import standing
from cbtop.profiler.instrument.sequence_axis import MAX_CALLS, axis_from
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory

TOKENS, SEQUENCES = 7, 3


class Recurrent(nn.Module):
    """A model whose LSTM has the order (tokens, sequences). It may transpose its input for it."""

    def __init__(self, *, transposes: bool, takes_ids: bool = True) -> None:
        super().__init__()
        self.transposes, self.takes_ids = transposes, takes_ids
        self.embedding, self.rnn, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4), nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1) if self.transposes else x
        return self.head(self.rnn(self.embedding(x) if self.takes_ids else x)[0])  # type: ignore[no-any-return]


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 8)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.transformer(self.embedding(source), tgt=self.embedding(target))  # type: ignore[no-any-return]


def sequences_of(model: nn.Module, *inputs: torch.Tensor, calls: int = 6, every: int = 1) -> list[int]:
    """Return the number of sequences of each step that reports it."""
    memory = Memory()
    attach(model, BrickProfiler(sample_every=every, recorder=memory))
    for _ in range(calls):
        model(*inputs)
    kinds = {node.id: node.kind for node in memory.said if isinstance(node, Node)}
    ids = {node for node, kind in kinds.items() if kind is NodeKind.STEP}
    return [
        start
        for tag, start, _, _ in memory.records
        if tag & FLAG_AMOUNTS and tag & 0xFFFFFF in ids and start < 100  # plain steps also have their begins here
    ]


@pytest.mark.parametrize("every", [1, 2], ids=["recorded", "plain"])
@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("takes_ids", [False, True])
def test_an_lstm_in_the_order_of_tokens_tells_the_sequences(transposes: bool, takes_ids: bool, every: int) -> None:
    shape = (SEQUENCES, TOKENS) if transposes else (TOKENS, SEQUENCES)
    ids = torch.zeros(shape, dtype=torch.long)
    model = Recurrent(transposes=transposes, takes_ids=takes_ids)
    found = sequences_of(model, ids if takes_ids else torch.zeros(*shape, 4), every=every)
    assert len(found) >= 4
    assert set(found) == {SEQUENCES}
    assert standing(model.rnn) is None or not type(standing(model.rnn)).__module__.endswith("sequence_axis")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_transformer_of_torch_tells_the_sequences() -> None:
    source, target = (torch.zeros(length, SEQUENCES, dtype=torch.long) for length in (TOKENS, 5))
    found = sequences_of(Translator(), source, target)
    assert set(found) == {SEQUENCES}


def test_as_many_sequences_as_tokens_stay_unknown() -> None:
    model = Recurrent(transposes=False)
    assert sequences_of(model, torch.zeros(4, 4, dtype=torch.long), calls=MAX_CALLS + 2) == []
    assert standing(model.rnn) is None or not type(standing(model.rnn)).__module__.endswith("sequence_axis")


@pytest.mark.parametrize(
    ("outer", "inner", "axis"),
    [
        ((7, 3), (7, 3, 4), 1),
        ((3, 7), (7, 3, 4), 0),
        ((3, 3), (3, 3, 4), None),
        ((3, 9), (7, 3, 4), None),  # for example, the model splits its input into patches
        ((7,), (7, 3, 4), None),
        ((7, 3), (7, 4), None),
    ],
)
def test_an_axis_is_known_only_from_the_same_two_lengths(
    outer: tuple[int, ...], inner: tuple[int, ...], axis: int | None
) -> None:
    assert axis_from(torch.zeros(outer), torch.zeros(inner)) == axis


def test_without_tensors_no_axis_is_known() -> None:
    assert axis_from(None, torch.zeros(7, 3, 4)) is None
    assert axis_from(torch.zeros(7, 3), None) is None
