"""Links of a pipeline, on threads: bits, order, memory, and what is told when something goes wrong."""

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest

from shardrt.comm import CollectiveDelay, CollectiveMismatch, init_device_mesh, recording
from shardrt.comm.links import Links
from shardrt.device import StreamError, get
from shardrt.device.memory import Pool
from shardrt.faults import diagnosis, flight
from shardrt.faults.flight import Recorder, read_all
from tests import links
from tests.links import Program, rings
from tests.ranks import run_ranks

X = np.arange(6, dtype=np.float32)


def two(body, needed=frozenset({(0, 1, "F")}), **settings):
    """What `body(mesh, links)` gives on two ranks."""

    def rank():
        mesh = init_device_mesh("cpu")
        made = Links(mesh, needed, **settings)
        try:
            return body(mesh, made)
        finally:
            made.close()

    return run_ranks(2, rank)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (3, 2)])
def test_whatever_is_late_the_bits_are_those_of_one_rank(ranks, chunks):
    """Slots that are freed are NaN, each link is late by times of its own, and so is each action."""
    for seed in range(3):
        times = random.Random(seed)

        def late(*_, times=times):
            time.sleep(times.choice([0, 0, 1e-4, 2e-3]))

        def body(late=late):
            mesh = init_device_mesh("cpu", wrap=lambda made: CollectiveDelay(made, 0.0, late))
            return Program(mesh, chunks=chunks, before=late).run()

        links.check(run_ranks(ranks, body)[0], ranks * chunks)


def test_a_slot_is_received_into_again_only_when_compute_has_freed_it():
    def body(mesh, made):
        for m in range(3):
            what = f"F{m}"
            if mesh.rank == 0:
                made.send("F", 1, (X + m,), tag=what)
            else:
                made.expect("F", 0, tag=what)
        if mesh.rank == 1:
            first, second = (made.receive("F", 0, tag=f"F{m}") for m in range(2))
            time.sleep(0.05)  # in which the third would come
            assert (first.arrays[0] == X).all() and (second.arrays[0] == X + 1).all()
            with pytest.raises(
                RuntimeError, match=r"all 2 slots of this link.*\(F0, F1\); give it more slots"
            ):
                made.receive("F", 0, tag="F2")
            first.free()
            third = made.receive("F", 0, tag="F2")
            assert (third.arrays[0] == X + 2).all() and (second.arrays[0] == X + 1).all()
            second.free()
            third.free()
        made.finish()

    two(body)


def test_links_hold_after_many_steps_what_they_hold_after_one_and_what_they_planned(monkeypatch):
    """What other tests have left, whose threads end at any time and give memory back, is not counted."""
    held = {}
    monkeypatch.setattr(get("cpu"), "_pool", Pool())
    before = set(threading.enumerate())

    def body():
        mesh = init_device_mesh("cpu")
        made = Links(mesh, rings(2), slots={(0, 1, "F"): 3, (1, 0, "B"): 4})
        program = Program(mesh, links=made)
        for step in range(4):
            program.step(step)
            mesh.communicator("control").barrier(stream=mesh.device.current_stream)
            if mesh.rank == 0:
                gc.collect()
                arenas = [end._arena for end in (*made._in.values(),) if end._arena]
                slots = sum(slot.array.nbytes for arena in arenas for slot in arena.slots)
                kept = sum(len(end._kept) for end in made._out.values())
                pool = mesh.device._pool.held_bytes
                threads = len(set(threading.enumerate()) - before)
                held.setdefault("first" if step < 2 else step, (slots, kept, pool, threads))
            mesh.communicator("control").barrier(stream=mesh.device.current_stream)
        float32 = [((shape, "float32"),) for shape in links.SHAPES]
        boundary = ((links.SHAPES[1], "float32"), None, ((), "int64"), ((0, 2), "float16"))
        return made.plan({(0, 1, "F"): [boundary], (1, 0, "B"): float32})

    plans = run_ranks(2, body)
    assert len(set(held.values())) == 1, held
    each = 48128  # 40 x 300 x 4, up to whole 256 bytes
    assert plans == [(4 * each, 0), (3 * (each + 256), 0)]
    assert held["first"][:2] == (plans[0][0], 0)


@pytest.mark.parametrize("receiver", ["prompt", "late"])
def test_what_a_send_keeps_depends_on_the_calls_and_on_no_clock(receiver):
    def body(mesh, made):
        control, stream = mesh.communicator("control"), mesh.device.current_stream
        for m in range(5):
            if mesh.rank == 1:
                made.expect("F", 0, tag=f"F{m}")
        refs, alive = [], []
        for m in range(5):
            if mesh.rank == 0:
                array = X + m
                refs.append(weakref.ref(array))
                made.send("F", 1, (array,), tag=f"F{m}", keep=(1, 2, 3, 3, 2)[m])
                del array
                alive.append([ref() is not None for ref in refs])
            else:
                time.sleep(0.01 if receiver == "late" else 0)
                made.receive("F", 0, tag=f"F{m}").free()
            if receiver == "prompt":
                control.barrier(stream=stream)
        made.finish()
        return [sum(each) for each in alive], [ref() for ref in refs]

    assert two(body)[0] == ([1, 2, 3, 3, 2], [None] * 5)


