"""Every pair of features, recorded on CUDA's terms: no race, and none that waits for values hide."""

import pytest

from shardrt.simulate.races import races, without_values
from tests.fsdp.test_pairs import ALONE, TOGETHER, readable
from tests.races.recorded import recorded

EVERY = [*ALONE, *TOGETHER]
QUICK = set(EVERY[::14])


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=() if names in QUICK else pytest.mark.slow) for names in EVERY],
    ids=readable,
)
def test_no_two_uses_of_memory_meet(names, tmp_path):
    programs = recorded(names, tmp_path)
    assert sum(len(program.items) for program in programs) > 300
    assert not [str(race) for race in races(programs)]
    assert not [str(race) for race in races([without_values(program) for program in programs])]
