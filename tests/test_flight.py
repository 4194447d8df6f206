"""The flight recorder: what it keeps, that it survives a kill, and that damage is told in a line."""

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardrt.comm import init_device_mesh, interceptors, recording
from shardrt.faults import diagnosis, flight
from shardrt.faults.flight import DamagedFlight, Recorder, read, read_all
from shardrt.tools import autopsy
from tests.ranks import python, run_ranks

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from shardrt.faults.flight import Recorder
recorder = Recorder(Path(sys.argv[1]), 1, 3)
array = np.zeros(7, np.float32)
for step in range(500):
    recorder.mark("data", step)
    recorder.part("forward")
    recorder.around(recorder.facts("gather", step + 1, "all_gather", f"blocks.{step}", array), id, (0,))
facts = recorder.facts("reduce", 9, "reduce_scatter", "x" * 60 + ".last", array)
recorder.around(facts, lambda: os.kill(os.getpid(), signal.SIGKILL), ())
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of which rank 1 was killed inside a collective."""
    run = tmp_path_factory.mktemp("run")
    assert python("-c", KILLED, run / "flight").returncode == -signal.SIGKILL
    return run


def test_the_latest_records_survive_a_kill(killed):
    found = read(killed / "flight" / "rank-1.bin")
    assert (found.rank, found.size, found.ended) == (1, 3, "")
    numbers = [record.number for record in found.records]
    assert numbers == list(range(numbers[-1] - flight.RECORDS + 1, numbers[-1] + 1))
    assert numbers[-1] == 1 + 4 * 500 + 1
    assert (
        str(found.open_call)
        == "reduce_scatter #9 of reduce, 7 of float32, unit " + ("x" * 60 + ".last")[-52:]
    )
    assert (found.last.step, found.last.phase) == (499, "forward")
    assert str(found.last_calls()["gather"]) == "all_gather #500 of gather, 7 of float32, unit blocks.499"
    times = [record.monotonic for record in found.records]
    assert times == sorted(times) and found.last.wall >= found.began
    assert found.resident > 1e6


def test_a_record_that_was_cut_off_is_left_out(killed, tmp_path):
    data = bytearray((killed / "flight" / "rank-1.bin").read_bytes())
    last = read(killed / "flight" / "rank-1.bin").last.number
    end = flight._RING_AT + ((last - 1) % flight.RECORDS + 1) * flight._RECORD.size
    data[end - 8 : end] = bytes(8)
    (tmp_path / "rank-1.bin").write_bytes(data)
    assert read(tmp_path / "rank-1.bin").last.number == last - 1


def test_damaged_files_are_told_in_a_line_and_never_a_traceback(killed, tmp_path):
    whole = (killed / "flight" / "rank-1.bin").read_bytes()
    path = tmp_path / "flight" / "rank-1.bin"
    path.parent.mkdir()
    for length in (0, 1, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFlight, match=f"rank-1.bin: .* got {length}$"):
            read(path)
        found = autopsy.examine(tmp_path)
        assert found["code"] == 65 and len(found["errors"]) == 1
    chooser, readable = random.Random(0), 0
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chooser.choice((1, 20, 3000))):
            place = chooser.choice((chooser.randrange(512), chooser.randrange(len(data))))
            data[place] = chooser.randrange(256)
        path.write_bytes(data)
        found = autopsy.examine(tmp_path)
        readable += bool(found["ranks"])
        assert all(text.isprintable() for text in autopsy.lines(found))
    assert 20 < readable < 180  # both happen


def test_threads_record_side_by_side(tmp_path):
    recorder = Recorder(tmp_path, 0, 1)
    facts = recorder.facts("gather", 1, "barrier", "", None)

    def work(_):
        for _ in range(2000):
            recorder.around(facts, int, ())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [record.number for record in read(recorder.path).records] == list(range(16001 - 255, 16002))


def test_parts_of_a_step_do_not_hide_an_evaluation(tmp_path):
    recorder = Recorder(tmp_path, 0, 1)
    for phase in ("set-up", "eval", "save"):
        recorder.mark(phase)
        recorder.part("forward")
        assert recorder.phase == phase


def test_the_action_of_a_pipeline_is_named_until_the_next_one_or_the_end_of_the_step(tmp_path):
    recorder = Recorder(tmp_path, 0, 2)
    array = np.zeros(3, np.float32)

    def place():
        return read(tmp_path / "rank-0.bin").place

    recorder.mark("data", 3)
    recorder.part("forward", "F3 of stage 1")
    recorder.part("forward")  # of the units in it
    recorder.around(recorder.facts("F", 1, "recv", "F3 of stage 0 from rank 1", array), id, (0,))
    assert place() == "forward, F3 of stage 1"
    flights = read_all(tmp_path)[0]
    (line,) = diagnosis.table(flights, flights, {})
    assert line.startswith("rank 0  step 3, forward, F3 of stage 1: last done recv F3 of stage 0 from rank 1")
    recorder.part("forward", "F4 of stage 1")
    assert place() == "forward, F4 of stage 1"
    recorder.part("backward", "I3 of stage 1")
    assert place() == "backward, I3 of stage 1"
    recorder.mark("optimizer")
    assert place() == "optimizer"


def recorded(folder):
    """Every call of every kind, on 3 ranks."""
    mesh = init_device_mesh()
    mesh.communicator("early")
    recording.record(mesh, recorder := Recorder(folder, mesh.rank, mesh.size))
    stream, size = mesh.device.current_stream, mesh.size
    for role in ("early", "late"):
        comm = mesh.communicator(role)
        comm.all_gather(np.zeros(size, "f4"), stream=stream, tag="a")
        comm.reduce_scatter(np.zeros(1), np.zeros(size), stream=stream, tag="b")
        comm.all_reduce(np.zeros(5, "i4"), stream=stream)
        comm.broadcast(np.zeros(5, "u1"), root=0, stream=stream)
        comm.all_to_all(np.zeros(size), np.zeros(size), stream=stream)
        rows = [mesh.rank] * size
        comm.all_to_all(
            np.zeros(sum(range(size))),
            np.zeros(sum(rows)),
            received=range(size),
            sent=rows,
            stream=stream,
            tag="c",
        )
        comm.barrier(stream=stream)
        if mesh.rank < 2:
            (comm.send if mesh.rank else comm.recv)(np.zeros(2), peer=1 - mesh.rank, stream=stream)
    recording.record(mesh, None)
    mesh.communicator("late").barrier(stream=stream)
    return recorder.latest


def test_every_call_of_every_communicator_of_a_mesh_is_recorded(tmp_path):
    assert run_ranks(3, recorded, tmp_path) == [33, 33, 29]
    flights, message = read_all(tmp_path)
    assert not message
    done = [str(record) for record in flights[0].records if record.state == flight.DONE]
    assert done[:8] == [
        "all_gather #1 of early, 3 of float32, unit a",
        "reduce_scatter #2 of early, 3 of float64, unit b",
        "all_reduce #3 of early, 5 of int32",
        "broadcast #4 of early, 5 of uint8",
        "all_to_all #5 of early, 3 of float64",
        "all_to_all #6 of early, unit c",
        "barrier #7 of early",
        "recv from rank 1, 2 of float64, of early",
    ]
    assert done[8].startswith("all_gather #1 of late")


def waiting(folder, calls):
    """Flights of ranks that are in the given calls, by communicator: [(name, number, still inside)]."""
    for rank, own in enumerate(calls):
        recorder = Recorder(folder, rank, len(calls))
        for name, number, inside in own:
            facts = recorder.facts(name, number, "all_gather", "u", None)
            recorder._write(flight.ENTERED, *facts)
            if not inside:
                recorder._write(flight.DONE, *facts)
    return read_all(folder)[0]


@pytest.mark.parametrize(
    ("calls", "behind"),
    [
        ([[("g", 2, True)], [("g", 1, False)], [("g", 2, True)]], [1]),
        ([[("g", 2, True)], [], [("g", 2, True)]], [1]),
        # rank 1 is still inside what the others have left, and waits for nobody
        ([[("g", 1, False), ("r", 1, True)], [("g", 1, True)]], [1]),
        # 0 waits for 1, which waits for 2
        (
            [
                [("r", 3, False), ("g", 2, True)],
                [("g", 1, False), ("r", 3, True)],
                [("r", 2, False), ("g", 2, False)],
            ],
            [2],
        ),
        # a circle
        ([[("g", 2, True), ("r", 1, False)], [("g", 1, False), ("r", 2, True)]], [0, 1]),
        ([[("g", 1, False)], [("g", 1, False)]], []),
    ],
    ids=["less", "nothing", "inside", "chain", "circle", "nobody"],
)
def test_the_rank_that_is_behind_is_the_one_that_waits_for_nobody(tmp_path, calls, behind):
    assert diagnosis.behind(waiting(tmp_path, calls)) == behind


def test_a_rank_that_has_no_file_yet_is_behind_where_another_waits_for_its_message(tmp_path):
    recorder = Recorder(tmp_path, 0, 2)
    recorder._write(flight.ENTERED, *recorder.facts("g", 1, "recv", interceptors.message_from(1, "u"), None))
    assert diagnosis.blame(read_all(tmp_path)[0]).startswith("rank 1 is behind: rank 0 waits in recv")


def test_a_rank_whose_file_is_missing_is_reported(tmp_path):
    run_ranks(3, recorded, tmp_path)
    (tmp_path / "rank-1.bin").unlink()
    assert read_all(tmp_path)[1] == [f"no flight file of rank 1 in {tmp_path}"]


def in_groups(folder):
    """Two groups of two; {0, 1} has called three times, {2, 3} once; rank 0 waits for rank 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    recording.record(mesh, recorder := Recorder(folder, mesh.rank, mesh.size))
    shard, replicate = mesh.communicator("gather", "shard"), mesh.communicator("gather", "replicate")
    for _ in range(3 if mesh.rank < 2 else 1):
        shard.barrier(stream=mesh.device.current_stream)
    names = [made.interceptors[0].name for made in (shard, replicate, mesh.communicator("control"))]
    if mesh.rank == 0:
        recorder._write(flight.ENTERED, *recorder.facts(names[0], 4, "barrier", "", None))
    other = init_device_mesh("cpu")
    recording.record(other, recorder)
    return [*names, other.communicator("control").interceptors[0].name]


