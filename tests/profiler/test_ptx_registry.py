"""The registry finds a kernel's PTX by its FNV-1a hash, and two texts never share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.profiler import ptx_registry
from cbtop.profiler.ptx_registry import PtxCollisionError, PtxRegistry, hash_ptx

PTX = ".version 8.0\n.target sm_90\n.visible .entry gemv() { ret; }\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # from the test vectors of the FNV specification (RFC 9923 and test_fnv.c)
        ("", 0xCBF29CE484222325),
        ("a", 0xAF63DC4C8601EC8C),
        ("b", 0xAF63DF4C8601F1A5),
        ("fo", 0x08985907B541D342),
        ("foo", 0xDCB27518FED9D577),
        ("foob", 0xDD120E790C2512AF),
        ("fooba", 0xCAC165AFA2FEF40A),
        ("foobar", 0x85944171F73967E8),
    ],
)
def test_the_hash_is_fnv_1a_of_64_bits(text: str, expected: int) -> None:
    assert hash_ptx(text) == expected


def test_what_was_registered_is_found_by_its_hash() -> None:
    registry = PtxRegistry()
    found = registry.register("gemv", PTX, Path("gemv.ptx"))
    bare = registry.register("other", "// other")
    assert found == hash_ptx(PTX)
    assert registry.lookup(found) == PTX
    assert registry.lookup_name(found) == "gemv"
    assert registry.lookup_path(found) == Path("gemv.ptx")
    assert registry.lookup_path(bare) is None
    assert registry.hashes() == [found, bare]
    assert len(registry) == 2


def test_what_was_never_registered_is_not_found() -> None:
    registry = PtxRegistry()
    assert [registry.lookup(1), registry.lookup_name(1), registry.lookup_path(1)] == [None, None, None]
    assert len(registry) == 0


def test_the_same_text_again_takes_the_new_name() -> None:
    registry = PtxRegistry()
    found = registry.register("old", PTX)
    assert registry.register("new", PTX, Path("new.ptx")) == found
    assert (registry.lookup_name(found), registry.lookup_path(found), len(registry)) == ("new", Path("new.ptx"), 1)


def test_another_text_with_the_same_hash_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "hash_ptx", lambda ptx: 42)
    registry = PtxRegistry()
    registry.register("first", PTX)
    with pytest.raises(PtxCollisionError, match=r"0x000000000000002a is 'first' already.*'second'"):
        registry.register("second", "// another")
    assert registry.lookup(42) == PTX
