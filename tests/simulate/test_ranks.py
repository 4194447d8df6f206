"""simulate/ranks.py against plain sets."""

import numpy as np
import pytest

from shardrt.simulate.ranks import Ranks


def regular(random):
    """A group of a random mesh, and a rank of it."""
    shape = random.integers(1, 4, 4)
    mesh = np.arange(np.prod(shape)).reshape(shape)
    axes = tuple(slice(None) if random.random() < 0.5 else int(random.integers(0, size)) for size in shape)
    return mesh[axes].ravel().tolist(), mesh


@pytest.mark.parametrize("seed", range(40))
def test_sets_and_their_unions_are_those_of_plain_sets(seed):
    random = np.random.default_rng(seed)
    some, mesh = regular(random)
    ranks = Ranks.of(random.permutation(some))
    assert sorted(ranks) == sorted(some) and ranks.size == len(some)
    assert [rank for rank in mesh.ravel().tolist() if rank in ranks] == sorted(some)
    assert ranks == Ranks.of(list(ranks))
    origin = some[int(random.integers(0, len(some)))]
    where = np.argwhere(mesh == origin)[0]
    axis = int(random.integers(0, 4))
    group = mesh[tuple(slice(None) if n == axis else at for n, at in enumerate(where))].tolist()
    union, times = ranks.spread(Ranks.of(group), origin)
    moved = [set(some) if rank in some else {each + rank - origin for each in some} for rank in group]
    assert set(union) == set().union(*moved)
    assert times == sum(map(len, moved)) // len(set().union(*moved))


def test_irregular_sets_are_kept_rank_by_rank():
    ranks = Ranks.of([0, 1, 3])
    assert (3 in ranks, 2 in ranks, ranks.size, ranks.axes) == (True, False, 3, ())
    union, times = ranks.spread(Ranks.of([0, 8]), 0)
    assert (sorted(union), times) == ([0, 1, 3, 8, 9, 11], 1)
