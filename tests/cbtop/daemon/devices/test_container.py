from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cbtop.daemon.devices.container import ContainerLimits, Containers

PID = 42
VERSION_1 = "4:memory:/docker/abc\n3:cpuset:/\n1:cpu,cpuacct:/docker/abc\n0::/\n"
VERSION_2 = "0::/kube/pod/app\n"
NO_LIMIT = str((1 << 63) - 4096)


def machine(directory: Path, said: str, files: Mapping[str, str], own: str = "0::/none\n") -> Containers:
    """Return the containers of a made machine with one process, and this process in a different group."""
    processes, groups = directory / "proc", directory / "cgroup"
    for name, content in ((str(PID), said), ("self", own)):
        (processes / name).mkdir(parents=True)
        (processes / name / "cgroup").write_text(content)
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{content}\n")
    return Containers(processes, groups)


@pytest.mark.parametrize(
    ("said", "files", "limits"),
    [
        pytest.param(
            VERSION_2,
            {
                "kube/pod/app/cpu.max": "max 100000", "kube/pod/app/memory.max": "max",
                "kube/pod/cpu.max": "150000 100000", "kube/pod/memory.max": "2000000",
                "kube/pod/cpu.stat": "usage_usec 9\nnr_periods 50\nnr_throttled 20\nthrottled_usec 7",
                "kube/cpu.max": "400000 100000", "kube/memory.max": "8000000",
            },
            ContainerLimits(150.0, 2_000_000.0, (("kube/pod", 50, 20), ("kube", 0, 0))),
            id="the tightest group around a process, version 2",
        ),
        pytest.param(
            VERSION_1,
            {
                "cpu/docker/abc/cpu.cfs_quota_us": "50000", "cpu/docker/abc/cpu.cfs_period_us": "100000",
                "cpu/docker/abc/cpu.stat": "nr_periods 10\nnr_throttled 3\nthrottled_time 5",
                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
                "memory/docker/abc/memory.limit_in_bytes": "1000000", "memory/memory.limit_in_bytes": NO_LIMIT,
            },
            ContainerLimits(50.0, 1_000_000.0, (("cpu/docker/abc", 10, 3),)), id="version 1",
        ),
        pytest.param(VERSION_2, {"cgroup.procs": "1"}, ContainerLimits(), id="no limits"),
        pytest.param(VERSION_2, {"kube/cpu.max": "1 0"}, ContainerLimits(), id="a period of zero is no limit"),
    ],
)  # fmt: skip
def test_limits_are_those_of_the_control_groups_around_a_process(
    said: str, files: Mapping[str, str], limits: ContainerLimits, tmp_path: Path
) -> None:
    found = machine(tmp_path, said, files).limits(PID)
    groups = tmp_path / "cgroup"
    throttling = tuple((str(groups / group), *counts) for group, *counts in limits.throttling)
    assert found == ContainerLimits(limits.cpu_percent, limits.memory_bytes, throttling)


@pytest.mark.parametrize("said", [VERSION_1, "1:cpu:/docker/abc/inner\n0::/\n"])
def test_the_root_of_a_mount_is_the_group_of_this_container(said: str, tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}
    assert machine(tmp_path, said, files, own=VERSION_1).limits(PID).cpu_percent == 200


@pytest.mark.parametrize("said", ["0::/../other\n", "0::/../..\n"])
def test_a_process_outside_of_this_container_does_not_get_its_limit(said: str, tmp_path: Path) -> None:
    files = {"cpu.max": "200000 100000", "memory.max": "1000000"}
    assert machine(tmp_path, said, files, own="0::/\n").limits(PID) == ContainerLimits()


def test_a_neighbour_without_a_namespace_does_not_get_the_limit_of_here(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}
    said = VERSION_1.replace("abc", "other")
    assert machine(tmp_path, said, files, own=VERSION_1).limits(PID) == ContainerLimits()


def test_a_process_that_has_ended_has_no_limits(tmp_path: Path) -> None:
    assert machine(tmp_path, VERSION_2, {}).limits(PID + 1) == ContainerLimits()


def test_a_group_is_read_once_in_a_sample_and_again_in_the_next(tmp_path: Path) -> None:
    containers = machine(tmp_path, VERSION_2, {"kube/cpu.max": "100000 100000"})
    assert containers.limits(PID).cpu_percent == 100
    (tmp_path / "cgroup" / "kube" / "cpu.max").write_text("200000 100000")
    assert containers.limits(PID).cpu_percent == 100
    containers.begin()
    assert containers.limits(PID).cpu_percent == 200
