"""Bugs that take more memory."""

from functools import partial

from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.gradients import Gradients
from shardrt.parallel.step import StagedModel
from tests.museum.bug import Bug, Change
from tests.museum.programs import train, train_stages

__all__ = ["MEMORY"]

MEMORY = [
    Bug(
        reference="pytorch/pytorch#179443",
        title="[FSDP2] Fix HSDP O(n_layers) memory accumulation of reduce-scatter output buffers",
        did="A list kept a buffer of each layer's reduce-scatter until the end of backward.",
        check="memory",
        first=r"(rank .*\n)+first   .* bytes of full gradients, taken at shardrt/fsdp/setup.py",
        operation="a buffer of `full gradients`",
        changes=(
            Change(GradientPath.handing_over, "slot.give_back()", "self.group.kept = slot"),
            Change(
                Gradients.end_backward,
                "self._streams.compute.wait(group.gradient_ready)",
                "self._streams.compute.wait(group.gradient_ready), group.kept.give_back()",
            ),
        ),
        program=partial(train, shape=(2, 2), strategy="HYBRID_SHARD"),
        ranks=4,
    ),
    Bug(
        reference="pytorch/pytorch#196463",
        title="[pipelining] Allocate receive buffers just in time",
        did="Each micro-batch had receive buffers of its own, from the start.",
        check="memory",
        first=r"(rank .*\n)+first   .* bytes of B of 1, taken at shardrt/comm/links.py:\d+ by rank 0",
        operation="a buffer of the link `B of 1`",
        changes=(Change(StagedModel.__init__, "slots=facts.slots)", "slots=table.micro_batches)"),),
        program=partial(train_stages, micro_batches=8),
        each=True,
    ),
]
