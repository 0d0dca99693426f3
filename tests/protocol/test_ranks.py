"""Tests of a rank's number and job, which are read from the variables that launchers set."""

from __future__ import annotations

import pytest

from cbtop.protocol.ranks import MAX_RANKS, Ranks, ranks_of

LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}


@pytest.mark.parametrize("names", LAUNCHERS.values(), ids=LAUNCHERS)
def test_every_launcher_is_understood(names: tuple[str, str, str]) -> None:
    assert ranks_of(dict(zip(names, ("5", "1", "8"), strict=True))) == Ranks(5, 1, 8)


def test_the_launcher_nearest_to_the_process_is_believed() -> None:
    both = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}
    assert ranks_of(both) == Ranks(11, 3, 16)


@pytest.mark.parametrize("rank", ["", "-1", "one", "1.5", " 3", "٣", "8", str(MAX_RANKS + 1), "9" * 400])
def test_nonsense_was_not_said(rank: str) -> None:
    assert ranks_of({"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "8"}) == Ranks()


def test_a_rank_without_a_world_is_still_a_rank() -> None:
    assert ranks_of({"RANK": "3", "WORLD_SIZE": "many"}) == Ranks(3, None, None)
    assert ranks_of({"WORLD_SIZE": "8"}) == Ranks()


TORCH = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "101", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("common", "name"),
    [
        (TORCH | SLURM, "MASTER_ADDR"),
        (TORCH | SLURM, "MASTER_PORT"),
        (SLURM, "PMIX_NAMESPACE"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_STEP_ID"),
    ],
)
def test_what_a_launcher_sets_once_a_job_tells_two_jobs_apart(common: dict[str, str], name: str) -> None:
    ranks = [ranks_of({**common, "RANK": str(rank), name: said}) for rank in (0, 1) for said in ("7", "8")]
    assert len({one.job for one in ranks}) == 2
    assert ranks_of({"RANK": "0"}).job == ""
    assert ranks_of(common) == Ranks()


def test_a_job_of_torch_whose_nodes_are_steps_of_their_own_is_one_job() -> None:
    """On each node, srun starts torchrun separately. All of these torchruns are one job."""
    jobs = {ranks_of({**TORCH, **SLURM, "RANK": step, "SLURM_STEP_ID": step}).job for step in ("0", "1")}
    assert len(jobs) == 1
