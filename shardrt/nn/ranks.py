"""The ranks that train a model, and which of them leads."""

from collections.abc import Iterable

from shardrt.comm import world
from shardrt.comm.protocol import Communicator
from shardrt.nn.module import Module
from shardrt.nn.storage import LocalStorage, Storage

__all__ = ["everyone", "is_leader", "is_stage_leader", "ranks_of", "shared"]


def everyone(model: Module, call: str) -> Communicator | None:
    """The communicator of all ranks that train `model`, for a `call` with broadcast_from_rank0.

    Collective at its first use.

    Returns:
        None for one rank.

    Raises:
        ValueError: for a model without a unit, which knows of no other ranks.
    """
    ranks = ranks_of(model)
    if ranks is None and not world.alone():
        raise ValueError(f"{call}: broadcast_from_rank0 needs a sharded model; call fully_shard first")
    return ranks


def ranks_of(model: Module) -> Communicator | None:
    """The communicator of all ranks that train `model`; None if it is neither sharded nor split."""
    for parameter in model.parameters():
        if parameter.pipeline is not None:
            return parameter.pipeline.everyone
        _ = parameter.shard  # there is a communicator once the storage is built
        if parameter.storage.everyone is not None:
            return parameter.storage.everyone
    return None


def is_leader(model: Module) -> bool:
    """Whether this rank is rank 0 of those that train `model`, or of all if the model is not sharded."""
    ranks = ranks_of(model)
    return world.first() if ranks is None else ranks.rank == 0


def is_stage_leader(model: Module) -> bool:
    """Like is_leader, among the ranks that have the same stages."""
    place = next((parameter.pipeline for parameter in model.parameters()), None)
    return is_leader(model) if place is None else place.is_leader


def shared(storages: Iterable[Storage]) -> bool:
    """Whether other ranks have other parts of the data, judged by these built storages."""
    apart = [storage for storage in storages if not isinstance(storage, LocalStorage)]
    return any(storage.everyone is not None and storage.everyone.size > 1 for storage in apart)
