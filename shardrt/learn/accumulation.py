"""Exercise: accumulate gradients of micro-batches with one reduction."""

from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np

from shardrt import nn
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.fsdp import fully_shard
from shardrt.learn.checking import Hint, function

TITLE = "Accumulate without communication"
LEVEL = "medium"
TEACHES = "no_sync, and the scale of a micro-batch"
TAKEAWAY = (
    "no_sync trades memory for traffic: gradients stay whole (4 P bytes) and move once a step. "
    "Micro-batches are shares of one mean, so each loss is divided before its backward."
)

START = '''"""Exercise 6: accumulate without communication.

A batch does not fit in memory, so it goes through the model in parts. Fill in accumulate, which leaves the
gradient of the MEAN loss over all parts, and reduces gradients once:

    model            a model sharded by FULL_SHARD on several ranks
    parts            this rank's micro-batches, all of one size
    loss_of(part)    runs forward; the mean loss of one part, a Tensor with .backward()

The starting code is wrong twice. Each backward reduces the gradients of all units, which costs len(parts)
times the traffic. And the losses are added, where the mean is wanted.

shardrt.fsdp.no_sync(model) is a context in which backward adds gradients on each rank and reduces nothing. The
first backward outside of it reduces the sum. The grader counts the bytes of all reduce-scatters.
Read more: docs/howto/accumulation.md.
"""

from shardrt.fsdp import no_sync


def accumulate(model, parts, loss_of):
    for part in parts:
        loss_of(part).backward()
'''

_PARTS, _RANKS = 4, 2


class _Found(NamedTuple):
    gradients: list[np.ndarray] | None
    nbytes: int
    used: list[int]


def _on_rank(accumulate, whole: bool) -> _Found:
    counters: list[CollectiveCounter] = []

    def wrap(communicator):
        counters.append(CollectiveCounter(communicator))
        return counters[-1]

    mesh = init_device_mesh("cpu", wrap=wrap)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 2, bias=False))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
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
    return _Found(gradients, sum(counter.bytes["reduce_scatter"] for counter in counters), used)


@cache
def prepare() -> list[_Found]:
    """By rank, the gradient of the whole batch at once."""
    return thread.run(_RANKS, _on_rank, lambda model, parts, loss_of: loss_of(parts[0]).backward(), True)


def check(answer: ModuleType) -> str:
    """Compare bytes and gradients with those of the whole batch."""
    for expected, found in zip(
        prepare(), thread.run(_RANKS, _on_rank, function(answer, "accumulate"), False), strict=True
    ):
        if sorted(found.used) != list(range(_PARTS)):
            raise Hint(f"Each part must go through the model once. loss_of saw the parts {found.used}.")
        if found.nbytes == 0 or found.gradients is None:
            raise Hint("No gradient was reduced. The backward of the last part must run outside of no_sync.")
        if found.nbytes > expected.nbytes:
            raise Hint(
                f"Reduce-scatters brought {found.nbytes} bytes, and one reduction brings {expected.nbytes}. Put the "
                "backward of every part but the last inside no_sync(model)."
            )
        _check_gradients(found.gradients, expected.gradients)
    return f"the gradients equal those of the whole batch, with {expected.nbytes} bytes of reduce-scatters."


def _check_gradients(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    ours, wanted = (np.concatenate([each.reshape(-1) for each in arrays]) for arrays in (found, expected))
    if np.allclose(ours, wanted, rtol=1e-4, atol=1e-5):
        return
    factor = float(ours @ wanted / (wanted @ wanted))
    if np.allclose(ours, factor * wanted, rtol=1e-4, atol=1e-5):
        raise Hint(
            f"The gradient is {factor:.3g} times that of the mean loss. Each of {_PARTS} parts contributes "
            f"1/{_PARTS} of the mean: scale its loss before backward."
        )
    raise Hint(
        "The parts do not count equally. Each part, the last too, contributes the same share of the mean."
    )
