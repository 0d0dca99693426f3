"""Test of torch's clock: a time stamp on one device leaves another device the current one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device.cuda_calls import DriverError  # noqa: E402
from cbtop.profiler.instrument import torch_clock  # noqa: E402


@pytest.mark.parametrize("fails", [False, True])
def test_a_mark_is_made_on_its_device_and_the_hosts_device_is_restored(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, seen = [0], []

    def exchange(index: int) -> int:
        before, current[0] = current[0], index
        return before

    def mark() -> Any:
        seen.append(current[0])
        if fails:
            raise DriverError("lost")
        return "mark"

    for name in ("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
        monkeypatch.setattr(torch._C, name, exchange, raising=False)
    marked = torch_clock._while_current(1, mark)
    if fails:
        with pytest.raises(DriverError):
            marked()
    else:
        assert marked() == "mark"
    assert (seen, current) == ([1], [0])
