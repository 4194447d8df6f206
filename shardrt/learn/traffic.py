"""Exercise: the bytes that a collective, and a step of FULL_SHARD, bring to a rank."""

from functools import cache
from types import ModuleType

import numpy as np

from shardrt import nn
from shardrt.comm import thread
from shardrt.learn.checking import Hint, counted_mesh, function, need, number, shard

TITLE = "The bytes of a step"
LEVEL = "easy"
TEACHES = "what all-gather and reduce-scatter cost"
TAKEAWAY = (
    "A collective on a buffer of B bytes brings (N - 1) / N of B to each rank. FULL_SHARD moves three times "
    "the parameters: two gathers and a reduction. A step is slow where they take longer than computing."
)

_RANKS = (1, 2, 4)
_WIDTHS = (8, 24, 16)
_BLOCKS, _ROOT = [64 * width for width in _WIDTHS], 256  # bytes


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, width, bias=False) for width in _WIDTHS)
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return sum((block(x).sum() for block in self.blocks), start=self.head(x).sum())


def _counted() -> tuple[int, int]:
    """The bytes that this rank receives in a step."""
    (mesh, nbytes), model = counted_mesh(), _Net()
    shard(model, model.blocks, mesh)(np.ones((2, 16), np.float32)).backward()
    return nbytes("all_gather"), nbytes("reduce_scatter")


@cache
def prepare() -> dict[int, tuple[int, int]]:
    """By number of ranks, what the counters say."""
    return {ranks: thread.run(ranks, _counted)[0] for ranks in _RANKS}


def check(answer: ModuleType) -> str:
    """Compare the formulas with the counters."""
    for name in ("all_gather", "reduce_scatter"):
        _check_collective(name, function(answer, name))
    for ranks, counted in prepare().items():
        found = function(answer, "step")(list(_BLOCKS), _ROOT, ranks)
        need(isinstance(found, tuple) and len(found) == 2, "step must return a tuple of two numbers.")
        for values in zip(("all-gathers", "reduce-scatters"), found, counted, strict=True):
            _check_step(*values, ranks)
    return "your formulas equal the counters of a step of four units on 1, 2 and 4 ranks, to the byte."


def _check_collective(name: str, formula) -> None:
    for nbytes, ranks in ((4096, 4), (7680, 5), (1024, 2), (4096, 1)):
        found, expected = number(formula(nbytes, ranks), name), nbytes // ranks * (ranks - 1)
        if found != expected:
            known = {
                nbytes: f"a rank already has its own part, so it does not receive all {nbytes} bytes.",
                nbytes * (ranks - 1): "nbytes is the whole buffer, not one part. A part has nbytes / ranks.",
                nbytes
                / ranks: "one part comes from EACH of the other ranks, and there are ranks - 1 of them.",
            }
            other = f"of {nbytes} bytes on {ranks} ranks, a rank receives {expected}, not {found:.0f}."
            raise Hint(f"{name}: {known.get(found, other)}")


def _check_step(name: str, found: float, counted: int, ranks: int) -> None:
    if number(found, "step") == counted:
        return
    part, blocks = (ranks - 1) / ranks, sum(_BLOCKS)
    known = {
        ("all-gathers", part * (blocks + _ROOT)): "A block is released, so backward gathers the block again.",
        ("all-gathers", part * 2 * (blocks + _ROOT)): "The root stays gathered, so it is gathered once.",
        ("all-gathers", part * 2 * blocks): "The root has parameters too, and they are gathered once.",
        ("reduce-scatters", 2 * counted): "That is an all-reduce. FULL_SHARD needs no whole gradient.",
    }
    hint = known.get((name, found), "Count how often each unit, the root too, is gathered and reduced.")
    raise Hint(f"step: {ranks} ranks receive {counted} bytes in {name}, and yours are {found:.0f}. {hint}")
