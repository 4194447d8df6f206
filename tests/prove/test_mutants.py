"""Mutations of a training step: what changes its sums on real ranks, `shardrt prove` finds."""

import pytest

from tests.prove.mutants import EVERY, KINDS, WAIT, Mutant, mutants, result_of, unexplained

SPREAD = (
    Mutant(22, "over ranks in reverse", "(root) reduce", 1),
    Mutant(36, "gather over half of the ranks", "blocks.0 + blocks.1 gather", 4),
    Mutant(70, "gradient 16 elements on", "blocks.0 + blocks.1 2", 6),
    Mutant(195, "update one element on", "step 2", 2),
    Mutant(68, "a third of the scale", "(root) (bfloat16, cut) reduce", 0),
    Mutant(60, "twice the scale", "blocks.2 reduce", 0),
    Mutant(60, "sends nothing", "(root)", 0),
    Mutant(187, "forgets the use before", "blocks.1 0", EVERY),
    Mutant(19, "reduced twice", "blocks.0 copies", 0),
    Mutant(68, "adds to what the slot had", "blocks.0 (bfloat16, cut) 0", EVERY),
    Mutant(36, "no wait", "compute fsdp/gathers.py Gathers.ensure", EVERY),
    Mutant(11, "not gathered", "blocks.3 gather", EVERY),
    Mutant(195, "shard of the next rank", "blocks.3", EVERY),
    Mutant(19, "half of each shard gathered", "stage 0 copies", EVERY),
    Mutant(70, "tied copies not summed", "embed.weight", 0),
    Mutant(20, "first use of a tied parameter forgotten", "stage 0 (float32, cut, tied embed.weight) 0", 3),
)


@pytest.mark.parametrize("mutant", SPREAD, ids=str)
def test_what_changes_a_sum_is_found(mutant):
    result = result_of(mutant)
    assert unexplained(result) == ""
    assert result.proof.found_by
    assert result.differences or mutant.kind == WAIT  # a race need not happen


def test_the_spread_has_each_kind():
    assert {mutant.kind for mutant in SPREAD} == set(KINDS)


@pytest.mark.rest
@pytest.mark.parametrize("part", range(10))
def test_all_mutations_are_found_or_change_nothing(part):
    for mutant in mutants(500)[part::10]:
        assert unexplained(result_of(mutant)) == "", mutant
