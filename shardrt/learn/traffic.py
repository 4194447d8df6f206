"""Exercise: the bytes that a collective, and a step of FULL_SHARD, bring to a rank."""

from functools import cache
from types import ModuleType

import numpy as np

from shardrt import nn
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.fsdp import fully_shard
from shardrt.learn.checking import Hint, function, number

TITLE = "The bytes of a step"
LEVEL = "easy"
TEACHES = "what all-gather and reduce-scatter cost"
TAKEAWAY = (
    "A collective on a buffer of B bytes brings (N - 1) / N of B to each rank. FULL_SHARD moves 3 P: two gathers "
    "and a reduction. A multi-rank job is slow where these bytes do not fit behind the computing."
)

START = '''"""Exercise 1: the bytes of a step.

N ranks share a buffer of B bytes. Rank r owns part r of N equal parts.
- all_gather: each rank begins with its own part. At the end each rank has the whole buffer.
- reduce_scatter: each rank begins with a whole buffer. At the end it has its own part of the sum.
  A rank receives its part from each other rank, because each rank adds up its own part.

Fill in how many bytes ONE rank receives. shardrt's CollectiveCounter counts the same bytes on real ranks.

Then predict a training step of FULL_SHARD. The model has some blocks, and each block is a unit.
- A unit is gathered before its forward and released after it. Backward needs its parameters again.
- The outermost unit (the root) holds the parameters outside the blocks. It stays gathered from forward to
  backward.
- The gradient of each unit is reduced once. It has as many bytes as the parameters.

Read more: docs/learn/from_scratch.md.
"""


def all_gather(nbytes, ranks):
    """Bytes that a rank receives when a buffer of `nbytes` (the whole) is gathered."""
    raise NotImplementedError


def reduce_scatter(nbytes, ranks):
    """Bytes that a rank receives when gradients of `nbytes` (on each rank) are summed and scattered."""
    raise NotImplementedError


def step(blocks, root, ranks):
    """(bytes received in all-gathers, bytes received in reduce-scatters) in one step.

    blocks: a list with the bytes of each block. root: the bytes of the outermost unit.
    """
    raise NotImplementedError
'''

_RANKS = (1, 2, 4)
_WIDTHS = (8, 24, 16)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, width, bias=False) for width in _WIDTHS)
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return sum((block(x).sum() for block in self.blocks), start=self.head(x).sum())


def _counted() -> tuple[int, int]:
    """The bytes that this rank receives in a step."""
    counters: list[CollectiveCounter] = []

    def wrap(communicator):
        counters.append(CollectiveCounter(communicator))
        return counters[-1]

    mesh, model = init_device_mesh("cpu", wrap=wrap), _Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(np.ones((2, 16), np.float32)).backward()
    gathered, reduced = (
        sum(counter.bytes[name] for counter in counters) for name in ("all_gather", "reduce_scatter")
    )
    return gathered, reduced


@cache
def prepare() -> dict[int, tuple[int, int]]:
    """By number of ranks, what the counters say."""
    return {ranks: thread.run(ranks, _counted)[0] for ranks in _RANKS}


def check(answer: ModuleType) -> str:
    """Compare the formulas with the counters."""
    for name in ("all_gather", "reduce_scatter"):
        _check_collective(name, function(answer, name))
    step, (blocks, root) = function(answer, "step"), ([64 * width for width in _WIDTHS], 256)
    for ranks, (gathered, reduced) in prepare().items():
        found = step(list(blocks), root, ranks)
        if not isinstance(found, tuple) or len(found) != 2:
            raise Hint(f"step must return two numbers as a tuple. It returned {found!r}.")
        first, second = (number(value, "step") for value in found)
        if first != gathered:
            raise Hint(_gathers(first, gathered, sum(blocks), root, ranks))
        if second != reduced:
            times = "An all-reduce would cost twice as much: FULL_SHARD needs no whole gradient. " * (
                second == 2 * reduced
            )
            raise Hint(
                f"With {ranks} ranks the counters saw {reduced} bytes in reduce-scatters, and step predicts "
                f"{second:.0f}. {times}Each unit, the root too, reduces its gradient once."
            )
    return (
        "your formulas equal the counters of a training step of four units on 1, 2 and 4 ranks, to the byte."
    )


def _check_collective(name: str, formula) -> None:
    for nbytes, ranks in ((4096, 4), (7680, 5), (1024, 2), (4096, 1)):
        found, expected = number(formula(nbytes, ranks), name), nbytes // ranks * (ranks - 1)
        if found == expected:
            continue
        if found == nbytes:
            raise Hint(f"{name}: a rank already has its own part, so it does not receive all {nbytes} bytes.")
        if found == nbytes * (ranks - 1):
            raise Hint(f"{name}: nbytes is the whole buffer, not one part. A part has nbytes / ranks bytes.")
        if found == nbytes / ranks:
            raise Hint(
                f"{name}: one part comes from EACH of the other ranks, and there are ranks - 1 of them."
            )
        raise Hint(
            f"{name}({nbytes}, {ranks}) is {expected} by the counters, and your formula gives {found:.0f}."
        )


def _gathers(found: float, expected: int, blocks: int, root: int, ranks: int) -> str:
    part = (ranks - 1) / ranks
    if found == part * (blocks + root):
        return "step: a block is released after forward, so backward gathers the block again."
    if found == part * (2 * blocks + 2 * root):
        return "step: the root stays gathered from forward to backward, so it is gathered once."
    if found == part * 2 * blocks:
        return "step: the root has parameters too, and they are gathered once."
    return (
        f"With {ranks} ranks the counters saw {expected} bytes in all-gathers, and step predicts {found:.0f}. "
        "Count how often each unit is gathered."
    )
