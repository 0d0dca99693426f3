"""Tests of views: a part of a view is computed only when the part is read, and only once."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from cbtop.viewmodels.on_demand import Lazy, LazyValue, made, with_parts


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str
    large: Lazy[tuple[int, ...]] = Lazy()
    none: Lazy[int | None] = Lazy(None)


def counted(calls: list[int]) -> LazyValue[tuple[int, ...]]:
    def make() -> tuple[int, ...]:
        calls.append(1)
        return (1, 2)

    return LazyValue(make)


def test_a_part_is_made_when_it_is_read_and_once() -> None:
    calls: list[int] = []
    sample = Sample(name="one", large=counted(calls))
    assert not calls
    assert (sample.large, sample.large, sample.none) == ((1, 2), (1, 2), None)
    assert len(calls) == 1


def test_a_view_with_other_parts_makes_none_and_shares_what_is_made() -> None:
    calls: list[int] = []
    sample = Sample(name="one", large=counted(calls))
    other = with_parts(sample, name="other", none=3)
    assert not calls
    assert (other.name, other.none, sample.name, sample.none) == ("other", 3, "one", None)
    assert sample.large is other.large
    assert len(calls) == 1


def test_a_part_that_is_given_is_read_as_it_is() -> None:
    assert Sample(name="one", large=(7,)).large == (7,)
    assert replace(Sample(name="one", large=(7,)), name="two") == Sample(name="two", large=(7,))


def test_a_part_without_a_default_must_be_given() -> None:
    assert {field.name for field in fields(Sample)} == {"name", "large", "none"}
    with pytest.raises(TypeError):
        Sample(name="one")


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="a Sample has no nome"):
        with_parts(Sample(name="one", large=()), nome="two")


def test_a_view_that_is_held_has_every_part_made() -> None:
    calls: list[int] = []
    made(Sample(name="one", large=counted(calls)))
    assert len(calls) == 1


def test_what_a_part_was_made_of_goes_once_it_is_made() -> None:
    basis = np.zeros(3)
    gone = weakref.ref(basis)
    later = LazyValue(basis.sum)
    assert later.value() == 0
    del basis
    gc.collect()
    assert gone() is None
