"""The layout is integers: ranges, shards, padding."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardrt.fsdp.layout import ALIGNMENT, Layout
from shardrt.nn.extents import spans

shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


def plan(shapes, shards):
    return Layout.plan([(f"p{i}", shape) for i, shape in enumerate(shapes)], shards)


@given(shapes, st.integers(1, 130))
def test_every_element_is_held_by_exactly_one_rank(shapes, shards):
    layout = plan(shapes, shards)
    for entry in layout.entries:
        held = []
        for rank in range(shards):
            start, stop, part = layout.in_shard(entry, rank)
            elements = [first + i for _, first, n in spans(part) for i in range(n)]
            assert 0 <= start <= stop <= layout.shard_size
            assert elements == [rank * layout.shard_size + i - entry.offset for i in range(start, stop)]
            held += elements
        assert held == list(range(entry.size))


def aligned(count):
    return -(-count // ALIGNMENT) * ALIGNMENT


@given(shapes, st.integers(1, 130))
def test_aligned_parameters_and_padding_tile_shards_of_the_least_size(shapes, shards):
    layout = plan(shapes, shards)
    assert layout.shard_size == aligned(-(-sum(aligned(entry.size) for entry in layout.entries) // shards))
    assert all(entry.offset % ALIGNMENT == 0 for entry in layout.entries)
    pieces = sorted([*((entry.offset, entry.stop) for entry in layout.entries), *layout.padding])
    assert pieces[0][0] == 0 and pieces[-1][1] == layout.total
    assert all(before[1] == after[0] for before, after in pairwise(pieces))
