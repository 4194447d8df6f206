"""A task as srun starts it: `mpirun ... python as_srun.py COMMAND...`.

What mpirun says of ranks, beyond what their MPI itself needs to meet, goes, and Slurm's variables come. (With
--mpi=pmi2 a task has PMI_RANK and PMI_SIZE besides, with --mpi=pmix neither.)
"""

import os
import sys

_OF_MPIRUN = ("MPI_LOCAL", "OMPI_COMM_WORLD_", "HYDRA_")
_FACTS = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *[tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))],
)


def main(command: list[str]) -> None:
    names = next(names for names in _FACTS if names[0] in os.environ)
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(rank // local_size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"{local_size}(x{size // local_size})",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_MPIRUN)}
    os.execvpe(command[0], command, kept | slurm)


if __name__ == "__main__":
    main(sys.argv[1:])
