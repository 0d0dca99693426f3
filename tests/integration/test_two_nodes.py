"""One screen shows all ranks of a job on two nodes.

The nodes are network namespaces with their own host names, runtime directories and keys. The ranks exchange data by
gloo over the link between the nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import CBTOP, DEADLINE_S, PATIENTLY, eventually
from tests.integration.test_keys import Machine, two_hosts
from tests.integration.test_two_ranks import LAYERS, PARALLEL

pytestmark = [
    pytest.mark.slow,  # four processes load torch
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make torch"),
]
PORT = "29517"
ADDRESSES = "10.99.0.1", "10.99.0.2"
DEVICES = "cable", "elbac"  # the network devices of the nodes, from `two_hosts`
NAMES = "node-a", "node-b"
RANKS_OF_A_NODE = 2
SLOW_RANK = 3


class Node(Machine):
    """A user's keys, runtime directory and ranks in one of the namespaces."""

    def __init__(self, number: int, directory: Path, prefix: tuple[str, ...]) -> None:
        name = ("unshare", "--uts", "sh", "-c", f'hostname {NAMES[number]} && exec "$@"', "sh")
        super().__init__(directory / "keys", (*prefix, *name))
        self.number = number
        # A connection to the node's own address goes through its loopback device.
        subprocess.run([*prefix, "ip", "link", "set", "lo", "up"], check=True)
        self.runtime = directory / "runtime"
        directory.mkdir()
        self.runtime.mkdir(mode=0o700)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"CBTOP_RUNTIME_DIR": str(self.runtime)}

    @contextmanager
    def ranks(self, program: Path, stop: Path) -> Iterator[None]:
        """Run the node's ranks of the program under `cbtop run`, each as a launcher of another node would."""
        with ExitStack() as stack:
            for local in range(RANKS_OF_A_NODE):
                variables = {
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": PORT,
                    "WORLD_SIZE": str(RANKS_OF_A_NODE * len(NAMES)),
                    "RANK": str(RANKS_OF_A_NODE * self.number + local),
                    "LOCAL_RANK": str(local),
                    "GLOO_SOCKET_IFNAME": DEVICES[self.number],
                }
                process = stack.enter_context(
                    subprocess.Popen(
                        [*self.prefix, *CBTOP, "run", "--quiet", "--overhead", "100%", "--",
                         sys.executable, str(program), str(SLOW_RANK), str(stop)],
                        env=self.environment | variables, stdin=subprocess.DEVNULL, start_new_session=True,
                    )
                )  # fmt: skip
                stack.callback(_end, process)
            yield


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def test_one_screen_has_all_ranks_of_two_nodes_and_names_the_slow_one(tmp_path: Path) -> None:
    program, stop = tmp_path / "main.py", tmp_path / "stop"
    program.write_text(PARALLEL)
    with two_hosts() as prefixes, ExitStack() as stack:
        nodes = [Node(number, tmp_path / name, prefixes[number]) for number, name in enumerate(NAMES)]
        _skip_without_names(nodes[0])
        viewer = nodes[0].new("viewer")
        connect: list[str] = []
        for node in nodes:
            server = node.new("daemon")
            node.keys("allow", "head", viewer)
            endpoint = stack.enter_context(node.daemon("--bind", f"tcp://{ADDRESSES[node.number]}:0"))
            connect += ["--connect", endpoint, "--server-key", server]
        for node in nodes:
            stack.enter_context(node.ranks(program, stop))
        look = ("--headless", "--once", "--window=all", *PATIENTLY, *connect)

        def all_ranks() -> list[dict[str, Any]]:
            done = nodes[0].cbtop(*look, "--format", "json")
            sources = json.loads(done.stdout)["sources"] if done.returncode == 0 else []
            return sources if len(sources) == 4 and all(one["straggler"] for one in sources) else []

        sources = eventually(all_ranks)
        merged = nodes[0].cbtop(*look, "--merge", "ranks", "--view", "bricks")
        stop.touch()
    assert sorted((one["rank"], one["world_size"], one["host"]) for one in sources) == [
        (0, 4, "node-a"),
        (1, 4, "node-a"),
        (2, 4, "node-b"),
        (3, 4, "node-b"),
    ]
    for source in sources:
        assert source["straggler"]["rank"] == SLOW_RANK
        assert source["straggler"]["busy_us"] >= LAYERS * 4000
    assert merged.returncode == 0, merged.stderr
    head = next(line for line in merged.stdout.splitlines() if line.startswith("µs a step"))
    assert [word for word in head.split() if word.isdecimal()][:4] == ["0", "1", "2", "3"]


def _skip_without_names(node: Node) -> None:
    done = subprocess.run([*node.prefix, "true"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        pytest.skip(f"two nodes need host names of their own: {done.stderr.strip()}")
