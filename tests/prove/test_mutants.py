"""Mutations of a training step: what changes its sums on real ranks, `shardrt prove` finds."""

import pytest

from tests.prove.mutants import EVERY, KINDS, Mutant, mutants, result_of, unexplained

# One of each kind, and more of those with several seams.
SPREAD = (Mutant(105, "forgets the use before", "blocks.0 3", EVERY),)


@pytest.mark.parametrize("mutant", SPREAD, ids=str)
def test_what_changes_a_sum_is_found(mutant):
    result = result_of(mutant)
    assert unexplained(result) == ""
    assert result.verdict == "found"


def test_the_spread_has_each_kind():
    assert {mutant.kind for mutant in SPREAD} == set(KINDS)


@pytest.mark.rest
@pytest.mark.parametrize("part", range(10))
def test_all_mutations_are_found_or_change_nothing(part):
    for mutant in mutants(500)[part::10]:
        assert unexplained(result_of(mutant)) == "", mutant
