"""What features of tests/fsdp/test_pairs.py issue in three steps, recorded: nothing runs."""

import warnings
from functools import partial

import pytest

from shardrt.comm import init_device_mesh
from shardrt.device.cuda import CUDADevice
from shardrt.simulate.script import record_of
from tests.fsdp import paired
from tests.fsdp.test_pairs import options_of, ranks_for

# Values are made up, so no checkpoint can be read back.
LEFT_OUT = {"save and load"}
IN_TREES = {"world-invariant", "tensor-invariant"}  # sums over NCCL have to be made by the fixed tree


def recorded(names, directory, like=CUDADevice):
    """The programs of rank 0, for all ranks; of pipelines, of each rank."""
    names = tuple(name for name in names if name not in LEFT_OUT)
    ranks = int(ranks_for(names))
    each = {rank: [rank] for rank in range(ranks)} if "pipeline" in names else {0: range(ranks)}
    mesh = partial(init_device_mesh, reduction="tree" if IN_TREES & set(names) else "nccl")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # unused units do
        patch.setattr(paired, "init_device_mesh", mesh)
        return record_of(
            partial(paired.train, options_of(names), directory), ranks, stands_for=each, like=like
        )
