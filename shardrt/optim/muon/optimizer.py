"""Muon over sharded storages, with AdamW for parameters that are no hidden matrices.

(Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable
for LLM Training, 2025, for "match_rms_adamw".) The momentum is elementwise, so each rank keeps its part of
it, as of AdamW's moments. Only Newton-Schulz needs whole matrices: exchange.py brings each to one rank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import sqrt
from types import ModuleType
from typing import Any

import numpy as np

from shardrt import device, dtypes
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator
from shardrt.device import Array
from shardrt.nn.extents import Extents
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import Storage
from shardrt.optim import adamw
from shardrt.optim.muon import newton_schulz
from shardrt.optim.muon.exchange import Exchange, Redistribution, gathered, planned
from shardrt.optim.muon.newton_schulz import Matrices
from shardrt.optim.muon.state import MATRIX, AdamWRange, MuonSlice
from shardrt.optim.optimizer import Optimizer, check_betas
from shardrt.optim.slices import Cut, Member, Slice, Update

__all__ = ["Muon"]

ORIGINAL, MATCH_RMS_ADAMW = "original", "match_rms_adamw"


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A hidden matrix that a step updates: where its shard lies, and its group's settings."""

    piece: Slice
    parameter: Parameter
    group: dict

    @property
    def range(self) -> slice:
        """What this rank holds, in the shard."""
        return slice(*self.piece.storage.range_of(self.parameter))

    @property
    def extents(self) -> Extents:
        """The same, as elements of the whole matrix."""
        return self.parameter.in_whole(self.piece.storage.extents_of(self.parameter))

    def direction(self, out: Array) -> None:
        """Add the gradient to the momentum, and set `out`, 1-D, to what is orthogonalized."""
        gradient = _on_device(self.piece.storage.gradient[self.range])
        kept = self.piece.state["m"][self.range]
        m = _on_device(kept)
        kernels = device.current().kernels
        kernels.muon.direction(gradient, m, out, self.group["momentum"], self.group["nesterov"])
        _write_back(kept, m)

    def apply(self, update: Array) -> None:
        """Subtract the 1-D update and the decay from the shard."""
        rows, columns = self.parameter.whole_shape
        rate = self.group["lr"]
        ratio = sqrt(max(1, rows / columns))
        if self.group["adjust_lr_fn"] == MATCH_RMS_ADAMW:
            ratio = 0.2 * sqrt(max(rows, columns))
        kept = self.piece.storage.shard[self.range]
        weights = _on_device(kept)
        keep = 1 - rate * self.group["weight_decay"]
        device.current().kernels.muon.apply(weights, update, keep, rate * ratio)
        _write_back(kept, weights)


_AdamWPart = tuple[Slice, AdamWRange, Cut]  # AdamW's part of an update


def _on_device(array: Array) -> Array:
    """The array, or a copy of it on the current device where an offloaded one is on the host."""
    here = device.current()
    if device.of(array) is here:
        return array
    lent = here.empty(array.shape, array.dtype)
    here.copy(lent, array)
    return lent


def _write_back(kept: Array, lent: Array) -> None:
    """Copy what `_on_device` gave back to where it belongs."""
    if kept is not lent:
        device.current().copy(kept, lent)


