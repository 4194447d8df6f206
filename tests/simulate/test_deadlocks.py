"""Programs whose ranks wait for each other for ever, where sends wait for their receives."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrt.comm import init_device_mesh, links
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Collective, Group
from shardrt.simulate.deadlocks import deadlock
from shardrt.simulate.order import order_of
from shardrt.simulate.script import record_of
from tests.races.recorded import Case, recorded
from tests.simulate.written import Written, programs


def pair(*calls):
    """Two ranks: each makes these messages in turn, "send" or "recv", with the other one."""
    written = [Written(rank, 2) for rank in range(2)]
    for program in written:
        for call, facts in calls:
            site, other = f"{call}.py:{program.rank}", 1 - program.rank
            program.call("links", call, site, peer=other, number=1, nbytes=64, **facts)
    return written


SENDS, RECEIVES = ("send", {"waits": True, "tag": "blocks.3"}), ("recv", {"tag": "blocks.3"})


def test_two_ranks_that_send_first_wait_for_each_other_and_are_reported():
    assert [str(waiting) for waiting in deadlock(pair(SENDS, RECEIVES))] == [
        f"rank {rank}, send of 64 bytes to rank {1 - rank} for blocks.3, stream links, send.py:{rank}: "
        f"waits for rank {1 - rank}"
        for rank in range(2)
    ]
    order_of(pair(SENDS, RECEIVES))  # races take sends that don't wait


def test_a_send_that_is_buffered_or_grouped_with_its_receive_does_not_block():
    assert not deadlock(pair(("send", {}), RECEIVES))
    assert not deadlock(pair(("send", {"waits": True, "grouped": True}), RECEIVES))


def test_a_group_waits_for_both_of_its_ends():
    first, second = pair(("send", {"waits": True, "grouped": True}), RECEIVES)
    second.items.pop()  # it is grouped with no other message
    assert [waiting.rank for waiting in deadlock([first, second])] == [0, 0]


@pytest.mark.parametrize("stream, count", [("one", 2), ("two", 0)])
def test_two_communicators_in_two_orders_block_in_one_stream(stream, count):
    written = [Written(rank, 2) for rank in range(2)]
    for program in written:
        program.groups = {"a": Group(range(2)), "b": Group(range(2))}
        for group in "ab"[:: 1 - 2 * program.rank]:
            thread = f"stream {group}" if stream == "two" else "compute"
            program.call(thread, "all_gather", f"{group}.py", group=group, number=1)
    found = deadlock(written)
    assert len(found) == count
    if found:
        assert ["a.py" in str(found[0]), "b.py" in str(found[1])] == [True, True]


def test_events_that_order_the_streams_count():
    written = [Written(rank, 2) for rank in range(2)]
    for program in written:
        program.groups = {"a": Group(range(2)), "b": Group(range(2))}
        first, then = "ab"[:: 1 - 2 * program.rank]
        program.call(first, "all_gather", "first.py", group=first, number=1)
        program.wait(then, program.record(first), "wait.py")
        program.call(then, "all_gather", "then.py", group=then, number=1)
    assert [(waiting.rank, waiting.missing) for waiting in deadlock(written)] == [(0, (1,)), (1, (0,))]


def test_a_rank_that_leaves_a_call_out_keeps_the_others_waiting():
    written = [Written(rank, 3) for rank in range(3)]
    for program in written[:2]:
        program.call("gather", "all_gather", "gathers.py:9", number=1, nbytes=8, tag="head")
    missing = "rank {}, all_gather of 8 bytes for head, stream gather, gathers.py:9: waits for rank 2"
    assert [str(waiting) for waiting in deadlock(written)] == [missing.format(0), missing.format(1)]


def ring(alike, **facts):
    """One rank of a ring of four, which sends to the next and receives from the one before."""
    program = Written(0, 4)
    program.alike = alike
    program.call("ring", "send", "ring.py", number=1, peer=1, waits=True, **facts)
    program.call("ring", "recv", "ring.py", number=1, peer=3)
    return [program]


def test_one_rank_shows_a_ring_of_ranks_that_all_send_first():
    assert [waiting.missing for waiting in deadlock(ring(range(4)))] == [(1,)]
    assert not deadlock(ring(range(4), grouped=True))
    assert not deadlock(ring(()))  # other ranks may do anything


@pytest.mark.parametrize("grouped", [True, False])
def test_ranks_of_a_gpu_that_pass_arrays_on_must_group_it(grouped):
    def passes():
        mesh = init_device_mesh("auto")
        ranks, here = mesh.communicator("gather"), mesh.device
        sent, received = here.zeros(4, np.float32), here.zeros(4, np.float32)
        stream, to, source = here.current_stream, (ranks.rank + 1) % 4, (ranks.rank - 1) % 4
        if grouped:
            ranks.exchange(received, sent, to=to, source=source, stream=stream)
        else:
            ranks.send(sent, peer=to, stream=stream)
            ranks.recv(received, peer=source, stream=stream)

    for stands_for, count in ((None, 1), ({rank: [rank] for rank in range(4)}, 4)):
        found = deadlock(record_of(passes, 4, like=CUDADevice, stands_for=stands_for))
        assert len(found) == (0 if grouped else count)
        assert not deadlock(record_of(passes, 4, like=CPUDevice, stands_for=stands_for))


def test_stages_whose_links_share_a_stream_block(monkeypatch, tmp_path):
    """As in pytorch#172668: each has a send in front of the receive that the other one needs."""
    assert not deadlock(recorded(Case(("pipeline", "accumulate")), tmp_path))
    streams = {}
    made = links._stream
    monkeypatch.setattr(
        links, "_stream", lambda device, *end: streams.setdefault(device, made(device, end[0], "links"))
    )
    found = [str(waiting) for waiting in deadlock(recorded(Case(("pipeline", "accumulate")), tmp_path))]
    assert len(found) == 2 and " for F1 of stage 0, stream links, " in found[0]
    assert all(": waits for rank " in waiting for waiting in found)


@st.composite
def muddled(draw):
    """Programs of some ranks, of which one has lost an item or has two in the other order."""
    written = draw(programs(draw(st.integers(2, 3))))
    items = draw(st.sampled_from(written)).items
    calls = [n for n, item in enumerate(items) if isinstance(item, Collective)]
    if calls:
        place = draw(st.sampled_from(calls))
        call = items.pop(place)
        if draw(st.booleans()):
            items.insert(draw(st.integers(0, len(items))), call)
    return written


def stops(written):
    try:
        order_of(written)
    except ValueError:
        return True
    return False


@given(muddled())
@settings(max_examples=60)
def test_the_order_of_races_stops_where_this_does(written):
    """A send that doesn't wait; and one that does is a collective of two ranks."""
    assert stops(written) == bool(deadlock(written))
    for program in written:
        program.groups |= {
            f"{a} {b}": Group((a, b)) for a in range(len(written)) for b in range(len(written)) if a != b
        }
    waiting, together = [], []
    for program in written:
        for into, change in ((waiting, _waits), (together, _together)):
            copy = Written(program.rank, program.world_size, program.by_host)
            copy.groups = program.groups
            copy.items = [change(program.rank, item) for item in program.items]
            into.append(copy)
    assert stops(together) == bool(deadlock(waiting))


def _waits(rank, item):
    message = isinstance(item, Collective) and item.call == "send"
    return replace(item, waits=True) if message else item


def _together(rank, item):
    if not isinstance(item, Collective) or item.peer < 0:
        return item
    ends = (rank, item.peer) if item.call == "send" else (item.peer, rank)
    return replace(item, call="all_gather", peer=-1, group=f"{ends[0]} {ends[1]}")
