"""The layout is integers: ranges, shards, padding."""

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
            start, stop, part = layout.held(entry, rank)
            elements = [first + i for _, first, n in spans(part) for i in range(n)]
            assert 0 <= start <= stop <= layout.shard_size
            assert elements == [rank * layout.shard_size + i - entry.offset for i in range(start, stop)]
            held += elements
        assert held == list(range(entry.size))


@given(shapes, st.integers(1, 130))
def test_parameters_and_padding_tile_the_buffer(shapes, shards):
    layout = plan(shapes, shards)
    pieces = [(entry.offset, entry.stop) for entry in layout.entries] + list(layout.padding)
    pieces.sort()
    assert pieces[0][0] == 0 and pieces[-1][1] == layout.total
    assert all(before[1] == after[0] for before, after in zip(pieces, pieces[1:], strict=False))


@given(shapes, st.integers(1, 130))
def test_shards_and_parameters_are_aligned(shapes, shards):
    layout = plan(shapes, shards)
    assert layout.shard_size % ALIGNMENT == 0
    assert all(entry.offset % ALIGNMENT == 0 for entry in layout.entries)


@given(shapes, st.integers(1, 130))
def test_shard_size_is_the_formula(shapes, shards):
    layout = plan(shapes, shards)
    up = lambda n: (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT  # noqa: E731
    aligned = sum(up(entry.size) for entry in layout.entries)
    assert layout.shard_size == up((aligned + shards - 1) // shards)
