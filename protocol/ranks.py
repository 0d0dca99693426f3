"""The rank of a process in its job, as the launcher has set it. The processes of a job work together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAX_RANKS = 1 << 20

# Variables of rank, local rank and world size, by launcher. One launcher may start another: srun, mpirun, torchrun.
_RANK_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun, deepspeed, accelerate
    # set by the program mpirun of Open MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # set by the program mpirun of MPICH and of Intel MPI
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),  # srun
)
# Variables that identify a job. They are equal in all processes of a job, and differ between jobs that run at the
# same time. The first variables that are set count, in this order: our own, the address where torch's processes meet,
# the job's name in PMIx, the job's name in Slurm. (Slurm may treat each node of a torch job as a separate step.)
JOB_VARIABLE = "CBTOP_JOB"
_JOB_VARIABLES = (
    (JOB_VARIABLE,),
    ("MASTER_ADDR", "MASTER_PORT"),
    ("PMIX_NAMESPACE",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


class Ranks(NamedTuple):
    """The rank, the number of processes and the job of a process.

    A value that the launcher did not set is None or "".
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    job: str = ""


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """Return the values of the first launcher that has set a valid rank. Ignores invalid values."""
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
