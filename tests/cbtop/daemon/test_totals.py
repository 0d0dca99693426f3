"""Tests of the totals of a process: records are validated and added up, and each change is returned once."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.daemon.totals import Totals
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind

READ_NS = 77


def table() -> NodeTable:
    nodes = NodeTable()
    nodes.add(Node(1, None, NodeKind.BRICK, "a"))
    nodes.add(Node(2, None, NodeKind.BRICK, "b"))
    return nodes


def batch(*nodes: int, overwritten: int = 0) -> Batch:
    """Return a batch with one record for each given node. Every record is 5 ns long."""
    node = np.array(nodes, np.int64)
    start_ns = np.arange(len(nodes), dtype=np.int64) * 10
    return Batch(node, node * 0, start_ns, start_ns + 5, node * 0 + 1, overwritten=overwritten)


def test_records_of_unknown_nodes_are_rejected_and_lost_ones_counted() -> None:
    totals = Totals()
    valid = totals.sift(batch(1, 9, 2, overwritten=4), table())
    assert valid.node.tolist() == [1, 2]
    assert (totals.received, totals.rejected, totals.overwritten, totals.before_attach) == (2, 1, 4, 4)
    totals.sift(batch(overwritten=3), table())
    assert (totals.overwritten, totals.before_attach) == (7, 4)


def test_a_call_without_a_node_is_not_lost_unless_the_table_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = Totals()
    call, wrong = batch(NO_NODE, 1, 9), batch(NO_NODE)
    wrong.end_ns[:] = 0  # the host passed wrong arguments
    for one in (call, wrong):
        totals.sift(one, table())
    assert (totals.received, totals.rejected, totals.without_node) == (1, 3, 1)
    monkeypatch.setattr("cbtop.daemon.totals.NEARLY_FULL", 0)
    totals.sift(call, table())
    assert (totals.received, totals.rejected, totals.without_node) == (2, 5, 1)


def test_changes_are_returned_once_and_everything_each_time() -> None:
    totals, nodes = Totals(), table()
    totals.add(totals.sift(batch(1, 1), nodes), nodes)
    (first,) = totals.changes("s", READ_NS)
    assert (first.source, first.monotonic_ns, first.received, first.sequence) == ("s", READ_NS, 2, 1)
    assert np.frombuffer(first.count, "<i8").tolist() == [2]
    assert list(totals.changes("s", READ_NS)) == []
    totals.add(totals.sift(batch(2), nodes), nodes)
    (second,) = totals.changes("s", READ_NS)
    assert np.frombuffer(second.node, "<i8").tolist() == [2]
    for _ in range(2):
        (update,) = totals.everything("s", READ_NS)
        assert np.frombuffer(update.node, "<i8").tolist() == [1, 2]
        assert np.frombuffer(update.total_ns, "<i8").tolist() == [10, 5]


def test_the_newest_call_and_its_lane_are_known() -> None:
    totals, nodes = Totals(), table()
    assert totals.last == (0, 0)
    totals.add(totals.sift(batch(1, 2), nodes), nodes)
    assert totals.last == (2, 0)