def test_a_group_is_not_taken_for_another_of_its_axis(tmp_path):
    names = run_ranks(4, in_groups, tmp_path)
    assert names[0] == ["gather[0:2]", "gather[0:3:2]", "control", "control~2"]
    assert names[3] == ["gather[2:4]", "gather[1:4:2]", "control", "control~2"]
    flights, _ = read_all(tmp_path)
    assert diagnosis.behind(flights) == [1]
    assert diagnosis.blame(flights) == "rank 1 is behind: rank 0 waits in barrier #4 of gather[0:2]"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (range(8), "g"),
        ([2, 3], "g[2:4]"),
        ([1, 3, 5], "g[1:6:2]"),
        ([5], "g[5:6]"),
        ([0, 1, 4], "g[0,1,4]"),
        ([3, 2], "g[3,2]"),
    ],
)
def test_a_name_says_which_ranks_belong_to_a_communicator(ranks, name):
    assert recording.group_name("g", list(ranks), 8) == name
    assert list(flight.members(name, 8)) == list(flight.members(f"{name}~2", 8)) == list(ranks)
    assert flight.members("ther[0,1,4]~"[1:] + "[", 8) is None  # the end of a name that was too long


def test_without_room_for_a_file_it_records_in_memory(tmp_path):
    recorder = Recorder(tmp_path / "a", 0, 1)
    recorder.move(tmp_path / "a" / "rank-0.bin")  # no folder can be made there
    recorder.mark("data", 3)
    assert recorder.path is None
    recorder.move(tmp_path / "b")
    assert [record.step for record in read(recorder.path).records] == [0, 3]
