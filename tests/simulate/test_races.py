"""Races of programs written by hand, told by name, and of random ones, against a search in their graph."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrt import device
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    Group,
    HostRead,
    HostWait,
    Range,
    Record,
    Take,
    Wait,
    Work,
)
from shardrt.device.simulated import SimulatedDevice
from shardrt.simulate.order import order_of
from shardrt.simulate.races import neighbours, races, races_both_ways, without_values
from shardrt.simulate.script import record_of
from tests.simulate.written import Truth, Written, programs

SLOT = (100, 200)


def message(*written):
    """(site, site, count) of each race."""
    return [(race.first.item.site, race.second.item.site, race.count) for race in races(written)]


def gathered(slots=1, units=3, ready=True, free=True, wrong=False):
    """A slot is gathered into, computed with, and gathered into again."""
    program, free_of, before = Written(), {}, None
    for unit in range(units):
        slot = unit % slots
        memory = (100 * slot, 100 * slot + 100)
        if free and slot in free_of:
            program.wait("gather", free_of[slot], "schedule.py:10")
        program.work("gather", "gathers.py:1", writes=memory)
        gathered = program.record("gather")
        if ready:
            program.wait("compute", before or gathered if wrong else gathered, "schedule.py:20")
        before = gathered
        program.work("compute", "linear.py:1", reads=memory)
        free_of[slot] = program.record("compute")
    return program


def test_each_wait_for_a_slot_that_is_missing_or_for_another_event_is_a_race_with_a_count():
    assert message(gathered(slots=1)) == message(gathered(slots=2)) == []
    assert message(gathered(slots=2, units=3, wrong=True)) == [("gathers.py:1", "linear.py:1", 2)]
    assert message(gathered(slots=2, units=4, free=False)) == [("linear.py:1", "gathers.py:1", 2)]
    assert message(gathered(ready=False, free=False, units=5)) == [
        ("gathers.py:1", "linear.py:1", 5),
        ("linear.py:1", "gathers.py:1", 4),
    ]


def test_a_missing_wait_is_told_with_both_sides_buffer_and_repair():
    program = gathered(ready=False, units=1)
    program.items.insert(0, Take(Range(0, 400), "device", "gathered parameters", "slot 0", "arena.py:7"))
    (race,) = races([program])
    assert (race.first.stream, race.first.does) == ("gather", "writes")
    assert (race.second.stream, race.second.does) == ("compute", "reads")
    assert [buffer.label for buffer in race.buffers] == ["slot 0", "slot 0"]
    assert race.repair == "record an event in stream gather after the first, and let stream compute wait " + (
        "for it before the second"
    )
    for words in ("gathers.py:1", "linear.py:1", "gathered parameters slot 0", "arena.py:7", race.repair):
        assert words in str(race)


def test_accesses_of_other_parts_of_a_buffer_and_reads_are_no_race():
    program = Written()
    for stream in ("compute", "reduce"):
        program.work(stream, f"{stream}.py", reads=(200, 300))
    program.work("compute", "left.py", writes=(100, 150))
    program.work("reduce", "right.py", reads=(150, 200))
    program.work("reduce", "nothing.py", reads=(120, 120))
    assert message(program) == []
    program.work("copy", "both.py", reads=(149, 151))
    assert message(program) == [("left.py", "both.py", 1)]


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_may_read_only_what_it_has_waited_for(waits):
    program = Written()
    program.work("compute", "loss.py", writes=(0, 4))
    mark = program.record("compute")
    program.work("compute", "after.py", writes=(8, 12))
    if waits:
        program.wait(HOST, mark, "loop.py:1")
    program.host("loop.py:1", reads=(0, 4))
    assert message(program) == ([] if waits else [("loss.py", "loop.py:1", 1)])
    if not waits:
        assert "let the host wait for it" in races([program])[0].repair


def test_what_the_host_writes_is_seen_by_all_that_is_submitted_later_and_by_nothing_earlier():
    program = Written()
    program.host("tokens.py:1", writes=(0, 4))
    program.work("copy", "upload.py:1", reads=(0, 4))
    program.host("tokens.py:2", writes=(0, 4))
    assert message(program) == [("upload.py:1", "tokens.py:2", 1)]


@pytest.mark.parametrize("by_host, found", [(("compute",), []), ((), [("op.py", "update.py", 1)])])
def test_what_the_host_does_itself_is_done_when_it_goes_on(by_host, found):
    """Ops on a CPU: what the host does next needs no wait, nor what it submits; other streams do."""
    program = Written(by_host=by_host)
    program.work("compute", "op.py", writes=SLOT)
    program.work(HOST, "update.py", reads=SLOT, writes=SLOT)
    program.work("gather", "gathers.py", reads=SLOT)
    assert message(program) == found
    program.work("compute", "next.py", writes=SLOT)
    (*_, race) = races([program])
    assert (race.first.item.site, race.second.item.site) == ("gathers.py", "next.py")
    assert race.repair.endswith("let stream compute wait for it before the second")


def test_the_cpu_has_done_what_is_in_its_compute_stream_when_the_call_returns():
    """So SimulatedDevice says of it that the host does it."""
    here, ran = device.get("cpu"), []
    here.current_stream.submit(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert SimulatedDevice(CPUDevice).program.by_host == (here.current_stream.name,)
    assert SimulatedDevice(CUDADevice).program.by_host == ()


@pytest.mark.parametrize("like", [CPUDevice, CUDADevice])
def test_an_array_of_the_host_is_summed_over_ranks_when_the_call_returns(like):
    """As gradients on the host that two stages use are, and then unscaled."""

    def summed():
        mesh = init_device_mesh("auto")
        gradient = mesh.device.pinned(64, np.float32)
        mesh.communicator("control").all_reduce(gradient, stream=mesh.device.current_stream)
        mesh.device.host.kernels.elementwise.unscale_(gradient, 0.5)

    programs = record_of(summed, 2, stands_for={0: [0], 1: [1]}, like=like)
    used = [item for program in programs for item in program.items if getattr(item, "writes", ())]
    assert [type(item) for item in used] == [Collective, Work] * 2
    assert not races(programs)


def lent_again(waits):
    """The fetch stream writes memory that is given back and lent to compute: the defect of a lost cargo."""
    program = Written()
    program.take(SLOT, "cargo", "offload.py:1")
    program.work("fetch", "offload.py:2", writes=SLOT)
    read = program.record("fetch")
    if waits:
        program.wait("compute", read, "offload.py:3")
    program.free(SLOT[0], "offload.py:4")
    program.take(SLOT, "activation", "forward.py:1")
    program.work("compute", "forward.py:2", writes=SLOT)
    return program


def test_memory_lent_again_while_another_stream_writes_it_is_a_race_of_two_buffers():
    assert message(lent_again(waits=True)) == []
    (race,) = races([lent_again(waits=False)])
    assert [buffer.label for buffer in race.buffers] == ["cargo", "activation"]
    assert "activations cargo" in str(race) and "activations activation" in str(race)


@pytest.mark.parametrize("waits", [True, False])
def test_memory_given_back_to_a_stream_that_has_not_waited_is_a_race_though_nobody_is_lent_it(waits):
    program = lent_again(waits)
    del program.items[-2:]
    assert message(program) == []  # nobody knows who will be lent it
    program.items.pop()
    program.free(SLOT[0], "offload.py:4", stream="compute")
    assert message(program) == ([] if waits else [("offload.py:2", "offload.py:4", 1)])
    if not waits:
        assert "before the memory is given back" in races([program])[0].repair


def of_two_ranks(call, barrier=False, group="all"):
    """Both gather into one buffer that they share, read it, and write their halves of it again."""
    written = []
    for rank in range(2):
        program = Written(rank, 2)
        program.groups[group] = Group((0, 1))
        own = (100, 150) if rank == 0 else (150, 200)
        program.work("gather", f"first {rank}", writes=own)
        program.call("gather", call, f"call {rank}", group=group)
        program.work("gather", f"read {rank}", reads=SLOT)
        if barrier:
            program.call("gather", "barrier", "readers_done", group=group)
        program.work("gather", f"again {rank}", writes=own)
        written.append(program)
    return written


def test_a_collective_begins_when_all_recorded_ranks_of_its_group_have_come():
    assert message(*of_two_ranks("all_gather", barrier=True)) == []
    apart = of_two_ranks("all_gather", barrier=True)
    apart[0].groups["all"], apart[1].groups["all"] = Group((0,)), Group((1,))
    assert {frozenset(race[:2]) for race in message(*apart)} == {
        frozenset(("first 1", "read 0")),
        frozenset(("again 0", "read 1")),
    }


def test_memory_that_ranks_share_needs_a_barrier_before_it_is_written_again():
    found = races(of_two_ranks("all_gather"))
    assert all(race.first.rank != race.second.rank and "barrier" in race.repair for race in found)
    assert {frozenset((race.first.item.site, race.second.item.site)) for race in found} == {
        frozenset(("read 0", "again 1")),
        frozenset(("read 1", "again 0")),
    }


@pytest.mark.parametrize(
    "call, safe", [("all_gather", False), ("reduce_scatter", True), ("all_reduce", True)]
)
def test_nobody_leaves_a_reduction_before_all_have_read(call, safe):
    written = []
    for rank in range(2):
        program = Written(rank, 2)
        program.call("reduce", call, f"call {rank}", reads=SLOT)
        program.work("reduce", f"write {rank}", writes=(100 + 50 * rank, 150 + 50 * rank))
        written.append(program)
    assert (message(*written) == []) == safe


def test_a_message_puts_what_was_before_it_in_order_with_what_follows_its_receipt():
    sender, receiver = Written(0, 2), Written(1, 2)
    sender.work("send", "made", writes=SLOT)
    receiver.call("recv", "recv", "recv", number=7, peer=0)
    sender.call("send", "send", "send", number=7, peer=1)
    receiver.work("recv", "used", reads=SLOT)
    assert message(receiver, sender) == []
    receiver.work("recv", "written", writes=SLOT)
    sender.work("send", "read", reads=SLOT)
    assert len(message(receiver, sender)) == 1  # the receiver tells the sender nothing


def test_ranks_may_call_two_communicators_in_different_orders_in_two_streams():
    first, second = Written(0, 2), Written(1, 2)
    for program, groups in (first, "ab"), (second, "ba"):
        program.groups |= {"a": Group(range(2)), "b": Group(range(2))}
        for group in groups:
            program.call(f"stream {group}", "all_gather", "", group=group, number=1)
    assert message(first, second) == []
    # What is submitted before the host goes on does not see what it does then, though its turn comes later.
    behind = Written()
    behind.work("stream b", "read", reads=SLOT)
    behind.host("written", writes=SLOT)
    second.items[1:1] = behind.items
    assert {frozenset(race[:2]) for race in message(second, first)} == {frozenset(("read", "written"))}


def test_programs_that_can_not_end_or_make_no_sense_are_refused():
    first, second = Written(0, 2), Written(1, 2)
    for program, numbers in (first, (1, 2)), (second, (2, 1)):
        for number in numbers:
            program.call("one", "all_reduce", f"call {number}", number=number)
    with pytest.raises(ValueError, match="deadlock: rank 0, item 0, all_reduce, call 1; rank 1"):
        races([first, second])
    with pytest.raises(ValueError, match="two have the same rank"):
        races([Written(), Written()])
    program = Written()
    program.items += [Wait("compute", 3, "early"), Record("gather", 3)]
    with pytest.raises(ValueError, match="rank 0, item 0, Wait, early: mark 3 was not recorded before"):
        races([program])
    program.items = []
    program.call("one", "barrier", "here", group="none")
    with pytest.raises(ValueError, match="here: the program names no group 'none'"):
        races([program])


def test_values_that_the_host_asks_for_can_be_taken_out_with_their_waits():
    program = Written()
    program.work("compute", "update.py", writes=SLOT)
    mark = program.record("compute")
    program.wait(HOST, mark, "loop.py")
    program.host("loop.py", reads=(0, 4), why="loss")
    program.work("gather", "gathers.py", reads=SLOT)
    program.wait(HOST, mark, "item.py")
    program.host("item.py", reads=(0, 4))
    program.wait(HOST, mark, "offload.py")
    program.host("adam.py", reads=SLOT)
    assert message(program) == []
    without = without_values(program)
    assert [item.site for item in without.items if isinstance(item, HostWait)] == ["offload.py"]
    assert message(without) == [("update.py", "gathers.py", 1)]


# --- programs by chance -------------------------------------------------------------------------------------


def places(order, point):
    number, index = order.place[point]
    return order.programs[number].rank, index


@settings(max_examples=60, deadline=None)
@given(programs())
def test_races_of_a_random_program_are_those_that_a_search_of_its_graph_finds(written):
    truth, sites = Truth(written), {}
    for race in races(written):
        sites[race.first.item.site, race.second.item.site] = race
    items = written[0].items
    by_search = {tuple(items[n].site for _, n in pair) for pair in truth.races()}
    assert set(sites) <= by_search
    assert bool(sites) == bool(by_search)
    # Neighbours are the last write and the reads since, byte by byte; those of them that race are told.
    order = order_of(written)
    pairs = {(places(order, a), places(order, b)) for a, b in neighbours(order)}
    assert {pair for pair in pairs if truth.conflict(*pair)} == pairs
    by_search = {pair for pair in by_bytes(truth) if not truth.in_order(*pair)}
    assert {tuple(items[n].site for _, n in pair) for pair in by_search} == set(sites)


@settings(max_examples=60, deadline=None)
@given(programs(), st.sets(st.integers(0, 23)))
def test_races_with_and_without_values_are_found_at_once(written, asked):
    for program in written:
        for n in asked & set(range(len(program.items))):
            if isinstance(program.items[n], HostRead):
                program.items[n] = replace(program.items[n], why="loss")

    def sites(found):
        return {(race.first.item.site, race.second.item.site) for race in found}

    both, hidden = map(sites, races_both_ways(written))
    with_values, without = sites(races(written)), sites(races([without_values(p) for p in written]))
    assert with_values <= both and bool(both) == bool(with_values)
    assert hidden == without - both


def by_bytes(truth):
    """Neighbours of one rank's program: for each byte the last write, and each stream's last read since."""
    writes, reads, found = {}, {}, set()
    for place in truth.touched:
        item = truth.written[0].items[place[1]]
        read, written = truth.bytes_of(*place)
        for byte in read:
            found.add((writes.get(byte), place))
            reads.setdefault(byte, {})[truth.written[0].thread(item)] = place
        for byte in written:
            found |= {(earlier, place) for earlier in (writes.get(byte), *reads.get(byte, {}).values())}
            if not isinstance(item, Free):
                writes[byte], reads[byte] = place, {}
    return {(first, second) for first, second in found if first not in (None, second)}


@settings(max_examples=40, deadline=None)
@given(programs(ranks=2, length=20))
def test_races_of_two_random_ranks_are_those_that_a_search_of_their_graph_finds(written):
    truth = Truth(written)
    items = {program.rank: program.items for program in written}
    by_search = {frozenset(items[rank][n].site for rank, n in pair) for pair in truth.races()}
    found = {frozenset((race.first.item.site, race.second.item.site)) for race in races(written)}
    assert found <= by_search
    assert bool(found) == bool(by_search)


@settings(max_examples=30, deadline=None)
@given(programs(length=16))
def test_the_repair_of_a_race_puts_its_two_in_order(written):
    (program,) = written
    repair_all(program)
    assert not Truth([program]).races()


def repair_all(program):
    """Record after the first and wait before the second, until there is no race; three new sites."""
    for n in range(200):
        found = races([program])
        if not found:
            return
        race = found[0]
        assert not race.repair.startswith("let rank")
        first, second = (index_of(program, access.item) for access in (race.first, race.second))
        program.marks += 1
        stream = race.second.stream
        wait = HostWait(program.marks, f"repair {n % 3}")
        wait = wait if stream == HOST else Wait(stream, program.marks, f"repair {n % 3}")
        program.items.insert(second, wait)
        program.items.insert(first + 1, Record(race.first.stream, program.marks))
    raise AssertionError("it has no end")


def index_of(program, item):
    return next(n for n, each in enumerate(program.items) if each is item)
