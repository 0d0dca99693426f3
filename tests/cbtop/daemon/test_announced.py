"""Tests of the catalog messages that a process announces.

The messages are validated, and each change is returned once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.daemon.announced import Announced
from cbtop.protocol import announcements
from cbtop.protocol.messages import Activity, CatalogMessage, CheckResult, Goodbye, HostHello, Node
from cbtop.protocol.vocabulary import NodeKind

HELLO = HostHello(2, 0, 7, 1, "here", "", "made", "3", "python", 1, 1)
STEP = Node(1, None, NodeKind.STEP, "decode")
BRICK = Node(2, 1, NodeKind.BRICK, "a")
OUTSIDE = Node(3, None, NodeKind.BRICK, "b")


def test_messages_stand_in_the_order_hello_nodes_others_goodbye() -> None:
    announced = Announced()
    said: list[CatalogMessage] = [HELLO, Activity("loading"), STEP, Goodbye("done")]
    announced.add(said)
    assert announced.messages == [HELLO, STEP, Activity("loading"), Goodbye("done")]
    assert (announced.hello, announced.goodbye, announced.received) == (HELLO, Goodbye("done"), 4)


def test_changes_are_returned_once_and_only_the_newest_of_those_that_replace_each_other() -> None:
    announced = Announced()
    announced.add([HELLO, Activity("loading"), Activity("running")])
    assert announced.changes() == (HELLO, Activity("running"))
    assert announced.changes() == ()


@pytest.mark.parametrize("said", [[STEP], [HELLO, HELLO]], ids=["none", "two"])
def test_a_catalog_must_begin_with_one_hello(said: list[CatalogMessage]) -> None:
    with pytest.raises(ValueError, match="does not begin with one hello"):
        Announced().add(said)


def test_the_hello_must_have_the_protocol_that_is_read() -> None:
    with pytest.raises(ValueError, match=r"it records protocol 99\.0, this cbtop reads"):
        Announced().add([replace(HELLO, protocol_major=99)])


def test_announcements_over_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED", 3)
    announced = Announced()
    announced.add([HELLO, *(CheckResult(str(number), "finite", True, None, None) for number in range(5))])
    assert (announced.left_out, len(announced.messages)) == (2, 4)


def test_a_step_and_its_nodes_are_in_a_step() -> None:
    announced = Announced()
    announced.add([HELLO, STEP, BRICK, OUTSIDE])
    assert [announced.is_in_step(node) for node in (1, 2, 3, 4)] == [True, True, False, False]
