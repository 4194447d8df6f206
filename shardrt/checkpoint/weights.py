"""Weights as one safetensors file, written under a temporary name and renamed when it is complete."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.checkpoints import CheckpointError
from shardrt.checkpoint.state import failures, full_state_dict
from shardrt.checkpoint.store import MANIFEST, Store
from shardrt.comm import objects
from shardrt.nn.module import Module
from shardrt.nn.ranks import everyone
from shardrt.untrusted import open_regular

WEIGHTS = "model.safetensors"


def save(directory: str | Path, model: Module, *, step: int = 0) -> None:
    """Write the model's weights, gathered on rank 0, to `directory`/model.safetensors.

    Collective.

    Makes the directory if needed. The file's metadata has `step`. When this returns, every rank of a sharded
    model sees the file.

    Raises:
        CheckpointError: on every rank, if writing fails; then an earlier file is unchanged.

    Example:
        >>> import tempfile
        >>> from shardrt import nn
        >>> from shardrt.checkpoint import load, save
        >>> from shardrt.fsdp import fully_shard
        >>> model = fully_shard(nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, model, step=7)
        ...     load(folder, model)
        7
    """
    state, error = full_state_dict(model), None
    if state:
        try:
            _write(Path(directory) / WEIGHTS, state, step)
        except OSError as failed:
            error = failed
    if errors := failures(model, error):
        raise CheckpointError(f"{directory} was not written: {'; '.join(errors)}") from error


def _write(path: Path, state: dict[str, np.ndarray], step: int) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    # safetensors silently stores non-C-contiguous arrays wrongly; these copies are C-contiguous.
    # One entry: the library writes several in random order, so equal weights would give different bytes.
    try:
        save_file(state, temporary, metadata={"step": str(step)})
    except SafetensorError as error:  # the library's form of an OSError
        raise OSError(f"{temporary}: {error}") from None
    os.chmod(temporary, 0o666 & ~_umask())  # only the owner may read the library's files
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(directory: str | Path, model: Module, *, broadcast_from_rank0: bool = False) -> int:
    """Set the model's weights from `directory`/model.safetensors; returns their step.

    Collective.

    Every rank reads the file and keeps its pieces, one parameter at a time.

    Args:
        broadcast_from_rank0: rank 0 alone reads it, and sends it array by array: for a file system that only
            rank 0 sees.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a damaged file, or names or shapes that differ from the model's.
        CheckpointError: on every rank, if rank 0 can't open the file with broadcast_from_rank0.

    Example:
        >>> import tempfile
        >>> from shardrt import nn
        >>> from shardrt.checkpoint import load, save
        >>> model = nn.Linear(8, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, model, step=7)
        ...     load(folder, model)
        7
    """
    from safetensors import SafetensorError

    path = Path(directory) / WEIGHTS
    control = everyone(model, "load") if broadcast_from_rank0 else None
    try:
        if control is None:
            with _opened(path) as file:
                model.load_state_dict(file)
                return file.step
        with ExitStack() as stack:
            file = error = None
            if control.rank == 0:
                try:
                    file = stack.enter_context(_opened(path))
                except (OSError, SafetensorError) as failed:
                    error = failed
            if errors := objects.failures(control, error):
                raise CheckpointError(f"{path} was not read: {errors[0]}") from error
            model.load_state_dict(file, broadcast_from_rank0=True)
            return objects.broadcast_object(control, file and file.step)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator["_Tensors"]:
    from safetensors import safe_open

    folder = path.parent
    if not path.exists() and ((folder / MANIFEST).exists() or Store(folder).checkpoints()):
        raise FileNotFoundError(
            f"{path} is not there, but checkpoints of a run are: CheckpointManager(folder, model, optimizer, "
            "mesh).restore(path, weights_only=True) reads those"
        )
    open_regular(path).close()  # the library would block on a pipe
    with safe_open(path, "np") as file:
        yield _Tensors(file)


def _umask() -> int:
    """The umask of this process; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _Tensors(Mapping):
    """An open safetensors file as a mapping that reads a tensor on access."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def step(self) -> int:
        """The `step` given to `save`; 0 if the file of another program has no valid step."""
        text = (self._file.metadata() or {}).get("step", "0")
        return int(text) if text.isdecimal() and len(text) < 19 else 0

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())
