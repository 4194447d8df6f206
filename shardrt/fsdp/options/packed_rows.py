"""PackedGradient: sends only the trained parameters' gradients, if a group trains only some parameters.

The full gradients of the trained parameters lie in one slot, one after the other. The buffer that is sent has
one row for each rank: the elements of the gradients that belong to the rank's shard, packed together. The
reduce-scatter sums rows, and each rank copies its row to the sharded gradient.

A row may begin with one flag for each parameter: 1 if this rank has used it. The summed flags tell every rank
how many ranks have used the parameter (set_find_unused_parameters).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device.arena import Slot
from shardrt.fsdp import collectives
from shardrt.fsdp.buffers import PlanInputs, Specs, alike, gradient_dtype, share
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout, aligned
from shardrt.fsdp.setup import units_for
from shardrt.fsdp.whole_gradient import WholeGradient, path_of
from shardrt.nn.module import Module

Array = Any


@dataclass(frozen=True)
class Move:
    """`count` elements, at `source` in the full gradients, at `place` in the row, at `start` in the shard."""

    source: int
    place: int
    start: int
    count: int


@dataclass(frozen=True)
class Rows:
    """The layout of packed gradients.

    Elements of a row that belong to no move are never read.

    Attributes:
        offsets: position of a trained parameter -> where its full gradient begins in the slot.
        gaps: (start, stop) of ranges of the slot between gradients that are sent with them.
        full: elements of the slot.
        size: elements of a row.
        moves: for each shard, the ranges that its row has.
        uses: number of flags at the beginning of a row.
    """

    offsets: dict[int, int]
    gaps: tuple[tuple[int, int], ...]
    full: int
    moves: tuple[tuple[Move, ...], ...]
    size: int
    uses: int

    @classmethod
    def plan(cls, layout: Layout, trained: Collection[int], report_uses: bool) -> "Rows | None":
        """Rows for the parameters at the positions `trained`; None if rows would be as long as shards.

        Args:
            report_uses: rows begin with flags.
        """
        runs = _runs(sorted(trained))
        uses = len(layout.entries) if report_uses else 0
        offsets: dict[int, int] = {}
        gaps: list[tuple[int, int]] = []
        rows: list[list[Move]] = [[] for _ in range(layout.shards)]
        ends, full = [aligned(uses)] * layout.shards, 0
        for run in runs:
            begin, stop = layout.entries[run[0]].offset, layout.entries[run[-1]].stop
            shift = full - begin
            offsets |= {position: layout.entries[position].offset + shift for position in run}
            gaps += [(layout.entries[p].stop + shift, layout.entries[p + 1].offset + shift) for p in run[:-1]]
            for shard in range(layout.shards):
                low, high = layout.shard_range(shard)
                first, last = max(begin, low), min(stop, high)
                if first < last:
                    rows[shard].append(Move(first + shift, ends[shard], first - low, last - first))
                    ends[shard] = aligned(ends[shard] + last - first)
            full = aligned(stop + shift)
        size = aligned(-(-max(16, *ends) // layout.copies)) * layout.copies
        if not report_uses and size >= layout.shard_size:
            return None
        gaps = [(start, stop) for start, stop in gaps if start < stop]
        return cls(offsets, tuple(gaps), max(full, size), tuple(map(tuple, rows)), size, uses)

    @property
    def total(self) -> int:
        """Elements of all rows together."""
        return len(self.moves) * self.size

    def views(self, array: Array, layout: Layout) -> dict[int, Array]:
        """Position of a trained parameter -> the view of `array` for its full gradient, in its shape."""
        shapes = {position: layout.entries[position].shape for position in self.offsets}
        return {
            position: array[offset : offset + prod(shapes[position])].reshape(shapes[position])
            for position, offset in self.offsets.items()
        }


class PackedGradient(WholeGradient):
    """The full gradients of the trained parameters in one slot. They are sent in packed rows."""

    packs = True

    def __init__(self, group: ParameterGroup, layout: Layout, rows: Rows) -> None:
        super().__init__(group, layout)
        self.rows = rows
        self.full, self.sent, self.kept, self.uses = rows.full, rows.total, rows.size, rows.uses
        self._views: dict[int, Array] = {}

    @classmethod
    def choose(cls, group: ParameterGroup, layout: Layout, slot: int | None) -> "PackedGradient | None":
        if len(group.trained) == len(group.parameters) and not group.finds_unused:
            return None
        rows = Rows.plan(layout, group.trained, group.finds_unused)
        return None if rows is None else cls(group, layout, rows)

    def open(self) -> None:
        super().open()
        self._views = self.rows.views(self.slot.array, self.layout)

    def _its_own_sum(self) -> None:
        """None: the sharded gradient has another order than the slot."""

    def view(self, position: int) -> Array:
        return self._views[position]

    @property
    def positions(self) -> Iterable[int]:
        return self.rows.offsets

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        return self.rows.gaps

    def send(self, slot: Slot, out: Array, accumulate: bool) -> None:
        group, streams, full = self.group, self.streams, slot.array[: self.full]
        kind = group.key.reduce if group.key.reduce in dtypes.LOW else ""
        wire = collectives.wire_of(group) if kind else group.arenas["packed"].slots[0].array
        wire = wire[: self.sent]
        used = np.array([position in self.written for position in range(self.uses)], full.dtype)
        streams.reduce.submit(self._pack, full, wire, kind, used)
        received = slot.array[: self.kept]
        collectives.sum_over_ranks(group, received, wire, kind, streams)
        scale, again = 1.0 / group.choices.divide_factor, group.sharded_gradient.reductions > 0
        streams.reduce.submit(self._unpack, received, out, scale, accumulate, again)

    def _pack(self, full: Array, wire: Array, kind: str, used: np.ndarray) -> None:
        """Fill the rows: first the flags, then the trained elements of each shard."""
        device = self.streams.device

        def put(start: int, source: Array) -> None:
            target = wire[start : start + source.size]
            if kind:
                device.kernels.cast.pack(source, target, kind)
            else:
                device.copy(target, source)

        # Elements between moves keep their old values: nothing reads them.
        sent = device.upload(used) if self.uses else None
        for shard, moves in enumerate(self.rows.moves):
            begin = shard * self.rows.size
            if sent is not None:
                put(begin, sent)
            for move in moves:
                put(begin + move.place, full[move.source : move.source + move.count])

    def _unpack(self, row: Array, out: Array, scale: float, accumulate: bool, again: bool) -> None:
        """Compute out = (out if `accumulate`) + scale * row, where the row has the element, else + 0.

        again: add the counts of uses to those of an earlier reduction.
        """
        add = self.streams.device.kernels.reduce.sum_into
        if not accumulate:
            out.fill(0)
        for move in self.rows.moves[self.group.ranks.rank]:
            target, received = out[move.start :], row[move.place :]
            add(target[: move.count], [received[: move.count]], scale, accumulate)
        if self.uses:
            add(self.group.sharded_gradient.uses, [row[: self.uses]], 1.0, again)


def plan_packed(
    specs: Specs, layouts: dict[ParameterGroup, Layout], groups: list[ParameterGroup], inputs: PlanInputs
) -> None:
    """Add the buffers for packed rows: one for all groups that are alike. 16-bit rows have "reduce_wire"."""
    exact = [g for g in groups if g.trainable and g.key.reduce not in dtypes.LOW]
    for members in alike(g for g in exact if isinstance(path_of(g, layouts[g]), PackedGradient)):
        count = max(path_of(g, layouts[g]).sent for g in members)
        share(specs, members, "packed", count, gradient_dtype(members[0], inputs), 1)


def set_find_unused_parameters(module: Module, find: bool = True) -> None:
    """Leave parameters without a gradient if no rank has used them since zero_grad, in all units of `module`.

    By default such a parameter has the gradient 0 if a rank used another parameter of its unit, so AdamW
    decays and moves it. With this setting its `grad` is None and optimizers skip it, as in PyTorch. If any
    rank used the parameter, it has a gradient on every rank. The setting takes effect at the next forward.

    It costs no collective: each reduction carries one number for each parameter. Full gradients are copied
    once more, into a buffer of the largest unit's size. A caller that asks for a gradient, as an optimizer
    does, waits for the reduction.

    Args:
        module: a sharded module. Call this on every rank.
        find: True to turn the setting on, False to turn it off.

    Raises:
        ValueError: if `module` has no unit.
        RuntimeError: if there are gradients; call zero_grad first.
    """
    found = units_for("set_find_unused_parameters", module)
    if any(group.has_partial_gradient for unit in found for group in unit.groups):
        raise RuntimeError("set_find_unused_parameters: the model has gradients; call zero_grad before it")
    for unit in found:
        unit.choices.find_unused = find


def _runs(positions: list[int]) -> list[list[int]]:
    """Split sorted positions into runs of neighbours."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
