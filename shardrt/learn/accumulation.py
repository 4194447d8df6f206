"""Exercise: accumulate gradients of micro-batches with one reduction."""

from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np

from shardrt import nn
from shardrt.comm import thread
from shardrt.learn.checking import counted_mesh, function, need, shard

TITLE = "Accumulate without communication"
LEVEL = "medium"
TEACHES = "no_sync, and the scale of a micro-batch"
TAKEAWAY = (
    "no_sync trades memory for traffic: gradients stay whole (4 P bytes) and move once a step. "
    "Micro-batches are shares of one mean, so each loss is divided before its backward."
)

_PARTS, _RANKS = 4, 2


class _Found(NamedTuple):
    gradients: list[np.ndarray] | None
    nbytes: int
    used: list[int]


def _on_rank(accumulate, whole: bool) -> _Found:
    mesh, nbytes = counted_mesh()
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 2, bias=False))
    shard(model, model, mesh)
    random = np.random.default_rng(1)
    weights = {name: random.normal(size=p.shape).astype(np.float32) for name, p in model.named_parameters()}
    model.load_state_dict(weights)
    data = np.random.default_rng(mesh.rank).normal(size=(_PARTS, 3, 6)).astype(np.float32)
    used: list[int] = []

    def loss_of(part):
        used.append(next((i for i, each in enumerate(data) if np.array_equal(each, part)), -1))
        return (model(part) ** 2).mean()

    accumulate(model, [data.reshape(-1, 6)] if whole else list(data), loss_of)
    try:
        gradients = [parameter.grad.copy() for parameter in model.parameters()]
    except (AttributeError, RuntimeError):  # there is none, or it was not reduced
        gradients = None
    return _Found(gradients, nbytes("reduce_scatter"), used)


@cache
def prepare() -> list[_Found]:
    """By rank, the gradient of the whole batch at once."""
    return thread.run(_RANKS, _on_rank, lambda model, parts, loss_of: loss_of(parts[0]).backward(), True)


def check(answer: ModuleType) -> str:
    """Compare bytes and gradients with those of the whole batch."""
    found = thread.run(_RANKS, _on_rank, function(answer, "accumulate"), False)
    for ours, whole in zip(found, prepare(), strict=True):
        once = sorted(ours.used) == list(range(_PARTS))
        need(once, f"Each part must go through the model once. loss_of saw the parts {ours.used}.")
        reduced = ours.nbytes and ours.gradients is not None
        need(reduced, "No gradient was reduced. The backward of the last part must run outside of no_sync.")
        need(
            ours.nbytes <= whole.nbytes,
            f"Reduce-scatters brought {ours.nbytes} bytes, and one reduction brings {whole.nbytes}. "
            "Put the backward of every part but the last inside no_sync(model).",
        )
        _check_gradients(*(np.concatenate([g.ravel() for g in each.gradients]) for each in (ours, whole)))
    return (
        f"the gradients equal those of the whole batch, with {prepare()[0].nbytes} bytes of reduce-scatters."
    )


def _check_gradients(ours: np.ndarray, whole: np.ndarray) -> None:
    factor = float(ours @ whole / (whole @ whole))
    scaled = np.allclose(ours, factor * whole, rtol=1e-4, atol=1e-5)
    need(scaled, "The parts do not count equally. Each part, the last too, is the same share of the mean.")
    need(
        np.isclose(factor, 1, rtol=1e-4),
        f"The gradient is {factor:.3g} times that of the mean loss. Each of {_PARTS} parts is 1/{_PARTS} of "
        "the mean: scale its loss before backward.",
    )
