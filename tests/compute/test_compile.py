"""What is compiled for compiled code alone."""

from __future__ import annotations

from typing import Any

import pytest

from cbtop.compute.jit.compile import jit, jit_inlined


@jit_inlined
def inlined(x: Any) -> Any:
    return x + 1


@jit
def calling(x: Any) -> Any:
    return 2 * inlined(x)


def test_python_that_calls_what_is_inlined_is_told_before_and_after_compiled_code_has() -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^inlined is for compiled code alone"):
            inlined(3)
        assert calling(3) == 8
