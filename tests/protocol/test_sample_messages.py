"""Tests of the message with sampled functions: counts that contradict each other are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.packing import load_msgpack
from cbtop.protocol.sample_messages import MAX_SAMPLED_PLACES, CpuSamples, SampledFunction, SampledPlace

FUNCTION = SampledFunction("encode", "tokenizer.py", 12, 8, 2, "serve.py:3 main")
PLACE = SampledPlace("", "", "between steps", 10, 1, 1, (FUNCTION,))
SAMPLES = CpuSamples(5, 9, 12, 3, (PLACE,))


def test_a_message_is_the_same_after_its_way() -> None:
    assert codec.decode(codec.encode(SAMPLES)) == SAMPLES


@pytest.mark.parametrize(
    "made",
    [
        lambda: dataclasses.replace(FUNCTION, asleep=9),
        lambda: dataclasses.replace(FUNCTION, asleep=-1),
        lambda: dataclasses.replace(FUNCTION, line=-1),
        lambda: dataclasses.replace(PLACE, samples=9),
        lambda: dataclasses.replace(PLACE, own=-1),
        lambda: dataclasses.replace(PLACE, functions=(FUNCTION,) * 17, samples=1_000),
        lambda: dataclasses.replace(SAMPLES, until_ns=4),
        lambda: dataclasses.replace(SAMPLES, cpu_ns=-1),
        lambda: dataclasses.replace(SAMPLES, places=(PLACE, PLACE)),
        lambda: dataclasses.replace(
            SAMPLES, places=tuple(dataclasses.replace(PLACE, name=str(at)) for at in range(MAX_SAMPLED_PLACES + 1))
        ),
    ],
)
def test_counts_that_contradict_each_other_are_refused(made: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"samples|functions|places"):
        made()


def test_a_hostile_message_is_a_decode_error() -> None:
    msgpack = load_msgpack()
    raw = msgpack.unpackb(codec.encode(SAMPLES))
    raw["places"][0]["functions"][0]["samples"] = 1 << 62
    with pytest.raises(DecodeError):
        codec.decode(msgpack.packb(raw))
    raw["places"][0]["functions"] = [{**raw, "places": []}]
    with pytest.raises(DecodeError):
        codec.decode(msgpack.packb(raw))
