"""The manifests in examples/kubernetes: their commands are valid, and their containers share what they must."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'cbtop[compute]'")

import yaml

from cbtop.cli import _parsed
from tests.integration.hosts import CBTOP, HOST, eventually

FOLDER = Path(__file__).parents[1] / "examples" / "kubernetes"
PAGE = Path(__file__).parents[1] / "docs" / "kubernetes.md"
MANIFESTS = sorted(FOLDER.glob("*.yml"))


def _documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def _pod() -> dict[str, Any]:
    (deployment,) = _documents(FOLDER / "sidecar.yml")
    pod: dict[str, Any] = deployment["spec"]["template"]
    return pod


def _containers() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in _pod()["spec"]["containers"]}


def _words(container: dict[str, Any]) -> list[str]:
    return [*container["command"], *container.get("args", [])]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_names_its_kind_and_itself(path: Path) -> None:
    for document in _documents(path):
        assert document["apiVersion"]
        assert document["kind"]
        assert document["metadata"]["name"]
        assert document["spec"]


@pytest.mark.parametrize("name", ["server", "cbtop"])
def test_cbtop_parses_the_command_of_each_container(name: str) -> None:
    program, *arguments = _words(_containers()[name])
    assert program == "cbtop"
    assert all(isinstance(word, str) for word in arguments)
    _, options = _parsed(arguments)
    if name == "server":
        assert options.command[-5:] == ["vllm", "serve", "/models/llama", "--port", "8000"]
    else:
        assert options.metrics == "0.0.0.0:9464"


def test_the_containers_share_user_processes_and_a_directory_below_a_mount() -> None:
    spec = _pod()["spec"]
    assert spec["shareProcessNamespace"] is True
    assert spec["securityContext"]["runAsUser"]
    (volume,) = spec["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    for container in _containers().values():
        (directory,) = [one["value"] for one in container["env"] if one["name"] == "CBTOP_RUNTIME_DIR"]
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert PurePosixPath(mount["mountPath"]) in PurePosixPath(directory).parents
        assert "securityContext" not in container  # a container with another user could not open the rings


def test_prometheus_finds_the_port_and_the_label_of_the_sidecar() -> None:
    (monitor,) = _documents(FOLDER / "metrics.yml")
    labels = _pod()["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in _containers()["cbtop"]["ports"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert ports[endpoint["port"]] == 9464


def test_every_cbtop_command_on_the_page_is_valid() -> None:
    commands = re.findall(r"(?:-- |^|`)(cbtop (?:run|daemon|--)[^`\n#]*)", PAGE.read_text(), re.MULTILINE)
    whole = [
        command.split() for command in commands if command.strip() not in ("cbtop run --", "cbtop daemon --metrics")
    ]
    assert len(whole) >= 4
    for _, *arguments in whole:
        _parsed(arguments)


# A container has its own mounts, network and host name. It sees the shared directory and an empty /tmp.
CONTAINER = ("unshare", "--mount", "--net", "--ipc", "--uts", "--propagation", "private")
OWN_FILES = 'hostname "$1" && mount -t tmpfs tmpfs /tmp && ip link set lo up && shift && exec "$@"'


@contextmanager
def _container(name: str, shared: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"CBTOP_RUNTIME_DIR": str(shared / "cbtop"), "HOME": "/nonexistent"}
    with subprocess.Popen(
        [*CONTAINER, "sh", "-c", OWN_FILES, "sh", name, *command],
        env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def _refusal() -> str:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "there is no unshare(1) or ip(8)"
    done = subprocess.run(
        [*CONTAINER, "sh", "-c", OWN_FILES, "sh", "pod", "true"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip() if done.returncode else ""


@pytest.mark.slow
def test_a_sidecar_in_its_own_namespaces_serves_metrics_of_the_server() -> None:
    pytest.importorskip(
        "prometheus_client", reason="prometheus_client is not installed: pip install 'cbtop[metrics]'"
    )
    if why := _refusal():
        pytest.skip(f"containers need what this machine refuses: {why}")
    shared = Path("/dev/shm") / f"cbtop-test-{os.getpid()}"  # like an emptyDir with medium Memory
    shared.mkdir(mode=0o777)
    try:
        with ExitStack() as stack:
            server = stack.enter_context(_container("pod", shared, sys.executable, "-c", HOST, "-1"))
            sidecar = stack.enter_context(_container("pod", shared, *CBTOP, *_words(_containers()["cbtop"])[1:]))
            assert sidecar.stderr is not None
            assert "serving" in sidecar.stderr.readline()
            inside = ("nsenter", "--net", "--mount", "--target", str(sidecar.pid))
            scrape = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())"

            def metrics() -> str:
                done = subprocess.run(
                    [*inside, sys.executable, "-c", scrape], capture_output=True, text=True, check=False
                )
                return done.stdout if f'pid="{server.pid}"' in done.stdout else ""

            text = eventually(metrics)
            assert re.search(r'cbtop_source_state\{.*state="live".*\} 1', text)
            server.kill()
            server.wait()
            ended = r'cbtop_source_state\{.*state="(ended|gone)".*\} 1'
            eventually(lambda: re.search(ended, metrics()) is not None)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
