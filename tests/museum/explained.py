"""Bugs that no check finds, and why."""

from typing import Any

import numpy as np

import shardrt
from shardrt import Tensor, nn
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.fsdp.options import full
from shardrt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardrt.parallel.conversion import Row
from tests.museum.bug import Bug, Change
from tests.museum.programs import train, train_tensor_parallel

__all__ = ["EXPLAINED"]


def saved_adapter() -> Any:
    """An adapter's array in a full state dict: it is all ones."""
    net = nn.add_lora(nn.Sequential(nn.Linear(8, 8)), 2)
    adapter = net[0].lora_b
    adapter.data[:] = 1
    name = next(name for name, parameter in net.named_parameters() if parameter is adapter)
    return full_state_dict(fully_shard(net)).get(name)  # of rank 0 alone


def output() -> Any:
    """What two linear layers give that are split over the ranks."""
    shardrt.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", None, ("tp",)), plan)
    net[1].bias.data[:] = 1
    return net(Tensor(np.ones((1, 4), np.float32))).numpy()


EXPLAINED = [
    Bug(
        reference="huggingface/accelerate#4206",
        title="Fix FSDP2/ PEFT/FULL_STATE_DICT dropping every rank's adapter shard except rank 0",
        did="A saved adapter had the shard of rank 0 alone.",
        check="",
        first="",
        changes=(
            Change(
                full._gathered,
                "ranks.control.all_gather(as_sent(whole), stream=streams.compute, tag=group.label)",
                "whole[stop:] = 0",
            ),
        ),
        program=train,
        why="a file is no part of a step",
        run=saved_adapter,
        noticed_by="tests/checkpoint/test_weights.py",
    ),
    Bug(
        reference="pytorch/torchtitan#4245",
        title="[Bug][GPT-OSS][spmd_types] Grouped-expert output bias is multiplied by TP degree",
        did="Each rank of the tensor axis added the whole bias before their outputs were summed.",
        check="",
        first="",
        changes=(
            Change(
                Row.run,
                'state["bias"] = None  # the bias is added to the sum, not to each summand',
                "return F.cast(self.axis.leave(forward(x)), x.value_dtype.name)",
            ),
        ),
        program=train_tensor_parallel,
        why="another forward, with right gradients",
        run=output,
        noticed_by="tests/parallel/test_tensor.py",
        ranks=4,
    ),
]
