"""Which of several processes that work together a process is, and of which job, as its launcher said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAX_RANKS = 1 << 20

# Rank, local rank and world size as launchers say them; the one that is nearest to the process comes first.
_RANK_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun, deepspeed, accelerate
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # mpirun of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),  # srun
)
# What is the same in all processes of a job, and differs between jobs that run at a time. The first that is set
# counts: our own, where torch's processes meet (each node of such a job may be a step of its own to Slurm), what PMIx
# calls the job, and what Slurm does.
JOB_VARIABLE = "CBTOP_JOB"
_JOB_VARIABLES = (
    (JOB_VARIABLE,),
    ("MASTER_ADDR", "MASTER_PORT"),
    ("PMIX_NAMESPACE",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


class Ranks(NamedTuple):
    """Which of how many a process is, and of which job; None and "" are what its launcher did not say."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    job: str = ""


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """What the first launcher that named a rank said. What makes no sense was not said."""
    for names in _RANK_VARIABLES:
        rank, local_rank, world_size = (_small_number(environment.get(name, "")) for name in names)
        world_size = world_size or None
        if rank is not None and (world_size is None or rank < world_size):
            return Ranks(rank, local_rank, world_size, _job_of(environment))
    return Ranks()


def _job_of(environment: Mapping[str, str]) -> str:
    said = ([environment.get(name, "") for name in names] for names in _JOB_VARIABLES)
    return next((":".join(values) for values in said if any(values)), "")


def _small_number(text: str) -> int | None:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else MAX_RANKS + 1
    return value if value <= MAX_RANKS else None
