"""Exercise: the memory of a strategy, compared with memory_plan."""

from functools import cache
from types import ModuleType

from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, memory_plan
from shardrt.learn.checking import Hint, function, number

TITLE = "The memory of a strategy"
LEVEL = "easy"
TEACHES = "which bytes sharding divides, and which stay"
TAKEAWAY = (
    "AdamW in float32 takes 16 bytes per parameter, and full sharding divides all of them by N. "
    "The gathered units do not shrink with N: smaller units and less prefetch are what helps there."
)

START = '''"""Exercise 2: the memory of a strategy.

A model with P parameters trains in float32 with AdamW on N ranks. Predict the bytes on one rank.

held(...): what the rank keeps between steps: parameters, gradients and AdamW's state.
AdamW keeps two arrays as long as the parameters (the two moments). All arrays are float32.
- NO_SHARD: every rank has everything (DDP).
- SHARD_GRAD_OP and FULL_SHARD: each rank has 1/N of everything.
- HYBRID_SHARD: the N ranks form N/G groups of G ranks. Each group shards a copy of everything.

gathered(...): the most bytes of gathered (whole) parameters at once.
- FULL_SHARD releases a unit after use. While a unit computes, the next `prefetch` units are gathered already.
  So prefetch + 1 buffers exist, each as large as the largest unit. The outermost unit (root) has a buffer of
  its own.
- SHARD_GRAD_OP keeps every unit from forward to backward.

shardrt's memory_plan computes the same bytes before anything is allocated. Read more: docs/learn/strategies.md.
"""


def held(strategy, parameters, ranks, group):
    """Bytes of parameters, gradients and optimizer state on one rank."""
    raise NotImplementedError


def gathered(strategy, parameters, largest, root, prefetch):
    """Bytes of gathered parameters. largest, root: parameters of the largest unit and of the outermost one."""
    raise NotImplementedError
'''

_HELD = "sharded parameters", "sharded gradients", "optimizer state"
_BLOCK, _BLOCKS, _ROOT = 32 * 32, 4, 32 * 16
_P = _BLOCK * _BLOCKS + _ROOT
_GROUP = 2
_CASES = (  # strategy, ranks, prefetch
    ("FULL_SHARD", 4, 1),
    ("FULL_SHARD", 2, 0),
    ("FULL_SHARD", 4, 2),
    ("SHARD_GRAD_OP", 4, 1),
    ("HYBRID_SHARD", 4, 1),
    ("NO_SHARD", 4, 1),
)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(_BLOCKS)))
        self.head = nn.Linear(32, 16, bias=False)


def _planned(strategy: str, prefetch: int, ranks: int) -> dict[str, int]:
    shape = (ranks // _GROUP, _GROUP) if strategy == "HYBRID_SHARD" else None
    mesh, model = init_device_mesh("cpu", shape), _Net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, strategy=strategy, prefetch=prefetch)
    return memory_plan(model).device


@cache
def prepare() -> list[dict[str, int]]:
    """The plan of each case: category -> bytes."""
    return [thread.run(ranks, _planned, strategy, prefetch, ranks)[0] for strategy, ranks, prefetch in _CASES]


def check(answer: ModuleType) -> str:
    """Compare the formulas with the plans."""
    held, gathered = function(answer, "held"), function(answer, "gathered")
    for (strategy, ranks, _), plan in zip(_CASES, prepare(), strict=True):
        expected = sum(plan.get(category, 0) for category in _HELD)
        found = number(held(strategy, _P, ranks, _GROUP), "held")
        if found != expected:
            raise Hint(_wrong_held(strategy, found, expected, ranks))
    for (strategy, _, prefetch), plan in zip(_CASES, prepare(), strict=True):
        if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            expected = plan["gathered parameters"]
            found = number(gathered(strategy, _P, _BLOCK, _ROOT, prefetch), "gathered")
            if found != expected:
                raise Hint(_wrong_gathered(strategy, found, expected, prefetch))
    return "held and gathered equal shardrt's memory plan, to the byte, for four strategies."


def _wrong_held(strategy: str, found: float, expected: int, ranks: int) -> str:
    reasons = {
        expected / 4: "Those are the parameters alone. Add the gradients and the optimizer state.",
        expected / 2: "The optimizer state is missing: AdamW keeps two more arrays.",
        expected * 3 / 4: "One array is missing. AdamW keeps two arrays, next to parameters and gradients.",
        16 * _P: f"{strategy} divides the parameters, the gradients and the optimizer state over ranks.",
        16 * _P / ranks: "Not every rank shards with every other one. How many ranks share one copy?",
        16 * _P / _GROUP: "The group matters for hybrid strategies alone.",
    }
    known = reasons.get(found, "Count the bytes per parameter first, then the ranks that share them.")
    return f"held({strategy!r}) is {expected} bytes in the plan, and yours is {found:.0f}. {known}"


def _wrong_gathered(strategy: str, found: float, expected: int, prefetch: int) -> str:
    if strategy == "SHARD_GRAD_OP":
        known = "SHARD_GRAD_OP keeps all units until backward, so every parameter is gathered at once."
    elif found == 4 * (prefetch * _BLOCK + _ROOT):
        known = "The unit that computes needs a buffer too, next to those that are prefetched."
    elif found == 4 * (prefetch + 1) * _BLOCK:
        known = "The root has a buffer of its own."
    elif found == 4 * (_BLOCK + _ROOT):
        known = "Prefetch gathers units ahead, and each of them needs a buffer."
    elif found == 4 * _P:
        known = "FULL_SHARD never has all units gathered at once."
    else:
        known = "Count the buffers, then the bytes of each."
    return (
        f"gathered({strategy!r}) with prefetch {prefetch} is {expected} bytes in the plan, and yours is "
        f"{found:.0f}. {known}"
    )
