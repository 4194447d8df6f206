"""Bugs that take more memory."""

from functools import partial

from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.gradients import Gradients
from shardrt.parallel.step import StagedModel
from tests.museum.bug import Bug, Change
from tests.museum.programs import piped, train

MEMORY = [
    Bug(
        "pytorch/pytorch#179443",
        "[FSDP2] Fix HSDP O(n_layers) memory accumulation of reduce-scatter output buffers",
        "A list kept the output of each reduce-scatter until backward ended.",
        "memory",
        (
            Change(GradientPath.handing_over, "slot.give_back()", "self.group.kept = slot"),
            Change(
                Gradients.end_backward,
                "self._streams.compute.wait(group.gradient_ready)",
                "self._streams.compute.wait(group.gradient_ready), group.kept.give_back()",
            ),
        ),
        partial(train, (2, 2), strategy="HYBRID_SHARD"),
        "zzz",
        4,
    ),
    Bug(
        "pytorch/pytorch#196463",
        "[pipelining] Allocate receive buffers just in time",
        "Each micro-batch had buffers of its own for what it received, all from the start.",
        "memory",
        (Change(StagedModel.__init__, "slots=facts.slots)", "slots=table.micro_batches)"),),
        partial(piped, micro_batches=8),
        "zzz",
        how={"stands_for": {0: [0], 1: [1]}},
    ),
]
