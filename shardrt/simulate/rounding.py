"""Options that save memory or traffic by rounding more: `plan` suggests them, and never chooses them.

    for plan in suggested(found, words, simulate, limits, hosts=8):
        plan.candidate.options

What a search compares trains alike. An optimizer's state in 8 bits, and collectives in 8 bits between hosts,
change what is trained: the first is tried with the fastest plan that fits only so, the others with the best.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

from shardrt.optim.low_bit import BYTES
from shardrt.simulate.plan import COMMUNICATION, Found, Plan, planned
from shardrt.simulate.space import Candidate, Options
from shardrt.simulate.step import Simulated

__all__ = ["suggested"]

_SMALL_STATE = {"adamw": "adamw8bit", "lion": "lion8bit"}
_FEW_BITS = {"precision.quantized_weights": "8", "precision.quantized_gradients": "8"}
_EXPOSED = 0.1  # of the step: with less communication there is nothing to gain
_AWAY = ("memory.offload_optimizer", "memory.offload_gradients", "memory.offload_parameters")


def suggested(
    found: Found,
    words: Mapping[str, str],
    simulate: Callable[[Candidate], Simulated],
    limits: Mapping[str, float],
    *,
    given: Collection[str] = (),
    hosts: int = 1,
) -> list[Plan]:
    """Plans that round more, have enough memory, and are faster than all that were found; the fastest first.

    At most two are simulated.

    Args:
        words: the recipe's own settings, see `space.words_of`.
        simulate: as of `search`.
        limits: bytes of each place.
        given: options that stay as they are.
        hosts: number of nodes.
    """
    least = found.best[0].cost if found.best else None
    plans = []
    for base, options in _to_try(found, words, given, limits, hosts):
        candidate = replace(base.candidate, options=base.candidate.options | options)
        try:
            with redirect_stderr(StringIO()):
                plan = planned(candidate, simulate(candidate))
        except (Exception, SystemExit):  # these options do not fit the others
            continue
        fits = all(plan.bytes(place) <= limit for place, limit in limits.items())
        if fits and (least is None or plan.cost < least):
            plans.append(plan)
    return sorted(plans, key=lambda plan: plan.cost)


def _to_try(
    found: Found,
    words: Mapping[str, str],
    given: Collection[str],
    limits: Mapping[str, float],
    hosts: int,
) -> Iterator[tuple[Plan, Options]]:
    """(a plan that was found, options that round more)."""
    small = _SMALL_STATE.get(words.get("optimizer.name", ""))
    if small is not None and "optimizer.name" not in given:
        over = next((plan for plan in found.over if _may_fit(plan, limits["device"])), None)
        if over is not None and (not found.best or over.cost < found.best[0].cost):
            yield over, {"optimizer.name": small}
    best = found.best[0] if found.best else None
    whole = {name: words.get(name) for name in _FEW_BITS} == dict.fromkeys(_FEW_BITS, "0")
    if best is not None and hosts > 1 and whole and not _FEW_BITS.keys() & set(given):
        if best.shares[COMMUNICATION] >= _EXPOSED and not _offloads(best):
            yield best, _FEW_BITS


def _may_fit(plan: Plan, limit: float) -> bool:
    """Whether a device has enough memory if the optimizer state takes 8 bits."""
    state = plan.memory.get("device", {}).get("optimizer state", 0)
    return not _offloads(plan) and plan.bytes() - state * (1 - BYTES / 4) <= limit


def _offloads(plan: Plan) -> bool:
    return any(plan.candidate.options.get(name, "").lower() == "true" for name in _AWAY)
