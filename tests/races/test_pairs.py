"""Every pair of features, recorded: no race, none that waits for values hide, and each gradient used once.

On CUDA's terms, of one rank for all; on two and four CPUs that share memory; in five units and in one; with
attempts that raise in forward, in backward, in a gather and in a reduction. Gradients are followed where
ranks share no memory and nothing raises.
"""

import pytest

from shardrt.device.program import Collective
from shardrt.simulate.provenance import followed
from shardrt.simulate.races import races_both_ways
from tests.fsdp.test_pairs import APART, IN_TURNS, TOGETHER, TRAINED, sets_of
from tests.races.recorded import FAILS, Case, recorded


def without(*left_out):
    """Sets of all pairs that have none of these features."""
    in_turns, pairs = ([n for n in sets if not set(n).intersection(left_out)] for sets in (IN_TURNS, TRAINED))
    return [*in_turns, *sets_of([pair for pair in pairs if pair in APART])]


EVERY = [*IN_TURNS, *TOGETHER]
FLAT = without("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")  # of these two ranks share as well where four may
KINDS = {
    "alone": [Case(names) for names in EVERY],
    # What units have by turns, one has one of.
    "in one unit": [Case(names, one_unit=True) for names in TOGETHER],
    "two share": [Case(names, shared=2) for names in EVERY],
    "four share": [case for names in FLAT if (case := Case(names, shared=4)).ranks > Case(names).ranks],
    # A pipeline that has raised runs no more.
    "raise": [Case(names, fails=FAILS, turn=turn) for turn, names in enumerate(without("pipeline"))],
}
SPREAD = (case for first, kind in enumerate(KINDS.values()) for case in kind[5 + 2 * first :: 20])
QUICK = [case for case in SPREAD if case.ranks <= 4]
# What had a race: nobody waited for what a gather had issued before it raised.
QUICK.append(Case(("offload parameters", "offload gradients"), fails=("gather",), turn=16))


# What two ranks share, one has alone, in five units or in one: each set is recorded in one of these ways.
WAYS = [[Case(names), Case(names, shared=2), Case(names, one_unit=names in TOGETHER)] for names in EVERY]
REST = {way for place, ways in enumerate(WAYS) for way in ways if way != ways[place % 3]}
# What four share, two do; of sets that raise, a quarter, in either block.
REST.update(case for place, case in enumerate(KINDS["four share"]) if place % 8)
REST.update(case for place, case in enumerate(KINDS["raise"]) if place % 8 not in (0, 3))


def marks_of(case):
    return () if case in QUICK else pytest.mark.rest if case in REST else pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=marks_of(case))
        for case in dict.fromkeys([*QUICK, *(case for kind in KINDS.values() for case in kind)])
    ],
    ids=str,
)
def test_no_two_uses_of_memory_meet(case, tmp_path):
    with followed() as follow:
        programs = recorded(case, tmp_path, None if case.shared or case.fails else follow)
    ranks = {program.rank for program in programs}
    assert all(ranks.issuperset(group) for program in programs for group in shared_by(program))
    assert sum(len(program.items) for program in programs) > 300
    found, hidden = races_both_ways(programs)
    assert not [str(race) for race in (*found, *hidden)]
    assert not [str(finding) for finding in follow.findings]


def shared_by(program):
    """The groups of ranks that share memory: a gather of it is a barrier."""
    called = {item.group for item in program.items if isinstance(item, Collective) and item.call == "barrier"}
    groups = [program.groups[name] for name in called]
    return [group.ranks for group in groups if group.role == "gather"]
