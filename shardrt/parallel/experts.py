"""Experts that are split over ranks: each rank has some, and rows travel to their experts' ranks and back.

(Lepikhin et al., GShard, 2020.) Every rank has its own tokens, a part of the batch, as in data
parallelism. The rows that an expert gets lie in order of (source rank, token): they are those that one rank
would have, with the tokens of all of them in order of rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

import numpy as np

from shardrt import device
from shardrt import functional as F
from shardrt.comm.mesh import DeviceMesh
from shardrt.functional._arrays import empty
from shardrt.functional.collective import all_to_all_rows, named
from shardrt.functional.route import ExpertOrder
from shardrt.nn.extents import contiguous
from shardrt.nn.module import Module
from shardrt.nn.moe import Experts
from shardrt.nn.parameter import Parameter
from shardrt.nn.parameter_placement import PARTIAL, SHARD, ParameterPlacement, set_placement
from shardrt.parallel.axis import Axis, batch_of
from shardrt.parallel.conversion import Converting
from shardrt.parallel.styles import Style, check_alone
from shardrt.tensor import Tensor

Array = Any


@dataclass(frozen=True)
class ExpertParallel(Style):
    """An nn.Experts of which each rank has E / n experts, neighbours; rows go to the ranks of theirs.

    The ranks of the axis have different tokens: other samples, other parts of them by ContextParallel, or by
    TokenParallel. A plan with this style has no other; plans for those axes come before it or after it. All
    that it does not name is left to fully_shard, along axes with the data of all ranks
    (docs/explanation/experts.md).

    Attributes:
        planned: how many rows a memory plan gives each rank where nothing limits them, as a multiple of those
            in balance; at most all rows of all ranks. See most_rows. With a capacity the plan is exact.
    """

    planned: float = 2.0
    modules = (Experts,)

    def __post_init__(self) -> None:
        if not (isfinite(self.planned) and self.planned >= 1):
            raise ValueError(f"ExpertParallel: planned must be 1 or more, got {self.planned}")

    def apply(self, module: Module, axis: Axis) -> None:
        if module.n_experts % axis.size:
            raise ValueError(
                f"ExpertParallel: {axis.size} ranks must divide the {module.n_experts} experts of "
                f"{module.name!r}"
            )
        for weight in module._parameters.values():
            _cut_experts(weight, axis)
        module.wrap_forward(ToExperts(axis, self.planned))


def spread_experts(model: Module, mesh: DeviceMesh, modules: Sequence[tuple[Module, Style]]) -> None:
    """parallelize_module for a plan of this style.

    Raises:
        ValueError: for styles that can't be combined.
    """
    check_alone(ExpertParallel, modules, "on an axis whose ranks have different tokens")
    planned = [parameter.placement for module, _ in modules for parameter in module._parameters.values()]
    for placement in planned:
        if placement is not None and placement.own_data:
            raise ValueError(f"parallelize_module: the experts are split along {placement.mesh!r} already")
        if (
            placement is not None
            and placement.kind != PARTIAL
            or placement is None
            and "tp" in (mesh.mesh_dim_names or ())
        ):
            same = mesh if placement is None else placement.mesh
            raise ValueError(
                f"parallelize_module: the ranks of {same!r} have the same tokens; give the nn.MoE around the "
                "experts TokenParallel() in a plan along that axis first"
            )
    for role in ("tensor", "control"):
        mesh.communicator(role)
    mesh.root.communicator("control")
    axis = Axis(mesh, False, batch_of(model, mesh.root))
    for module, style in modules:
        style.apply(module, axis)


def _cut_experts(weight: Parameter, axis: Axis) -> None:
    """Each rank has the weights of its own experts, in order."""
    whole, each = weight.shape, weight.shape[0] // axis.size
    size = weight.size // axis.size
    parts = tuple(contiguous(rank * size, size) for rank in range(axis.size))
    beside = () if weight.placement is None else weight.placement.axes
    set_placement(
        weight,
        ParameterPlacement(SHARD, axis.mesh, whole, (each, *whole[1:]), parts, own_data=True, beside=beside),
    )


def expert_plan(model: Module, planned: float = ExpertParallel.planned) -> dict[str, Style]:
    """The plan for a model: every nn.Experts in it.

    Args:
        planned: as of ExpertParallel.

    Raises:
        TypeError: for a model without experts.
    """
    style = ExpertParallel(planned)
    plan = {path: style for path, module in model.named_modules() if style.fits(module)}
    if not plan:
        raise TypeError(f"expert_plan: a {type(model).__name__} has no nn.Experts to split")
    return plan


def most_rows(model: Module) -> dict[str, float]:
    """Name of each split nn.Experts -> the most rows this rank got, as a multiple of the rows it sent.

    Of all forwards since parallelize_module: 1 in balance. A value above ExpertParallel.planned needs
    more memory than was planned.
    """
    found = ((name, module.around(ToExperts)) for name, module in model.named_modules())
    return {name: around.most_rows for name, around in found if around is not None}


class ToExperts(Converting):
    """Around Experts: rows go to the ranks of their experts, and the experts' outputs come back."""

    def __init__(self, axis: Axis, planned: float) -> None:
        super().__init__(axis)
        self.most_rows = 0.0
        self._planned = planned

    def run(
        self, module: Module, forward: Callable, /, rows: Tensor, counts: np.ndarray, *capacity: int
    ) -> Tensor:
        ranks, limit = self.axis.communicator, 0
        if capacity:  # as much memory whatever is chosen
            limit = ranks.size * min(counts.size // ranks.size * capacity[0], rows.shape[0])
        theirs = self._counts_of_all(np.ascontiguousarray(counts), rows.shape[0], limit, module)
        sent, received = (each.reshape(ranks.size, -1).sum(1) for each in (counts, theirs))
        most = max(limit, int(received.sum()))
        if _by_micro_batch(module):  # a rank has one: its rows stay together, with sums of their own
            arrived = all_to_all_rows(rows, ranks, sent, received, rows=most)
            return all_to_all_rows(forward(arrived, theirs), ranks, received, sent, rows=rows.shape[0])
        there, back = _by_expert(theirs, most)
        arrived = all_to_all_rows(rows, ranks, sent, received, rows=most)
        given = forward(F.dispatch(arrived, there), there.counts)
        del arrived
        return all_to_all_rows(F.dispatch(given, back), ranks, received, sent, rows=rows.shape[0])

    def _counts_of_all(self, counts: np.ndarray, rows: int, limit: int, module: Module) -> np.ndarray:
        """int64 (ranks, experts here): how many rows each rank has for each expert of this one.

        In a dry run it is the planned number: all of `limit`, or where that is 0 a multiple of this
        rank's rows.
        """
        n, here, control = self.axis.size, device.current(), self.axis.mesh.communicator("control")
        theirs = np.empty_like(counts)
        control.all_to_all(theirs, counts, stream=here.current_stream, tag=named("counts", module))
        here.wait_here()
        planned = self._planned_counts(counts, limit or min(ceil(rows * self._planned), rows * n))
        theirs = here.read(theirs, planned)
        if theirs is not planned and rows:
            self.most_rows = max(self.most_rows, float(theirs.sum() / rows))
        return theirs.reshape(n, -1)

    def _planned_counts(self, counts: np.ndarray, total: int) -> np.ndarray:
        """`total` rows: those that this rank sends itself, and the others' alike."""
        own = counts.reshape(self.axis.size, -1)[self.axis.rank]
        others = counts.size - own.size
        even = np.diff((total - own.sum()) * np.arange(others + 1) // others)
        return np.insert(even, self.axis.rank * own.size, own)


def _by_micro_batch(module: Module) -> bool:
    """Whether gradients of micro-batches are added by a tree (set_world_invariant)."""
    return module.up.storage.exact_norm


def _by_expert(counts: np.ndarray, rows: int) -> tuple[ExpertOrder, ExpertOrder]:
    """(to the order of experts, back) of rows in order of (source rank, expert); counts (ranks, experts).

    rows: how many there are, with those after the last that is used.
    """
    starts = np.cumsum(counts).reshape(counts.shape) - counts
    by_expert = counts.T.reshape(-1)
    first = np.repeat(starts.T.reshape(-1) - (np.cumsum(by_expert) - by_expert), by_expert)
    used = np.arange(first.size)
    copies = np.full(rows, -1, np.int64)
    copies[: used.size] = first + used
    places = np.full(rows, -1, np.int64)
    places[copies[: used.size]] = used
    copies, places, totals = _on_device(copies), _on_device(places), counts.sum(0)
    there = ExpertOrder(places.reshape(-1, 1), copies, totals, totals)
    return there, ExpertOrder(copies.reshape(-1, 1), places, totals, totals)


def _on_device(values: np.ndarray) -> Array:
    """From the device's pool, so that plans of memory count it."""
    array = empty(values.shape, values.dtype)
    if values.size:
        device.current().copy(array, values)
    return array
