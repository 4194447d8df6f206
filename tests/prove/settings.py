"""Seeded random settings of a training step, and what `shardrt prove` says of each."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardrt.device.cpu import CPUDevice
from shardrt.simulate.order import order_of
from shardrt.simulate.provenance import Finding, followed
from shardrt.simulate.races import races_both_ways
from shardrt.simulate.script import record_of
from shardrt.tools.prove import mismatches
from tests.fsdp.test_pairs import STRATEGIES
from tests.prove.integers import Setting, train

MOST_RANKS = 8
HYBRID = [name for name in STRATEGIES if name.startswith("HYBRID")]
PLAIN = [name for name in STRATEGIES if not name.startswith("HYBRID")]


def setting(seed: int) -> Setting:
    """The setting of a seed. Every setting is valid."""
    random = np.random.default_rng(seed)

    def some(share: float) -> bool:
        return bool(random.random() < share)

    options: dict = {}
    axes = _axes(random, some, options)
    names = dict(axes)
    options["strategy"] = _strategies(random, some, "dp_replicate" in names)
    if not set(options["strategy"]) & {"NO_SHARD", "SHARD_OPT"} and some(0.5):
        options["reshard_after_forward"] = [bool(each) for each in random.integers(0, 2, 2)]
    options["prefetch"] = [int(random.integers(0, 3))]
    turns = int(random.integers(0, 3)) if "tp" not in names or "pp" not in names else 0
    if turns:
        options["micro_batches"] = [tuple(random.choice(["no_sync", "reduce"], turns).tolist())]
    for name, share in (("frozen", 0.25), ("one_unit", 0.15), ("unit_of_two", 0.15)):
        if some(share):
            options[name] = [True]
    if some(0.2) and "pp" not in names:
        options["unused"] = [str(random.choice(["some", "all"]))]
    if some(0.2):
        options["recompute"] = ["full"]
    if some(0.3):
        options["optimizer"] = ["SGD"]
    if some(0.2) and "pp" not in names and "reduce" not in str(options.get("micro_batches")):
        options["in_backward"] = [True]
    for name in ("param_dtype", "reduce_dtype"):
        if some(0.25):
            options[name] = ["bfloat16"]
    if "one_unit" in options:
        options.pop("unit_of_two", None)
    if "experts" in options and "unused" in options:
        options.pop("unused")  # block 2 is the experts'
    factor = int(random.integers(1, 12)) if some(0.3) else 0
    twice = int(random.choice([0, 1, 3])) if some(0.4) else None
    return Setting(tuple(axes), options, factor, twice)


def _axes(random, some, options) -> list[tuple[str, int]]:
    """The mesh, of at most MOST_RANKS ranks, and options of the axes that cut the model."""
    kind = random.choice(["dp", "dp", "hybrid", "hybrid", "tp", "pp", "cp", "ep", "two"])
    cut = {"two": ["tp", "pp"] if some(0.5) else ["cp", "tp"]}.get(
        kind, [kind] * (kind in ("tp", "pp", "cp"))
    )
    if kind == "ep":
        options["experts"] = ["spread"]
    most = MOST_RANKS // 2 ** len(cut)
    if kind == "hybrid" or (kind in ("cp", "tp", "pp") and some(0.3)):
        copies = int(random.integers(2, 5)) if kind == "hybrid" else 2
        data = [("dp_replicate", copies), ("dp_shard", int(random.integers(1, most // copies + 1)))]
    else:
        size = int(random.integers(1, most + 1))
        data = [("dp_shard", size + size % 2 if kind == "ep" else size)]
    if "tp" in cut:
        options["parallel"] = [str(random.choice(["tensor", "sequence"]))]
    if "cp" in cut:
        options |= {"attention": [True], "context": [True]}
    if "pp" in cut:
        options["pipeline"] = [True]
    front, back = [("pp", 2)] * ("pp" in cut), [(name, 2) for name in ("cp", "tp") if name in cut]
    return [*front, *data, *back]


def _strategies(random, some, hybrid: bool) -> list[str]:
    """One, or one for every other unit each. Those of hybrids need a mesh with two axes."""
    names = HYBRID * 2 + PLAIN if hybrid else PLAIN
    return random.choice(names, 1 + some(0.3), replace=False).tolist()


@dataclass
class Proof:
    """findings: of the gradients check. races, order: what the others say. weights: each 1 / a divisor."""

    findings: list[Finding]
    weights: set[float]
    updates: int
    reads: int
    races: list
    order: list[str]
    raised: str = ""

    @property
    def found_by(self) -> list[str]:
        """The checks that report something."""
        checks = {
            "gradients": self.findings or not (self.updates or self.raised),
            "races": self.races,
            "order": self.order,
            "raises": self.raised,
        }
        return [name for name, wrong in checks.items() if wrong]


def proof_of(
    setting: Setting,
    begun: Callable | None = None,
    races: bool = False,
    rank: int = 0,
    like: type = CPUDevice,
) -> Proof:
    """What the checks say of the same program, of which one rank of each role is recorded.

    rank: the rank of each stage of a pipeline that is recorded.
    """
    each = setting.of_a_stage
    roles = {start + rank: range(start, start + each) for start in range(0, setting.ranks, each)}
    with followed() as follow, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            programs = record_of(
                partial(train, setting, None, begun),
                setting.ranks,
                like=like,
                local_size=MOST_RANKS,
                follow=follow,
                stands_for=roles,
            )
        except Exception as error:
            return Proof([], set(), 0, 0, [], [], f"{type(error).__name__}: {error}")
    order, raced = mismatches(programs), []
    try:
        findings = follow.findings
    except IndexError:  # what is found after the end of a program has no operation
        findings = [Finding(rank, "end", "", "", "", "a gradient is used by no update")]
    try:
        order_of(programs)
        if races:
            known, hidden = races_both_ways(programs)
            raced = [*known, *hidden]
    except ValueError as error:
        order.append(str(error))
    followers = follow.followers
    return Proof(
        findings,
        {scale for each in followers for scale, _ in each.checks.weights.values()},
        sum(each.checks.updates for each in followers),
        sum(each.checks.reads for each in followers),
        raced,
        order,
    )
