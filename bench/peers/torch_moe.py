"""A mixture of experts over ranks as a PyTorch user writes it: all_to_all_single, and a product per expert.

`Experts` are as many nn.Linear as there are ("linears"), or the weights of all side by side and
torch.nn.functional.grouped_mm ("grouped_mm"), which PyTorch's CPU build has as a loop of its own. The gate
lies before what it opens, as in shardrt.nn.Experts.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WAYS = ("linears", "grouped_mm")


class Grouped(nn.Module):
    """A linear layer for each group of rows: (rows, inputs), counts -> (rows, outputs)."""

    def __init__(self, weight: Tensor, way: str) -> None:
        """weight: (groups, outputs, inputs), whose values are copied."""
        super().__init__()
        self.way = way
        parts = [weight.clone()] if way == "grouped_mm" else [part.clone() for part in weight]
        self.weights = nn.ParameterList(parts)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        if self.way == "grouped_mm":
            ends = torch.tensor(counts).cumsum(0).to(torch.int32)
            return F.grouped_mm(rows, self.weights[0].transpose(1, 2), offs=ends)
        parts = zip(rows.split(counts), self.weights, strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])

    def gradient(self) -> Tensor:
        """(groups, outputs, inputs); of an expert without rows, zeros."""
        if self.way == "grouped_mm":
            return self.weights[0].grad
        return torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights])


class Experts(nn.Module):
    """SwiGLU of each expert."""

    def __init__(self, up: Tensor, down: Tensor, way: str) -> None:
        super().__init__()
        self.up, self.down = Grouped(up, way), Grouped(down, way)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        gate, up = self.up(rows, counts).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, counts)


class Exchange(torch.autograd.Function):
    """Rows to the ranks and from them, by counts; the gradient goes the other way round."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.counts = sent, received
        return exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        sent, received = ctx.counts
        return exchanged(dy, received, sent), None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent)
    return result


class MoE(nn.Module):
    """(tokens, width) -> ((tokens, width), balance loss): shares of the k largest softmaxes.

    Each rank has the experts that it is given, and tokens of its own.
    """

    def __init__(self, router: Tensor, up: Tensor, down: Tensor, k: int, way: str) -> None:
        """router: (experts of all ranks, width); up, down: of this rank's experts."""
        super().__init__()
        self.k, self.router = k, nn.Parameter(router.clone())
        self.experts = Experts(up, down, way)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        (tokens, width), count = x.shape, len(self.router)
        probabilities = F.linear(x, self.router).softmax(-1)
        weights, experts = probabilities.topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = experts.flatten()
        counts = chosen.bincount(minlength=count)
        order = chosen.argsort(stable=True)
        rows = self.sent_round(x.index_select(0, order // self.k), counts)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        each = rows.index_select(0, places).view(tokens, self.k, width)
        y = torch.bmm(weights.unsqueeze(1), each).squeeze(1)
        return y, (counts * probabilities.sum(0)).sum() * (count / (self.k * tokens**2))

    def sent_round(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in order of experts, to the ranks of these and back."""
        ranks = dist.get_world_size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, theirs))
        by_source = theirs.view(ranks, -1)
        arrived = Exchange.apply(rows, sent, received)
        parts = arrived.split(theirs.tolist())
        each = by_source.shape[1]
        by_expert = torch.cat([parts[rank * each + e] for e in range(each) for rank in range(ranks)])
        parts = self.experts(by_expert, by_source.sum(0).tolist()).split(by_source.t().flatten().tolist())
        given = torch.cat([parts[e * ranks + rank] for rank in range(ranks) for e in range(each)])
        return Exchange.apply(given, received, sent)

    def sum_router_gradient(self) -> None:
        """Over the ranks, whose tokens differ; an expert's gradient is whole on its rank."""
        dist.all_reduce(self.router.grad)
