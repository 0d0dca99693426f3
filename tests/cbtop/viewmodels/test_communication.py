"""Tests of compared ranks: only ranks of a job that ran at the same time are compared."""

from __future__ import annotations

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import Window
from cbtop.protocol.messages import HostHello, SourceState
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.viewmodels.communication import ranks_alongside

SECOND_NS = 1_000_000_000
NOW_S = 100


def rank(number: int, begun_s: int, ended_s: int | None = None) -> SourceRecord:
    """Return one of two ranks of a job. If `ended_s` is None, this rank still runs."""
    begun_ns = begun_s * SECOND_NS
    hello = HostHello(
        2, 1, 1000 + begun_s, 1, "here", "boot", "train.py", "3", "made", begun_ns, begun_ns, number, number, 2
    )
    record = SourceRecord(f"{number}-{begun_s}", Window(10.0), hello)
    record.window.tick((NOW_S if ended_s is None else ended_s) * SECOND_NS)
    state = SourceStatus.LIVE if ended_s is None else SourceStatus.ENDED
    record.state = SourceState(record.key, state, "", 0, 0, 0, 0, 0, 0)
    return record


def test_a_rank_that_has_ended_is_still_compared_with_one_that_runs() -> None:
    saves, has_ended = rank(0, 10), rank(1, 11, 90)
    assert ranks_alongside(saves, [saves, has_ended]) == [has_ended]
    assert ranks_alongside(has_ended, [saves, has_ended]) == [saves]


def test_ranks_of_an_earlier_run_are_not_compared() -> None:
    earlier, again = [rank(0, 10, 40), rank(1, 11, 41)], [rank(0, 50), rank(1, 51, 90)]
    assert ranks_alongside(again[0], [*earlier, *again]) == [again[1]]
    assert ranks_alongside(earlier[0], [*earlier, *again]) == [earlier[1]]


def test_a_rank_that_runs_again_replaces_the_one_that_has_ended() -> None:
    other, before, now = rank(0, 10), rank(1, 11, 40), rank(1, 50)
    assert ranks_alongside(other, [other, before, now]) == [now]


def test_a_process_that_is_no_rank_is_compared_with_none() -> None:
    alone = SourceRecord("alone", Window(10.0))
    assert ranks_alongside(alone, [alone, rank(0, 10)]) == []
