"""Cuts the peers' models into stages on the ranks of a job, run by torch.distributed.pipelining.

As a PyTorch user would: each stage is the model without what others have, with as many blocks as they. A
weight that the first and the last stage use is on both; its gradients are added up by an all-reduce.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

SCHEDULES = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZB-H1": ScheduleInterleavedZeroBubble,  # which is that with one stage per rank
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
STAGES = {"ZBVZeroBubble": 2}  # per rank, as a V: r and 2p - 1 - r; others: 1, or in a loop


class Stage(nn.Module):
    """Stage `number` of `count` of a model: a copy without what others have. Names are those of the whole."""

    def __init__(self, whole: nn.Module, number: int, count: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == count - 1
        self.model = copy.deepcopy(whole)
        begin, end = (at * len(whole.blocks) // count for at in (number, number + 1))
        for name in [str(i) for i in range(len(whole.blocks)) if not begin <= i < end]:
            del self.model.blocks._modules[name]  # and by `del blocks[i]` the others would get other names
        kept = {*(whole.BEGIN if self.first else ()), *(whole.END if self.last else ())}
        for name in {*whole.BEGIN, *whole.END} - kept:
            setattr(self.model, name, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.model.begin(x) if self.first else x
        x = self.model.middle(x)
        return self.model.end(x) if self.last else x


class Pipeline(nn.Module):
    """This rank's stages, and the schedule that runs them."""

    def __init__(
        self, whole: nn.Module, schedule: str, micro_batches: int, stages_per_rank: int | None = None
    ) -> None:
        super().__init__()
        kind, size, rank = SCHEDULES[schedule], dist.get_world_size(), dist.get_rank()
        count = size * (stages_per_rank or STAGES.get(schedule, 1))
        own = (rank, count - 1 - rank) if schedule in STAGES else range(rank, count, size)
        self.stages = nn.ModuleList(Stage(whole, number, count) for number in own)
        stages = [
            PipelineStage(stage, number, count, torch.device("cpu"))
            for stage, number in zip(self.stages, own, strict=True)
        ]
        single = issubclass(kind, PipelineScheduleSingle)
        self.schedule = kind(stages[0] if single else stages, micro_batches, loss_fn=loss_of)
        self.tied = [
            getattr(stage.model, name).weight
            for stage in self.stages
            if stage.first or stage.last
            for name in sorted({*whole.BEGIN} & {*whole.END})
        ]
        ends = [0] if schedule in STAGES else [0, size - 1]  # ranks of the first stage and the last
        self.ends = dist.new_group(ends)

    @property
    def first(self) -> bool:
        return any(stage.first for stage in self.stages)

    @property
    def last(self) -> bool:
        return any(stage.last for stage in self.stages)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss of all micro-batches; gives it on the rank of the last stage, else 0."""
        losses: list[Tensor] = []
        given = [inputs] if self.first else []
        target = targets if self.last else None
        self.schedule.step(*given, target=target, losses=losses, return_outputs=False)
        if self.tied:
            total = torch.stack([weight.grad for weight in self.tied]).sum(0)
            dist.all_reduce(total, group=self.ends)
            for weight in self.tied:
                weight.grad.copy_(total)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank's stages, by their names in the whole model."""
        return {name: p for stage in self.stages for name, p in stage.model.named_parameters()}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over a micro-batch; the schedule divides by their number."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
