"""Checks of quantised collectives: settings that do not fit are refused, those without an effect are said."""

import warnings

import numpy as np

from shardrt.fsdp.api import Keyed
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.options.quantised import config_of, requested
from shardrt.fsdp.options.quantised_copies import copies_config_of
from shardrt.fsdp.policy import Settings
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module


def check_quantised(modules: list[Module], settings: Settings, parameters: Keyed) -> None:
    """Raise ValueError for settings that quantised collectives do not support; warn where they do nothing."""
    how = requested(settings)
    if how is None:
        return
    wrong = _offloaded(settings) or _whole(settings) or _uneven(settings, how) or _copies(settings, how)
    if wrong:
        raise ValueError(f"fully_shard: mp_policy has quantised collectives, but {wrong}")
    if settings.mesh.root.rank == 0 and (message := _idle(settings, how)):
        warnings.warn(f"fully_shard: {message}", stacklevel=1)  # one place, so Python shows it once


def _offloaded(settings: Settings) -> str:
    if not settings.offloaded.parameters:
        return ""
    return "the parameters are offloaded to the host; use one of the two"


def _whole(settings: Settings) -> str:
    if settings.strategy.rules.shard_over != "none":
        return ""
    return (
        f"{settings.strategy.name} keeps whole parameters on each rank; use FULL_SHARD, or HYBRID_SHARD with "
        "a copy of all shards on each host"
    )


def _hosts(settings: Settings, how: Quantisation) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of the hosts of the mesh, ranks of the mesh on each)."""
    return np.unique(settings.mesh.ranks // how.ranks_per_host(settings.mesh), return_counts=True)


def _uneven(settings: Settings, how: Quantisation) -> str:
    _, counts = _hosts(settings, how)
    if len(set(counts.tolist())) == 1:
        return ""
    return f"its hosts have {', '.join(map(str, counts.tolist()))} ranks; each must have as many"


def _copies(settings: Settings, how: Quantisation) -> str:
    """Copies must be one on each host, or all on one."""
    hosts, counts = _hosts(settings, how)
    if settings.strategy.rules.shard_over != "last axis" or len(hosts) == 1 or settings.mesh.shape[0] == 1:
        return ""
    if counts[0] != settings.mesh.shape[1]:
        return (
            f"{settings.strategy.name} on a mesh {settings.mesh.shape} has not one copy of all shards on "
            f"each host of {counts[0]} ranks; use a mesh {(len(hosts), int(counts[0]))}, or FULL_SHARD"
        )
    if how.within_hosts:
        return f"{settings.strategy.name} sums in float32 within hosts; leave within_hosts out"
    return ""


def _idle(settings: Settings, how: Quantisation) -> str:
    """What has no effect here."""
    hosts, _ = _hosts(settings, how)
    if len(hosts) == 1:
        return (
            "collectives are not quantised, because all ranks share one host's memory, where it takes longer "
            "than it saves"
        )
    if settings.strategy.rules.shard_over == "last axis" and how.gather_bits and settings.mesh.shape[0] > 1:
        return f"parameters are not quantised, because {settings.strategy.name} gathers them within each host"
    return ""


def check_invariance(units: list[Unit]) -> None:
    """Raise ValueError for units that are quantised and must not depend on the number of ranks."""
    for unit in units:
        if unit.choices.micro_batches is not None and any(
            config_of(group) or copies_config_of(group) for group in unit.groups
        ):
            raise ValueError(
                f"set_world_invariant: unit {unit.label} has quantised collectives, whose blocks depend on "
                "the number of ranks; use one of the two"
            )
