"""Prices of programs written by hand, whose times follow from a line of arithmetic each."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrt.device.program import HOST, Collective, Group, HostRead, HostWait, Record, Step, Wait, Work
from shardrt.parallel.schedules import schedule
from shardrt.simulate.clock import _Clock, lateness, price
from shardrt.simulate.links import transfer
from shardrt.simulate.machine import FOLDER, Collectives, Host, Kernel, Link, Machine, Processor, Switch, at
from shardrt.tools import trace
from shardrt.train.trace import events_of
from tests.simulate.written import Truth, Written, programs

# A kernel of f operations takes f seconds, one that moves b bytes b seconds; a link moves a byte in a second.
PLAIN = Machine(
    name="plain",
    origin="made up",
    date="",
    measured=False,
    ranks_per_node=2,
    device=Processor({"": 1.0}, 1.0),
    node=Link(0.0, 1.0),
    network=Link(0.0, 0.5),
    collectives=Collectives(memory=0.0),
)


def near(value):
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def seconds(*written, machine=PLAIN):
    return price(written, machine).seconds


def test_streams_keep_their_order_and_run_beside_each_other():
    program = Written()
    for stream, flops in ("compute", 3), ("copy", 4), ("compute", 2):
        program.work(stream, "", nbytes=flops if stream == "copy" else 0, flops=flops * (stream != "copy"))
    timing = price([program], PLAIN)
    assert timing.ended[0] == near([3, 4, 5])
    assert [(span.stream, span.start, span.stop) for span in timing.recordings[0].spans] == [
        ("compute", 0, near(3)),
        ("copy", 0, near(4)),
        ("compute", near(3), near(5)),
    ]


def test_a_stream_waits_for_a_mark_and_the_trace_shows_it():
    program = Written()
    program.work("compute", "", flops=3)
    program.wait("gather", program.record("compute"), "")
    program.work("gather", "", flops=2)
    timing = price([program], PLAIN)
    assert timing.seconds == near(5)
    (wait,) = (span for span in timing.recordings[0].spans if span.label == "wait")
    assert (wait.stream, wait.start, wait.stop) == ("gather", 0, near(3))
    recorded, waited = timing.recordings[0].passed
    assert (recorded.mark, recorded.waited, waited.mark, waited.waited) == (1, False, 1, True)


def test_the_host_submits_one_after_the_other_and_streams_may_starve():
    machine = replace(PLAIN, host=Host(item=1.0, launch=2.0))
    program = Written()
    program.work("compute", "", flops=1)  # 3 seconds to submit, then 1
    program.work("compute", "", flops=1, launches=2)  # 5 more
    assert seconds(program, machine=machine) == near(3 + 5 + 1)


def test_the_host_goes_on_when_what_it_waits_for_is_done():
    machine = replace(PLAIN, host=Host(item=1.0))
    program = Written()
    program.work("compute", "", flops=10)
    program.wait(HOST, program.record("compute"), "")
    program.host("", reads=(0, 4))
    program.work("compute", "", flops=1)
    assert seconds(program, machine=machine) == near(1 + 10 + 1 + 1)


def test_a_kernel_takes_the_longer_of_computing_and_moving_and_a_constant_for_each_launch():
    device = Processor({"": 10.0, "float32": 5.0}, 2.0, constant=0.25)
    machine = replace(PLAIN, device=device)
    for facts, expected in (
        ({"flops": 20, "nbytes": 2}, 2.25),
        ({"flops": 20, "nbytes": 2, "dtype": "float32"}, 4.25),
        ({"flops": 20, "nbytes": 10}, 5.25),
        ({"flops": 20, "launches": 4}, 3.0),
    ):
        program = Written()
        program.work("compute", "", **facts)
        assert seconds(program, machine=machine) == near(expected)


def test_efficiency_is_a_straight_line_over_the_logarithm_and_belongs_to_the_longest_name():
    curve = [[10, 0.2], [1000, 0.6]]
    assert [at(curve, size) for size in (1, 10, 100, 1000, 1e9)] == near([0.2, 0.2, 0.4, 0.6, 0.6])
    kernels = [Kernel(), Kernel("kern", flops=curve), Kernel("other", flops=[[1, 0.1]])]
    program = Written()
    program.work("compute", "", flops=100)  # all are called "kernel"
    assert seconds(
        program, machine=replace(PLAIN, device=Processor({"": 1.0}, 1.0, kernels=kernels))
    ) == near(250)


def test_the_last_wave_of_tiles_of_a_product_may_be_small():
    machine = replace(PLAIN, device=Processor({"": 1.0}, 1.0, kernels=[Kernel(tile=(16, 16))], units=4))
    program = Written()
    program.work("compute", "", flops=2 * 10 * 70 * 8, sizes=(10, 70, 8))  # 5 tiles in 2 waves of 4
    assert seconds(program, machine=machine) == near(2 * 10 * 70 * 8 * 8 / 5)


def test_kernels_share_what_both_need_and_nothing_else():
    program = Written()
    program.work("compute", "", flops=4)
    program.work("other", "", flops=1)
    program.work("copy", "", nbytes=3)
    # Two share the processor: 1 is done after 2 seconds, and 4 at 5. Nobody else wants memory.
    assert price([program], PLAIN).ended[0] == near([5, 2, 3])


def test_an_item_goes_at_the_pace_of_its_scarcest_resource():
    program = Written()
    program.work("compute", "", flops=4, nbytes=2)  # all of the processor, half of memory
    program.work("copy", "", nbytes=3)  # all of memory
    # Memory is asked for 1.5 times, so both slow down to 2/3: at 4.5 s the copy has moved its 3 bytes, and
    # the kernel has 1 second left.
    assert price([program], PLAIN).ended[0] == near([5.5, 4.5])
    whole = replace(PLAIN, device=Processor({"": 1.0}, 1.0, whole=True))
    assert price([program], whole).ended[0] == near([4 + 3, 6])


def test_where_the_host_computes_its_kernels_stop_it():
    program = Written()
    program.work("compute", "", flops=3)
    program.work("gather", "", flops=2)
    assert price([program], PLAIN).ended[0] == near([5, 4])  # they share the processor
    machine = replace(PLAIN, host_streams=["compute"])
    assert price([program], machine).ended[0] == near([3, 5])
    program.items.reverse()
    assert price([program], machine).ended[0] == near([4, 5])


def test_the_host_takes_time_for_what_it_reads_itself_where_the_machine_says_so():
    program = Written()
    program.host("", reads=(0, 6))
    program.host("", reads=[(0, 4), (8, 12)])
    assert seconds(program) == 0
    assert seconds(program, machine=replace(PLAIN, host=Host(touch=0.5))) == near(1)
    machine = replace(PLAIN, host=Host(touch=0.5), host_processor=Processor({"": 1.0}, 2.0))
    assert price([program], machine).ended[0] == near([0.5 + 6 / 2, 4 + 8 / 2])


def test_what_the_host_does_itself_comes_after_it_has_submitted_what_was_before_and_takes_time_to_begin():
    machine = replace(PLAIN, host=Host(item=1.0), host_streams=["compute"])
    program = Written()
    for _ in range(3):
        program.work("copy", "", nbytes=1)
    program.work("compute", "", flops=2)
    assert price([program], machine).ended[0] == near([2, 3, 4, 6])


def test_narrow_products_lose_by_their_smallest_size():
    kernel = Kernel("linear.", flops=[[1, 0.5]], narrow=[[1, 0.1], [100, 1.0]])
    device = Processor({"": 10.0}, 1.0, kernels=(Kernel(), kernel))
    for sizes, seconds in ((1000, 100, 1000), 1), ((1000, 10, 1000), 1 / 0.55), ((1, 50, 70), 10):
        work = Work("compute", "linear.forward", flops=5, sizes=sizes)
        assert device.demands(work) == (near(seconds), 0)


def test_what_was_measured_of_a_collective_goes_before_the_link_inside_a_node():
    calls = {"reduce_scatter": [[1, 0.5], [100, 5.0]]}
    machine = replace(PLAIN, collectives=Collectives(base=1.0, memory=0.0, calls=calls))
    assert transfer(machine, "reduce_scatter", 200, range(2)).seconds == near(1 + 100 / 5)
    assert transfer(machine, "reduce_scatter", 20, range(2)).seconds == near(1 + 10 / 2.75)
    assert transfer(machine, "all_gather", 20, range(2)).seconds == near(1 + 10)
    assert transfer(machine, "reduce_scatter", 200, range(4)).seconds == near(1 + 150 / 2 / 0.5)  # two nodes


def test_work_of_the_host_itself_runs_on_its_processor():
    machine = replace(PLAIN, host_processor=Processor({"": 0.5}, 1.0))
    program = Written()
    program.work(HOST, "adam", flops=1)
    program.work("compute", "", flops=1)
    assert price([program], machine).ended[0] == near([2, 3])


@pytest.mark.parametrize("up", [True, False])
def test_copies_between_host_and_device_go_over_their_link(up):
    machine = replace(PLAIN, host_link=Link(1.0, 2.0))
    program = Written()
    program.take((0, 8), place="host")
    program.take((100, 108))
    host, device = (0, 8), (100, 108)
    program.work("copy", "", reads=host if up else device, writes=device if up else host, nbytes=16)
    program.work("compute", "", reads=device, nbytes=5)
    program.free(0)
    program.work("copy", "", reads=(0, 8), nbytes=3)  # it is the device's now
    assert price([program], machine).ended[0][2:4] == near([1 + 8 / 2, 5])
    assert price([program], machine).ended[0][5] == near(8)


# --- collectives --------------------------------------------------------------------------------------------

LINKS = replace(PLAIN, node=Link(1.0, 10.0), network=Link(100.0, 1.0), collectives=Collectives(base=1000.0))


SWITCHED = replace(LINKS, switch=Switch(latency=5.0, hop=40.0, efficiency=0.5))
TREES = replace(LINKS, collectives=Collectives(base=1000.0, parallel_trees=2.0))
CPUS, THREE = (replace(LINKS, ranks_per_node=each, host_streams=("compute",)) for each in (2, 3))
OF_80_BYTES = [  # (machine, call, ranks, seconds); and, of some, what is sent inside a node and outside
    (LINKS, "all_gather", range(2), 1000 + 1 + 40 / 10),  # of a node: one step, half of the 80 bytes
    (LINKS, "reduce_scatter", range(2), 1000 + 1 + 40 / 10),
    (LINKS, "all_gather", range(4), 1000 + 2 * 1 + 100 + 60 / 2),  # two nodes: two rings, two cards
    (LINKS, "all_gather", (0, 2), 1000 + 100 + 40),  # one rank of each node: one card
    (LINKS, "all_reduce", range(2), 1000 + 2 * 1 + 80 / 10),
    # A tree moves more, and is no shorter yet.
    (LINKS, "all_reduce", range(4), min(1000 + 2 * (2 + 100) + 120 / 2, 1000 + 2 * (1 + 100) + 160 / 2)),
    (LINKS, "all_to_all", range(4), 1000 + 100 + 40),  # half of it leaves the node
    (LINKS, "broadcast", range(2), 1000 + 1 + 80 / 10),
    (LINKS, "send", (0, 1), 1000 + 1 + 80 / 10),
    (LINKS, "send", (1, 2), 1000 + 100 + 80),
    (LINKS, "barrier", range(4), 1000 + 1 + 100),
    (LINKS, "all_gather", (3,), 1000),
    # CPUs of several hosts send once for each host: a half of the 80 bytes, shared by two ranks.
    (CPUS, "all_gather", range(4), 1000 + 100 + 20),
    (CPUS, "reduce_scatter", range(4), 1000 + 100 + 20),
    (CPUS, "all_reduce", range(4), 1000 + 2 * 100 + 40),
    (CPUS, "reduce_scatter", range(8), 1000 + 100 + 30),
    (CPUS, "reduce_scatter", (0, 2), 1000 + 100 + 40),
    (THREE, "reduce_scatter", range(6), 1000 + 100 + 40),  # hosts are no subtrees: parts go to each rank
    (THREE, "all_gather", range(6), 1000 + 100 + 40 / 3),
    (CPUS, "all_gather", range(2), 1000 + 1 + 4),
    # Switches that add, and parallel trees, are taken where they are faster.
    (SWITCHED, "all_reduce", range(2), 5 + 40 / 5, (80 + 40, 0)),  # all is read, a half is written
    (SWITCHED, "all_reduce", range(4), 5 + 2 * 40 + 60 / 2, (80 + 40, 60 / 2)),  # two nodes, once
    (SWITCHED, "all_reduce", range(8), 5 + 2 * 2 * 40 + 2 * 70 / 2, (80 + 40, 70)),
    (SWITCHED, "all_gather", range(2), 5 + 2 * 80 / 5, (40, 0)),
    (SWITCHED, "all_gather", range(4), 1000 + 2 * 1 + 100 + 60 / 2, (30, 30)),  # not beyond a node
    (SWITCHED, "all_reduce", (0, 2), 1000 + 2 * 100 + 80, (0, 80)),  # nor with one rank on each
    (TREES, "reduce_scatter", (0, 2, 4, 6), 8e-6 + 2 * 100 / 3.5 + 4 * 2 + 80 / 0.75, (0, 60)),
    (TREES, "reduce_scatter", range(4), 1000 + 2 * 1 + 100 + 60 / 2, (30, 30)),
]


@pytest.mark.parametrize("row", OF_80_BYTES)
def test_a_collective_of_80_bytes_takes_what_its_way_takes(row):
    machine, call, ranks, expected, *sent = row
    found = transfer(machine, call, 80, ranks)
    assert found.seconds == near(expected)
    assert not sent or (found.inside, found.outside) == near(sent[0])


def test_an_all_to_all_in_unequal_parts_takes_its_larger_direction():
    parts = ((9, 9), (10, 80), (30, 5), (2, 0))  # rank 1 is on this rank's node, the others on another
    found = transfer(LINKS, "all_to_all", 99, range(4), 0, parts)
    assert (found.inside, found.outside) == (10, 32)
    assert found.seconds == near(1000 + 100 + 32)
    assert transfer(LINKS, "all_to_all", 99, range(2), 0, parts[:2]).seconds == near(1000 + 1 + 80 / 10)
    of_calls = replace(LINKS, collectives=Collectives(base=1000.0, calls={"all_to_all": ((1, 4.0),)}))
    assert transfer(of_calls, "all_to_all", 99, range(2), 0, parts[:2]).seconds == near(1000 + 1 + 80 / 4)


def test_with_much_to_move_a_ring_gathers_faster_than_a_switch():
    for nbytes, ring in (80, False), (1 << 20, True):
        found = transfer(SWITCHED, "all_gather", nbytes, range(2))
        assert (found.latency == 1001) == ring


def test_a_tree_is_taken_where_a_ring_has_too_many_steps():
    ring = 2 * (256 * 1 + 255 * 100)
    found = transfer(LINKS, "all_reduce", 8, range(512))
    assert found.seconds == near(1000 + 2 * (1 + 8 * 100) + 16 / 2)
    assert found.seconds < ring


def test_a_collective_begins_when_the_last_recorded_rank_has_come_and_ends_for_all_at_once():
    written = [Written(rank, 2) for rank in range(2)]
    for program, before in zip(written, (1, 5), strict=True):
        program.work("gather", "", flops=before)
        program.call("gather", "all_gather", "", nbytes=4)
        program.work("gather", "", flops=1)
    timing = price(written, PLAIN)
    assert [began[1] for began in timing.began] == near([5, 5])
    assert [ended[1:] for ended in timing.ended] == [near([7, 8]), near([7, 8])]


def test_ranks_that_are_not_recorded_come_with_those_that_are():
    program = Written(0, 4)
    program.call("gather", "all_gather", "", nbytes=4)
    assert seconds(program) == near(3)  # 3 bytes over two cards of half a byte a second each
    program.groups["all"] = Group((0, 1))
    assert seconds(program) == near(2)


def test_a_collective_slows_a_kernel_down_by_the_part_of_the_processor_that_it_keeps():
    machine = replace(PLAIN, collectives=Collectives(processor=0.25, memory=0.0))
    program = Written(0, 2)
    program.call("gather", "all_gather", "", nbytes=20)  # 10 seconds alone
    program.work("compute", "", flops=4)
    # 1.25 of the processor is asked for until the kernel ends, at 5; by then the collective has done 4 of 10.
    assert price([program], machine).ended[0] == near([11, 5])


def test_a_message_leaves_with_its_sender_and_is_received_when_it_has_come():
    sender, receiver = Written(0, 2), Written(1, 2)
    sender.work("compute", "", flops=3)
    sender.wait("send", sender.record("compute"), "")
    sender.call("send", "send", "", nbytes=2, number=1, peer=1)
    receiver.call("recv", "recv", "", nbytes=2, number=1, peer=0)
    receiver.call("recv", "recv", "", nbytes=2, number=2, peer=0)
    sender.call("send", "send", "", nbytes=2, number=2, peer=1)
    timing = price([receiver, sender], PLAIN)
    assert timing.ended[0] == near([5, 7])
    assert seconds(receiver) == near(4)  # nobody recorded the sender: it is taken to have come


# --- steps --------------------------------------------------------------------------------------------------


def test_steps_their_split_and_what_is_exposed_of_communication():
    program = Written(0, 2)
    for step in range(2):
        program.call("gather", "all_gather", "", nbytes=8)  # 4 seconds
        program.wait("compute", program.record("gather"), "")
        program.call("gather", "all_gather", "", nbytes=4)  # 2, beside the kernel
        program.work("compute", "", flops=5 + step)
        program.call("compute", "all_reduce", "", nbytes=2)  # 2, which nothing hides
        program.wait("gather", program.record("compute"), "")
        program.items.append(Step(step))
    timing = price([program], PLAIN)
    assert timing.steps == [near([11, 12])]
    assert timing.split(0) == {"gather": near(6), "compute": near(6 + 2)}
    assert timing.split(0, 0)["compute"] == near(5 + 2)
    assert timing.exposed(0) == {"": near(6), "all_gather": near(4), "all_reduce": near(2)}


def test_what_was_priced_is_traced_as_a_run_is():
    program = Written(0, 2)
    for step in range(2):
        program.call("gather", "all_gather", "", nbytes=8)
        program.wait("compute", program.record("gather"), "")
        program.work("compute", "", flops=5, label="forward blocks.0")
        program.wait("gather", program.record("compute"), "")
        program.items.append(Step(step))
    (recording,) = price([program], PLAIN).recordings
    events = events_of(recording, 0, 0.0)
    assert trace.split(events, 0, 1) == {
        "forward": near(5e3),
        "waiting for streams": near(4e3),
        "other": near(0),
    }
    assert trace.busy(events, 0, 1) == {"gather": near(9e3)}
    arrows = [event["name"] for event in events if event["ph"] == "s"]
    assert arrows.count("after all_gather") == 2
    assert "<svg" in trace.picture(events, 0, 1)


def test_what_ran_long_before_hides_no_communication():
    program = Written(0, 2)
    for label, flops in ("first", 1), ("second", 3):
        program.work("compute", "", flops=flops)
        program.wait("gather", program.record("compute"), label)
        program.call("gather", "all_gather", "", nbytes=2 * flops)
        program.wait("compute", program.record("gather"), label)
        program.work("compute", "", flops=1)
    program.items.append(Step(0))
    assert price([program], PLAIN).exposed(0) == {"": near(4), "all_gather": near(4)}


def test_what_is_exposed_is_divided_among_the_collectives_that_run_then():
    program = Written(0, 2)
    program.call("gather", "all_gather", "", nbytes=12)  # 6 s alone, more beside others
    program.call("reduce", "reduce_scatter", "", nbytes=4)
    program.work("compute", "", flops=1)
    program.items.append(Step(0))
    timing = price([program], PLAIN)
    found = timing.exposed(0)
    gather, reduce = (timing.ended[0][index] for index in range(2))
    assert reduce < gather
    assert found == near(
        {"": gather - 1, "all_gather": gather - reduce + (reduce - 1) / 2}
        | {"reduce_scatter": (reduce - 1) / 2}
    )


def test_programs_that_wait_for_ever_are_named():
    first, second = Written(0, 2), Written(1, 2)
    for program, numbers in (first, (1, 2)), (second, (2, 1)):
        for number in numbers:
            program.call("one", "all_reduce", "", number=number)
    with pytest.raises(ValueError, match="deadlock: rank 0, one, item 0; rank 1, one, item 0"):
        price([first, second], PLAIN)


def programs_of(table, cost, nbytes):
    """Each action is work of `compute`; what another rank needs is sent by a stream for each link."""
    ranks = len(table.ranks)
    written = [Written(rank, ranks) for rank in range(ranks)]
    for rank, row in enumerate(table.ranks):
        program = written[rank]
        for action in row:
            forward = action.kind == "F"
            before = action.stage + (-1 if forward else 1)
            after = action.stage + (1 if forward else -1)
            number = 2 * (action.stage * table.micro_batches + action.micro_batch) + forward
            if action.kind != "W" and 0 <= before < table.stages and table.rank_of(before) != rank:
                steps = number + 2 * table.micro_batches * (before - action.stage)
                program.call("recv", "recv", "", number=steps, nbytes=nbytes, peer=table.rank_of(before))
                program.wait("compute", program.record("recv"), "")
            program.work("compute", str(action), flops=cost[action.kind])
            if action.kind != "W" and 0 <= after < table.stages and table.rank_of(after) != rank:
                stream = f"send {table.rank_of(after)} {action.kind == 'F'}"
                program.wait(stream, program.record("compute"), "")
                program.call(stream, "send", "", number=number, nbytes=nbytes, peer=table.rank_of(after))
    return written


@pytest.mark.parametrize(
    "name, p, m", [("GPipe", 4, 6), ("1F1B", 4, 6), ("Interleaved1F1B", 2, 4), ("ZB-H1", 3, 5)]
)
@pytest.mark.parametrize("transfer_time", [0, 0.5])
def test_a_pipeline_takes_as_long_as_the_replay_of_its_table(name, p, m, transfer_time):
    table = schedule(name, p, m, 2 if name.startswith("Inter") else None)
    replay = table.replay(forward=1, inputs=1.5, weights=0.75, transfer=transfer_time)
    machine = replace(PLAIN, ranks_per_node=p, node=Link(transfer_time, 1.0))
    timing = price(programs_of(table, {"F": 1, "I": 1.5, "W": 0.75, "B": 2.25}, 0), machine)
    assert timing.seconds == near(replay.makespan)
    for rank, row in enumerate(table.ranks):
        ends = [s.stop for s in timing.recordings[rank].spans if s.stream == "compute" and s.label != "wait"]
        assert ends == near(list(replay.end[rank])) and len(ends) == len(row)
        assert replay.makespan - timing.split(rank)["compute"] == near(replay.idle[rank])


@settings(max_examples=30, deadline=None)
@given(programs(ranks=2), st.integers(1, 3), st.booleans())
def test_nothing_runs_before_what_must_come_first(written, some, on_host):
    for program in written:
        program.by_host = ()  # which streams the host has is the machine's here
        for n, item in enumerate(program.items):
            if isinstance(item, Work):
                program.items[n] = replace(item, flops=1 + n % some, nbytes=n % 3)
    machine = replace(PLAIN, host=Host(item=0.25), host_streams=["compute"] if on_host else [])
    truth, timing = Truth(written), price(written, machine)
    work = [(rank, n) for rank, n in truth.touched if isinstance(written[rank].items[n], Work)]
    for first in truth.touched:
        for second in work:
            if isinstance(item_of(written, first), IN_A_THREAD) and truth.in_order(first, second):
                assert timing.ended[first[0]][first[1]] <= timing.began[second[0]][second[1]] + 1e-9


IN_A_THREAD = Work | Collective | Record | Wait | HostWait | HostRead


def item_of(written, place):
    return written[place[0]].items[place[1]]


# --- machines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_machines_of_the_package_load_and_say_where_their_figures_come_from(path):
    machine = Machine.load(path.stem)
    assert machine.name == path.stem and machine.origin and machine.date
    assert Machine.load(path) == machine
    assert machine.measured == (path.stem == "cpu-2")
    program = Written(0, 16)
    program.call("gather", "all_gather", "", nbytes=1 << 20)
    program.work("compute", "", flops=10**10, nbytes=10**6, sizes=(1000, 500, 10000))
    assert 0 < seconds(program, machine=machine) < 1


@pytest.mark.parametrize(
    "change, message",
    [
        (("units = 132", "unit = 132"), "device.unit: unknown key; known: bandwidth, "),
        (('"" = 989.4e12, ', ""), 'device.flops: the key "" is missing'),
        (("ranks_per_node = 8", ""), "missing 1 required positional argument: 'ranks_per_node'"),
        (("[host]", "[host"), "Expected ']'"),
    ],
)
def test_what_is_no_machine_is_refused_with_its_file_and_key(tmp_path, change, message):
    text = (FOLDER / "h100-8.toml").read_text()
    assert change[0] in text
    (tmp_path / "mine.toml").write_text(text.replace(*change))
    with pytest.raises(ValueError, match="mine.toml: ") as error:
        Machine.load(tmp_path / "mine.toml")
    assert message in str(error.value)


def test_a_machine_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(FileNotFoundError, match="unknown machine 'h100'; known: a100-8, cpu-2, h100-8"):
        Machine.load("h100")


def test_each_lane_is_woken_once_for_an_item():
    """Not again for each that asks: what prices a long program would grow faster than the program."""
    program = Written()
    for number in range(200):
        program.work("gather", "", nbytes=3)
        program.wait("compute", program.record("gather"), "")
        program.work("compute", "", flops=2)
        if number % 10 == 9:
            program.wait(HOST, program.record("compute"), "")
            program.host("", reads=(0, 4))
    clock = _Clock([program], replace(PLAIN, host=Host(item=1.0)))
    clock.run()
    assert next(clock.order) <= len(program.items)


@pytest.mark.parametrize("before", [(3, 10), (10, 3)])
def test_a_message_that_is_too_large_for_its_receiver_s_buffer_waits_for_it(before):
    machine = replace(PLAIN, collectives=Collectives(memory=0.0, eager=2))
    for nbytes, ends in (2, (before[0] + 2, max(before[0] + 2, before[1]))), (4, (14, 14)):
        sender, receiver = Written(0, 2), Written(1, 2)
        for program, flops in (sender, before[0]), (receiver, before[1]):
            program.work("link", "", flops=flops)
        sender.call("link", "send", "", nbytes=nbytes, number=1, peer=1)
        receiver.call("link", "recv", "", nbytes=nbytes, number=1, peer=0)
        timing = price([sender, receiver], machine)
        assert (timing.ended[0][1], timing.ended[1][1]) == near(ends)


def test_ranks_that_exchange_large_messages_do_not_wait_for_each_other_for_ever():
    machine = replace(PLAIN, collectives=Collectives(memory=0.0, eager=0))
    written = [Written(rank, 2) for rank in range(2)]
    for program in written:
        program.call("link", "send", "", nbytes=4, number=1, peer=1 - program.rank)
        program.call("link", "recv", "", nbytes=4, number=1, peer=1 - program.rank)
    with pytest.raises(ValueError, match="deadlock"):
        price(written, machine)
    for program in written:
        program.items[0] = replace(program.items[0], grouped=True)
    assert price(written, machine).seconds == near(4)


def test_jitter_makes_a_collective_wait_for_the_last_of_its_ranks():
    program = Written(0, 8)
    program.call("gather", "all_gather", "", nbytes=8)
    alone = seconds(program)
    assert price([program], PLAIN, 0.5).seconds == near(alone + 0.5 * lateness(8))
    last = np.random.default_rng(1).standard_normal((4000, 64)).max(1).mean()
    assert (lateness(1), lateness(64)) == (0.0, pytest.approx(last, rel=0.02))