class Muon(Optimizer):
    """Orthogonal updates of hidden matrices, as torch.optim.Muon makes them, and AdamW in one optimizer.

    A group with use_muon=True (the default) has matrices only. m = momentum m + (1 - momentum) dw is kept in
    shards. In step(), one all-to-all brings (1 - momentum) dw + momentum m of each matrix to one rank, its
    owner, which computes its orthogonal factor (newton_schulz.py); another brings the factor back. The owners
    share the flops evenly. During step() a rank holds its pieces and the matrices that it owns, 1 / N of all
    each, and scratch memory for one matrix. The bits of an update do not depend on the number of ranks, if
    those of the gradients do not. Ranks that hold copies (NO_SHARD, and the copies of HYBRID_SHARD) compute
    alike without traffic between them.

    A group with use_muon=False is AdamW's, with `betas` and `eps`. muon_groups makes both kinds.

    Args:
        params: matrices, or groups.
        lr: learning rate per step, of both kinds.
        weight_decay: multiplied by lr and taken off the weights.
        momentum: decay of m.
        nesterov: look one step ahead; else m itself is orthogonalized.
        ns_steps: steps of Newton-Schulz.
        adjust_lr_fn: "original" multiplies a matrix's rate by sqrt(max(1, rows / columns)),
            "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), so that a rate tuned for AdamW fits.
        betas: decay of AdamW's moments.
        eps: AdamW's.
        ns_dtype: of Newton-Schulz. "bfloat16" rounds as torch.optim.Muon does.

    Raises:
        ValueError: as Optimizer, and for other than matrices with use_muon.

    Example:
        >>> from shardrt import nn, optim
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> groups = optim.muon_groups(model, weight_decay=0.1)
        >>> optimizer = optim.Muon(groups, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    """

    slice_type = MuonSlice

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = newton_schulz.STEPS,
        adjust_lr_fn: str = ORIGINAL,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_dtype: str = dtypes.float32,
    ) -> None:
        if ns_dtype not in (dtypes.float32, dtypes.bfloat16):
            raise ValueError(f"Muon: ns_dtype must be 'float32' or 'bfloat16', got {ns_dtype!r}")
        self.ns_dtype = ns_dtype
        self._hidden: set[int] = set()  # ids of the hidden matrices
        self._offloaded: list[tuple[Slice, list[_Matrix]]] = []  # that the running step has to update yet
        self._exchanges: dict[Any, list[tuple[Exchange, list[int]]]] = {}
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "use_muon": True,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, settings, state=adamw.STATE)

    def state_names_of(self, group: int) -> dict[str, str]:
        return MATRIX if self.param_groups[group]["use_muon"] else self.state_names

    def check(self, group: dict) -> None:
        check_betas("Muon", group)
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"Muon: momentum must be in [0, 1), got {group['momentum']}")
        if not 1 <= group["ns_steps"] < 100:
            raise ValueError(f"Muon: ns_steps must be from 1 to 99, got {group['ns_steps']}")
        if group["adjust_lr_fn"] not in (ORIGINAL, MATCH_RMS_ADAMW):
            known = f"{ORIGINAL!r} or {MATCH_RMS_ADAMW!r}"
            raise ValueError(f"Muon: adjust_lr_fn must be {known}, got {group['adjust_lr_fn']!r}")
        for parameter in group["params"] if group["use_muon"] else ():
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon: parameter {parameter.name!r} has {parameter.ndim} axes, and use_muon=True needs "
                    "2; make groups with muon_groups(model, weight_decay)"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective.

        Args:
            closure: as Optimizer's.
        """
        self._offloaded.clear()
        loss = super().step(closure)
        for piece, _ in self._offloaded:
            piece.storage.complete_gradient()
        self._update_matrices([matrix for _, matrices in self._offloaded for matrix in matrices])
        for piece, _ in self._offloaded:
            piece.storage.modified()
        self._offloaded.clear()
        return loss

    def numbers(self, group: dict, steps: int) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        rate, correction = group["lr"] / (1 - beta1**steps), 1 / sqrt(1 - beta2**steps)
        return 1 - group["lr"] * group["weight_decay"], rate, correction, beta1, beta2, group["eps"]

    def update(self, kernels: ModuleType, update: Update) -> None:
        kernels.adamw.step(*(update.arrays[name] for name in ("shard", "gradient", "m", "v")), update.ranges)

    def checked(self, own: dict) -> dict:
        group = super().checked(own)
        if group["use_muon"]:  # known before the group is in param_groups
            self._hidden.update(map(id, group["params"]))
        return group

    def _take_in(self, members: list[Member]) -> None:
        super()._take_in(members)
        self._exchanges.clear()

    def _new_state(self, storage: Storage, name: str) -> Array | None:
        """None for "v", which comes when the hidden matrices of the storage are known."""
        return None if name == "v" else super()._new_state(storage, name)

    def _start_updates(self, new: list[Slice]) -> None:
        for piece in new:
            hidden = (p for p, _ in piece.members if id(p) in self._hidden)
            piece.new_second_moments(map(piece.storage.range_of, hidden))
        super()._start_updates(new)

    def _update_here(self, pieces: list[Slice]) -> None:
        if self._device.capturing is not None:
            raise RuntimeError("Muon: step() exchanges matrices and can't be captured in a graph")
        due = [self._due(piece) for piece in pieces]
        for piece in pieces:
            piece.storage.complete_gradient()  # it may still be reduced
        self._update_others([other for others, _ in due for other in others])
        self._update_matrices([matrix for _, matrices in due for matrix in matrices])
        for piece in pieces:
            piece.storage.modified()

    def _issue(self, piece: Slice) -> None:
        """AdamW's part of what is offloaded, in streams of its own; matrices wait for the end of step()."""
        others, matrices = self._due(piece)
        for _, run, cut in others:
            update = Update(run.arrays(piece), self._table([(piece, cut)]))
            self.updates.issue(piece, update, self._update_there)
        self._offloaded.append((piece, matrices))

    def _due(self, piece: Slice) -> tuple[list[_AdamWPart], list[_Matrix]]:
        """Count one update of each due parameter; return AdamW's ranges and the matrices."""
        cut = piece.due()
        piece.steps[cut.members] += 1
        matrices = []
        for position in cut.members.tolist():
            if self._is_matrix(piece, position):
                parameter, group = piece.members[position]
                matrices.append(_Matrix(piece, parameter, self.param_groups[group]))
        rows = [row for row in cut.rows if not self._is_matrix(piece, row[2])]
        others = []
        for run in piece.ranges:
            inside = [row for row in rows if run.start <= row[0] < run.stop]
            if inside:
                shifted = tuple((start - run.start, stop - run.start, p) for start, stop, p in inside)
                others.append((piece, run, replace(cut, rows=shifted)))
        return others, matrices

    def _is_matrix(self, piece: Slice, position: int) -> bool:
        return self.param_groups[piece.members[position][1]]["use_muon"]

    def _update_others(self, others: list[_AdamWPart]) -> None:
        """AdamW's ranges, with one copy of their numbers."""
        if not others:
            return
        ranges = self._device.numbers(lambda: self._table([(piece, cut) for piece, _, cut in others]))
        stop = 0
        for piece, run, cut in others:
            start, stop = stop, stop + len(cut.rows)
            self.update(self._device.kernels, Update(run.arrays(piece), ranges[start:stop]))

    def _update_matrices(self, matrices: list[_Matrix]) -> None:
        for exchange, numbers in self._exchanges_of(matrices):
            self._update_by(exchange, [matrices[number] for number in numbers])

    def _update_by(self, exchange: Exchange, own: list[_Matrix]) -> None:
        moved = Redistribution(exchange, self._device.empty(0, own[0].piece.storage.shard.dtype))
        for number, matrix in enumerate(own):
            matrix.direction(moved.pieces[number])
        moved.to_owners()
        alike: dict[tuple[tuple[int, int], int], list[int]] = {}
        for index in exchange.own:
            alike.setdefault((exchange.shapes[index], own[index].group["ns_steps"]), []).append(index)
        for (shape, steps), indices in alike.items():
            self._orthogonalize(moved, indices, shape, steps)
        moved.to_holders()
        for number, matrix in enumerate(own):
            matrix.apply(moved.pieces[number])

    def _orthogonalize(
        self, moved: Redistribution, indices: list[int], shape: tuple[int, int], steps: int
    ) -> None:
        """On the host one after the other, on a GPU some in one batch."""
        count = newton_schulz.batch_of(self._device, shape)
        matrices = None
        for start in range(0, len(indices), count):
            batch = indices[start : start + count]
            if matrices is None or len(matrices.each) != len(batch):
                matrices = None  # frees the memory of a longer batch
                matrices = Matrices.empty(self._device, len(batch), shape, moved.dtype)
            for index, whole in zip(batch, matrices.each, strict=True):
                moved.read(index, whole)
            matrices.orthogonalize(steps, self.ns_dtype)
            for index, whole in zip(batch, matrices.each, strict=True):
                moved.write(index, whole)

    def _exchanges_of(self, matrices: list[_Matrix]) -> list[tuple[Exchange, list[int]]]:
        """One exchange for the matrices of each communicator and dtype, with their indices in `matrices`.

        Collective for matrices that were not updated together before.
        """
        key = tuple(id(matrix.parameter) for matrix in matrices)
        if key not in self._exchanges:
            alike: dict[tuple[Communicator | None, np.dtype], list[int]] = {}
            for number, matrix in enumerate(matrices):
                storage = matrix.piece.storage
                alike.setdefault((storage.communicator, storage.shard.dtype), []).append(number)
            found = []
            for (communicator, _), numbers in alike.items():
                own = [matrices[number] for number in numbers]
                mesh = own[0].piece.storage.whole_mesh
                layouts = [(m.parameter, getattr(m.piece.storage, "layout", None)) for m in own]
                held = planned(layouts, mesh)
                if held is None:
                    ranks = communicator or SingleCommunicator()
                    held = gathered(ranks, [matrix.extents for matrix in own])
                shapes = tuple(matrix.parameter.whole_shape for matrix in own)
                found.append((Exchange(mesh, shapes, tuple(held)), numbers))
            self._exchanges[key] = found
        return self._exchanges[key]
