"""Tests of the choice of the process that is asked to record kernels: it is found by its key.

The process must be running on this machine, and it must not be a merged process.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from cbtop.errors import NoDataError
from cbtop.feeds.kernel_request import KernelRequest, own_source
from cbtop.protocol.errors import RequestError
from tests.cbtop.asked_host import Host


def test_of_several_processes_the_one_of_that_key_is_found(runtime: Path) -> None:
    with Host(runtime, lambda host, request: None), Host(runtime, lambda host, request: None):
        for ring in runtime.glob("*.ring"):
            key = f"{socket.gethostname()}:{ring.stem.replace('-', ':')}"
            with closing(own_source(key)) as source:
                assert (source.key, source.ring_path) == (key, ring)


@pytest.mark.parametrize(
    "change", ["elsewhere:{}:{}:{}", "{}", "", "a:1:2:../../{}", "{3}:{0}:{1}:9", "{3}:{0}:{1}:2/x"]
)
def test_a_key_of_another_host_or_of_nobody_finds_nothing(runtime: Path, change: str) -> None:
    with Host(runtime, lambda host, request: None) as host:
        key = change.format(*host.ring.stem.split("-"), socket.gethostname())
        with pytest.raises(NoDataError, match="no process of yours"):
            own_source(key)


def test_what_has_ended_is_found_no_more(runtime: Path) -> None:
    with Host(runtime, lambda host, request: None) as host:
        key = f"{socket.gethostname()}:{host.ring.stem.replace('-', ':')}"
    with pytest.raises(NoDataError, match=f"pid {os.getpid()} on"):
        own_source(key)


def test_what_is_asked_already_is_not_asked_twice(runtime: Path) -> None:
    with Host(runtime, lambda host, request: None) as host:
        key = f"{socket.gethostname()}:{host.ring.stem.replace('-', ':')}"
        with (
            closing(own_source(key)) as source,
            KernelRequest(source),
            pytest.raises(RequestError, match="another command or screen is asking it"),
        ):
            KernelRequest(source)
        assert host.recorder.asked == 0