def test_larger_messages_take_larger_slots_and_the_old_ones_go():
    def body(mesh, made):
        for m, size in enumerate((10, 1000, 10)):
            if mesh.rank == 0:
                made.send("F", 1, (np.full(size, m, np.float32),), key=size, tag=f"F{m}")
            else:
                made.expect("F", 0, key=size, tag=f"F{m}")
        if mesh.rank == 1:
            got = [made.receive("F", 0, tag=f"F{m}") for m in range(2)]  # of both sizes at once
            assert [each.arrays[0].size for each in got] == [10, 1000]
            assert all((each.arrays[0] == m).all() for m, each in enumerate(got))
            for each in got:
                each.free()
            last = made.receive("F", 0, tag="F2")
            assert (last.arrays[0] == 2).all()
            last.free()
        made.finish()
        if mesh.rank == 1:
            (end,) = made._in.values()
            assert not end._outgrown and [slot.array.size for slot in end._arena.slots] == [4096] * 2

    two(body)


# What is wrong


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"tag": "F3 of stage 0"}, "F3 of stage 0, 6 of float32"),
        ({"shape": (7,)}, "F2 of stage 0, 7 of float32"),
        ({"dtype": "f8"}, "F2 of stage 0, 6 of float64"),
    ],
)
def test_ends_that_differ_are_told_both(sent, message):
    """In a pair whose ranks are not the first two of the mesh, so that the ranks named are not the pair's."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))["dp"]
        made = Links(mesh, {(1, 0, "F")})
        root = mesh.root.rank
        if mesh.rank == 1:
            array = np.zeros(sent.get("shape", 6), sent.get("dtype", "f4"))
            made.send("F", 0, (X,), key="x", tag="F1 of stage 0")
            made.send(
                "F", 0, (array,), key="x" if "tag" in sent else "y", tag=sent.get("tag", "F2 of stage 0")
            )
            made.finish()
        else:
            made.expect("F", 1, key="x", tag="F1 of stage 0")
            made.receive("F", 1, tag="F1 of stage 0").free()
            made.expect("F", 1, key="x", tag="F2 of stage 0")
            with pytest.raises(StreamError) as caught:
                made.receive("F", 1, tag="F2 of stage 0")
            assert isinstance(caught.value.__cause__, CollectiveMismatch)
            expected = f"rank {root + 2} sent {message}; rank {root} receives F2 of stage 0, 6 of float32"
            assert expected in str(caught.value)
        made.close()
        return True

    assert run_ranks(4, body) == [True] * 4


def test_wrong_use_is_told_in_a_line():
    def body(mesh, made):
        if mesh.rank == 0:
            made.send("F", 1, (X,), tag="F0")
            with pytest.raises(
                ValueError, match=r"send F1: shapes are Layout\(.*\(2,\).*, but were .*\(6,\).* with this key"
            ):
                made.send("F", 1, (X[:2],), tag="F1")
            with pytest.raises(
                ValueError, match=r"send F1: shapes are Layout\(.*about='other'\), but were .* with this key"
            ):
                made.send("F", 1, (X,), tag="F1", about="other")
            with pytest.raises(ValueError, match=r"send F1: arrays must be contiguous, got shape \(3,\)"):
                made.send("F", 1, (X[::2],), tag="F1")
        else:
            with pytest.raises(RuntimeError, match="receive F0 from rank 0: the next message is nothing"):
                made.receive("F", 0, tag="F0")
            made.expect("F", 0, tag="F0")
            with pytest.raises(RuntimeError, match="receive F1 from rank 0: the next message is F0"):
                made.receive("F", 0, tag="F1")
            with pytest.raises(RuntimeError, match="F0 from rank 0 were not received"):
                made.finish()
            got = made.receive("F", 0, tag="F0")
            with pytest.raises(RuntimeError, match="F0 from rank 0 were not freed"):
                made.finish()
            got.free()
        made.finish()

    two(body)


@pytest.mark.parametrize("link", [(0, 0, "F"), (0, 2, "F"), (-1, 0, "F")])
def test_a_link_needs_two_ranks_of_the_mesh(link):
    with pytest.raises(ValueError, match=f"link 'F' from rank {link[0]} to {link[1]} is impossible"):
        run_ranks(2, lambda: Links(init_device_mesh("cpu"), {link}))


def test_ranks_that_need_different_links_are_told_at_once():
    def body():
        mesh = init_device_mesh("cpu")
        Links(mesh, {(0, 1, "F")} if mesh.rank < 2 else {(0, 1, "B")})

    with pytest.raises(
        ValueError, match=r"ranks \[2\] of .* passed other links than rank 0; this rank passed \[\("
    ):
        run_ranks(3, body)


# Ranks that fail


def test_a_rank_that_raises_ends_the_others_and_no_thread_is_left():
    gc.collect()  # of streams of other tests
    before = threading.active_count()

    def body():
        mesh = init_device_mesh("cpu")
        program = None

        def fail(kind, stage, m):
            if (kind, stage, m) == ("B", 1, 1):
                raise KeyError("lost")

        try:
            program = Program(mesh, before=fail)
            program.run()
        finally:
            program.links.close()

    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, body)
    assert caught.value.__notes__ == ["on rank 1 of 3 (thread world)"]
    del caught
    gc.collect()
    deadline = time.monotonic() + 100
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


# Ranks that hang


def reported_while(job, folder, expected):
    """What is said of the ranks of a job that hangs, once it begins as expected, or after 100 seconds."""
    thread = threading.Thread(target=job)
    thread.start()
    message, deadline = "", time.monotonic() + 100
    while not message.startswith(expected) and time.monotonic() < deadline:  # until all others wait
        time.sleep(0.01)
        message = diagnosis.blame(read_all(folder)[0])
    return message, thread


def hung(folder, ranks, stop, expected, chunks=1, also=lambda mesh, recorder: None):
    """The line of blame where a rank hangs in its computation, before the action `stop`.

    also: what else is recorded.
    """
    gate = threading.Event()

    def body():
        mesh = init_device_mesh("cpu")
        recorder = Recorder(folder, mesh.rank, mesh.size)
        recording.record(mesh, recorder)
        also(mesh, recorder)
        Program(mesh, chunks=chunks, before=lambda *action: action == stop and gate.wait(200)).step()

    message, job = reported_while(lambda: run_ranks(ranks, body), folder, expected)
    gate.set()
    job.join()
    return message


WAIT_FOR_1 = (
    "recv F2 of stage 1 from rank 1, 21 of float32, of F[1:3], recv shapes of B0 of stage 1 from rank 1"
)


@pytest.mark.parametrize(
    ("ranks", "chunks", "stop", "behind", "blame"),
    [
        (2, 1, ("F", 0, 1), 0, "rank 1 waits in recv shapes of F1 of stage 0 from rank 0, 1 of int64, of F"),
        # 3 waits for 2, and 2 for 1, as 0 does.
        (4, 1, ("F", 1, 2), 1, f"ranks 0,2 wait in {WAIT_FOR_1}"),
        # Around the ring, where also what rank 1 itself will need later has been posted.
        (2, 2, ("F", 2, 3), 0, "rank 1 waits in recv F3 of stage 2 from rank 0, 12000 of float32"),
    ],
)
def test_the_rank_that_hangs_is_named_with_action_stage_and_micro_batch(
    tmp_path, ranks, chunks, stop, behind, blame
):
    message = f"rank {behind} is behind: {blame}"
    assert hung(tmp_path, ranks, stop, message, chunks).startswith(message)


def test_a_rank_that_waits_in_a_stream_as_well_waits_for_what_its_program_needs(tmp_path):
    """Rank 1 gathers ahead with rank 2, which waits for rank 1; the program of rank 1 waits for rank 0."""

    def gathers(mesh, recorder):
        if mesh.rank:
            state = flight.ENTERED if mesh.rank == 1 else flight.DONE
            number = 7 if mesh.rank == 1 else 6
            recorder._write(state, *recorder.facts("gather[1:3]", number, "all_gather", "blocks.0", None))

    blame = "rank 0 is behind: rank 1 waits in recv F2 of stage 0 from rank 0"
    assert hung(tmp_path, 3, ("F", 0, 2), blame, also=gathers).startswith(blame)


def test_who_waits_at_the_end_of_a_step_for_a_message_to_be_taken_says_so(tmp_path):
    gate = threading.Event()

    def body(mesh, made):
        recording.record(mesh, Recorder(tmp_path, mesh.rank, 2))
        if mesh.rank == 0:
            made.send("F", 1, (X,), tag="F3 of stage 0")
        else:
            gate.wait(200)
            made.expect("F", 0, tag="F3 of stage 0")
            made.receive("F", 0, tag="F3 of stage 0").free()
        made.finish()

    blame = "rank 1 is behind: rank 0 waits in send F3 of stage 0 to rank 1, 6 of float32, of F"
    message, job = reported_while(lambda: two(body), tmp_path, blame)
    gate.set()
    job.join()
    assert message == blame
