"""Every pair of features, recorded: no race, and none that waits for values hide.

On CUDA's terms, of one rank for all; on two and four CPUs that share memory; in five units and in one; with
attempts that raise in forward, in backward, in a gather and in a reduction.
"""

import pytest

from shardrt.device.program import Collective
from shardrt.simulate.races import races_both_ways
from tests.fsdp.test_pairs import ALONE, TOGETHER
from tests.races.recorded import FAILS, Case, recorded

EVERY = [*ALONE, *TOGETHER]
# A pipeline that has raised runs no more. What two units share by turns, one has one of.
RAISING = [names for names in EVERY if "pipeline" not in names]
KINDS = {
    "alone": [Case(names) for names in EVERY],
    "in one unit": [Case(names, one_unit=True) for names in TOGETHER],
    "two share": [Case(names, shared=2) for names in EVERY],
    "four share": [case for names in EVERY if (case := Case(names, shared=4)).ranks > Case(names).ranks],
    "raise": [Case(names, fails=FAILS, turn=turn) for turn, names in enumerate(RAISING)],
}
QUICK = [case for kind in KINDS.values() for case in kind[7::40] if case.ranks <= 4]
# What had a race: nobody waited for what a gather had issued before it raised.
QUICK.append(Case(("offload parameters", "offload gradients"), fails=("gather",), turn=16))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
        for case in dict.fromkeys([*QUICK, *(case for kind in KINDS.values() for case in kind)])
    ],
    ids=str,
)
def test_no_two_uses_of_memory_meet(case, tmp_path):
    programs = recorded(case, tmp_path)
    ranks = {program.rank for program in programs}
    assert all(ranks.issuperset(group) for program in programs for group in shared_by(program))
    assert sum(len(program.items) for program in programs) > 300
    found, hidden = races_both_ways(programs)
    assert not [str(race) for race in (*found, *hidden)]


def shared_by(program):
    """The groups of ranks that share memory: a gather of it is a barrier."""
    called = {item.group for item in program.items if isinstance(item, Collective) and item.call == "barrier"}
    groups = [program.groups[name] for name in called]
    return [group.ranks for group in groups if group.role == "gather"]
