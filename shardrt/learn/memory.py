"""Exercise: the memory of a strategy, compared with memory_plan."""

from functools import cache
from types import ModuleType

from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import memory_plan
from shardrt.learn.checking import Hint, function, number, shard

TITLE = "The memory of a strategy"
LEVEL = "easy"
TEACHES = "which bytes sharding divides, and which stay"
TAKEAWAY = (
    "AdamW in float32 takes 16 bytes per parameter, and full sharding divides all of them by N. The gathered "
    "units do not shrink with N: smaller units and less prefetch are what helps there."
)

_HELD = "sharded parameters", "sharded gradients", "optimizer state"
_BLOCK, _BLOCKS, _ROOT = 32 * 32, 4, 32 * 16
_P = _BLOCK * _BLOCKS + _ROOT
_GROUP = 2
_CASES = (  # strategy, ranks, prefetch
    ("FULL_SHARD", 4, 2),
    ("FULL_SHARD", 4, 1),
    ("FULL_SHARD", 2, 0),
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
    mesh = init_device_mesh("cpu", (ranks // _GROUP, _GROUP) if strategy == "HYBRID_SHARD" else None)
    model = _Net()
    return memory_plan(shard(model, model.blocks, mesh, strategy=strategy, prefetch=prefetch)).device


@cache
def prepare() -> list[dict[str, int]]:
    """The plan of each case: category -> bytes."""
    return [thread.run(ranks, _planned, strategy, prefetch, ranks)[0] for strategy, ranks, prefetch in _CASES]


def check(answer: ModuleType) -> str:
    """Compare the formulas with the plans."""
    held, gathered = function(answer, "held"), function(answer, "gathered")
    for (strategy, ranks, _), plan in zip(_CASES, prepare(), strict=True):
        expected = sum(plan.get(category, 0) for category in _HELD)
        _check(f"held({strategy!r})", held(strategy, _P, ranks, _GROUP), expected, _held(expected, ranks))
    for (strategy, _, prefetch), plan in zip(_CASES, prepare(), strict=True):
        if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            found, call = (
                gathered(strategy, _P, _BLOCK, _ROOT, prefetch),
                f"gathered({strategy!r}, {prefetch=})",
            )
            _check(call, found, plan["gathered parameters"], _gathered(strategy, prefetch))
    return "held and gathered equal shardrt's memory plan, to the byte, for four strategies."


def _check(call: str, found: float, expected: int, known: dict[float, str]) -> None:
    if number(found, call) != expected:
        hint = known.get(found, "Count arrays of 4 bytes per parameter, and the ranks that share them.")
        raise Hint(f"{call} is {expected} bytes in the plan, and yours is {found:.0f}. {hint}")


def _held(expected: int, ranks: int) -> dict[float, str]:
    return {
        expected / 4: "Those are the parameters alone. Add the gradients and the optimizer state.",
        expected / 2: "The optimizer state is missing: AdamW keeps two more arrays.",
        expected * 3 / 4: "One array is missing. AdamW keeps two arrays, next to parameters and gradients.",
        16 * _P: "This strategy divides the parameters, the gradients and the optimizer state over ranks.",
        16 * _P / ranks: "Not every rank shards with every other one. How many ranks share one copy?",
        16 * _P / _GROUP: "The group matters for hybrid strategies alone.",
    }


def _gathered(strategy: str, prefetch: int) -> dict[float, str]:
    if strategy == "SHARD_GRAD_OP":
        keeps = "SHARD_GRAD_OP keeps all units until backward, so every parameter is gathered at once."
        return {4 * ((prefetch + 1) * _BLOCK + _ROOT): keeps}
    return {
        4 * (prefetch * _BLOCK + _ROOT): "The unit that computes needs a buffer, next to those ahead of it.",
        4 * (prefetch + 1) * _BLOCK: "The root has a buffer of its own.",
        4 * (_BLOCK + _ROOT): "Prefetch gathers units ahead, and each of them needs a buffer.",
        4 * _P: "FULL_SHARD does not have all units gathered at once.",
    }
