"""Replays of recorded jobs: every call checked, groups mapped to the ranks here, wrong traces refused."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.collectives.__main__ import main as collectives
from bench.replay import chakra, param, report, writer
from bench.replay.__main__ import _own, main
from bench.replay.plan import Item, Key, Plan, plan
from bench.replay.proof import prove, shown
from bench.replay.run import ALONE, FILLED, GAPS, Player, Round
from bench.replay.trace import COMPUTE, Node, Trace, in_order
from shardrt import device
from shardrt.comm import create, thread
from shardrt.comm.thread import ThreadCommunicator
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun

TRACES = Path(__file__).parent / "traces"
QUICK = ["-n", "1", "-w", "0"]
EVERY = (
    *(("all_gather", dtype) for dtype in ("float32", "bfloat16", "int8")),
    *(("reduce_scatter", dtype) for dtype in ("float32", "bfloat16", "float64", "int32")),
    *(("all_reduce", dtype) for dtype in ("float32", "bfloat16", "")),
    *((call, "float32") for call in ("broadcast", "all_to_all", "reduce", "gather", "scatter", "barrier")),
)


def nodes_of(rank, ranks=3, nbytes=4800):
    """All calls in three streams, behind each other's nodes, and a ring of messages."""
    nodes = [Node(1, "forward", COMPUTE, COMPUTE, start=0.0, seconds=2e-3)]
    for number, (call, dtype) in enumerate(EVERY):
        stream = ("gather", "reduce", COMPUTE)[number % 3]
        size = 0 if call == "barrier" else nbytes
        root = ranks - 1 if call in ("broadcast", "gather", "scatter") else -1
        name = f"{call} {number}"
        nodes.append(
            Node(
                len(nodes) + 1,
                name,
                call,
                stream,
                (len(nodes),),
                None,
                1e-4,
                nbytes=size,
                dtype=dtype,
                root=root,
            )
        )
    for call, peer in (("send", (rank + 1) % ranks), ("recv", (rank - 1) % ranks)):
        nodes.append(Node(len(nodes) + 1, call, call, call, (1,), None, 1e-4, nbytes=800, peer=peer))
    return nodes


def written(folder, ranks=3, world=None, groups=None, of=nodes_of, **facts):
    traces = [Trace("", "", rank, world or ranks, of(rank), groups or {}, **facts) for rank in range(ranks)]
    writer.write(folder, "job", traces)
    return folder


def planned(nodes, rank=0, ranks=2, world=2, of=0, **facts):
    return plan(in_order(Trace("t", "shardrt's", of, world, nodes, **facts)), rank, ranks)


def gather(**more):
    return Node(1, "g", "all_gather", "gather", nbytes=more.pop("nbytes", 64), dtype="float32", **more)


def test_every_call_is_right_and_counted_in_a_thread_world(tmp_path, capsys):
    assert main([str(written(tmp_path)), "-t", "3", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = {row["call"]: 0 for row in found["lines"]}
    for row in found["lines"]:
        counts[row["call"]] += row["count"]
        assert row["wrong"] == 0 and row["ranks"] == (2 if row["call"] in ("send", "recv") else 3)
        figures = [row[name] for name in ("trace_us", "alone_us", "gaps_us", "compute_us")]
        assert all(figure > 0 for figure in figures) and 0 <= row["exposed_us"] <= row["compute_us"] + 1e-3
    wanted = {call: [each for each, _ in EVERY].count(call) for call, _ in EVERY} | {"send": 1, "recv": 1}
    assert counts == wanted
    assert found["total"]["trace_ms"] == pytest.approx(1e3 * 1e-4 * sum(wanted.values()), rel=1e-4)
    assert found["total"]["compute_step_ms"] >= 2.0  # the node that computes
    assert "all_reduce of bfloat16 run as float32" in found["mapped"]
    assert {row["name"] for row in found["names"]} >= {"all_gather 0", "send"}


def test_no_figure_of_a_call_that_is_wrong(tmp_path, capsys, monkeypatch):
    right = ThreadCommunicator._all_gather

    def wrong(self, buffer, tag):
        right(self, buffer, tag)
        if buffer.nbytes == 4800 and buffer.dtype == np.float32 and self.rank == 1:
            buffer[-1] += 1

    monkeypatch.setattr(ThreadCommunicator, "_all_gather", wrong)
    nodes = [gather(nbytes=4800), replace(gather(nbytes=4800), id=2, name="r", call="reduce_scatter")]
    folder = written(tmp_path, of=lambda rank: nodes)
    assert main([str(folder), "-t", "3", *QUICK, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = {row["call"]: row for row in found["lines"]}
    assert rows["all_gather"]["wrong"] == 1 and rows["reduce_scatter"]["wrong"] == 0
    assert all(rows["all_gather"][f"{mode}_us"] is None for mode in ("alone", "gaps", "compute", "exposed"))
    assert rows["reduce_scatter"]["alone_us"] > 0 and found["total"]["alone_ms"] is None


def test_items_wait_for_what_they_depend_on_in_each_mode(tmp_path):
    def one():
        here = device.get("cpu")
        device.set_current(here)
        base, control = create("auto"), create("auto")
        made = plan(Trace("t", "", base.rank, 3, nodes_of(base.rank)), base.rank, 3)
        pairs = [Key((rank, (rank + 1) % 3), "") for rank in range(3)]
        player = Player(
            made,
            sorted({*pairs, *(item.key for item in made.items if item.key and item.key.stream)}),
            base,
            control,
            here,
        )
        player.zero()
        found = {mode: player.play(mode) for mode in (ALONE, GAPS, FILLED)}
        player.close()
        return made, found

    for made, found in thread.run(3, one):
        assert np.isnan(found[ALONE].began[0]) and not found[GAPS].flops and found[FILLED].flops > 0
        for mode, played in found.items():
            for place, item in enumerate(made.items):
                for wait in item.waits:
                    if mode != ALONE or made.items[wait].key is not None:
                        assert played.ended[wait] <= played.began[place]
            assert mode == ALONE or played.ended[0] - played.began[0] >= 2e-3


def test_time_between_nodes_is_idle_and_neighbours_that_compute_are_one_item():
    nodes = [
        Node(1, "a", COMPUTE, COMPUTE, start=0.0, seconds=1.0),
        Node(2, "b", COMPUTE, COMPUTE, (1,), start=1.5, seconds=1.0),
        Node(3, "g", "all_gather", "gather", (2,), 4.0, 1.0, nbytes=64),
        Node(4, "c", COMPUTE, COMPUTE, (2,), start=2.5, seconds=1.0),
        Node(5, "d", COMPUTE, COMPUTE, (3,), start=5.0, seconds=1.0),
        Node(6, "e", COMPUTE, COMPUTE, (1, 3, 5), start=6.0, seconds=0.25, idles=True),
    ]
    items = planned(nodes).items
    assert [(item.call, item.seconds, item.idle) for item in items] == [
        (COMPUTE, 2.0, 0.5),
        ("all_gather", 1.0, 1.5),
        (COMPUTE, 1.0, 0.0),
        (COMPUTE, 1.0, 0.25),  # 3 was over at 5; the last node idles
    ]
    assert [item.waits for item in items] == [(), (0,), (), (1,)]
    assert [item.awaited for item in items] == [True, True, False, False]


def test_exposed_is_what_runs_while_nothing_computes_and_shared_by_what_runs_together():
    items = [
        Item("c", COMPUTE, COMPUTE, ()),
        Item("g", "all_gather", "gather", (), key=Key((0, 1), "gather")),
        Item("r", "reduce_scatter", "reduce", (), key=Key((0, 1), "reduce")),
    ]
    made = Plan(Trace("t", "", 0, 2, []), items)
    found = report.exposed(made, Round(np.array([1.0, 0.0, 3.0]), np.array([2.0, 5.0, 6.0]), 0.0, 6.0))
    assert found.tolist() == [0.0, 1.0 + 1.0 + 1.0, 1.0 + 1.0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fewer_ranks_keep_the_bytes_of_a_slice(ranks):
    groups = {"tp": (0, 1), "dp": (0, 2, 4, 6)}
    nodes = [
        gather(nbytes=8 * 64),
        replace(gather(nbytes=4 * 64, group="dp"), id=2),
        replace(gather(nbytes=2 * 64, group="tp"), id=3),
        Node(4, "s", "all_reduce", "gather", nbytes=4096, dtype="float32"),
        Node(5, "to 1", "send", "send", nbytes=64, peer=1),
        Node(6, "to 5", "send", "send", nbytes=64, peer=5),
    ]
    made = planned(nodes, world=8, ranks=ranks, groups=groups)
    sizes = [(item.key.members, item.nbytes) for _, item in made.communication]
    everyone = tuple(range(ranks))
    assert sizes == [
        (everyone, ranks * 64),
        (everyone, ranks * 64),
        ((0, 1), 128),
        (everyone, 4096),
        ((0, 1), 64),
    ]
    assert made.counted["messages with ranks that do not run here dropped"] == 1
    assert made.counted[f"collectives of 8 ranks run on {ranks}"] == 2


def test_a_rank_takes_the_file_of_the_one_that_stands_for_it(tmp_path, capsys):
    groups = {"tp": (0, 1), "dp": (0, 2), "all": (0, 1, 2, 3)}
    nodes = [replace(gather(nbytes=256, group=name), id=number) for number, name in enumerate(groups)]
    nodes += [Node(7, "to 1", "send", "s", nbytes=64, peer=1)]
    made = planned(nodes[:3], rank=3, ranks=4, world=4, groups=groups, alike=range(4))
    assert [item.key.members for _, item in made.communication] == [(2, 3), (1, 3), (0, 1, 2, 3)]
    folder = written(tmp_path, 1, 4, groups, lambda rank: nodes[:3], alike=range(4))
    assert main([str(folder), "-t", "4", *QUICK, "--modes", "alone", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["lines"]
    assert {(row["ranks"], row["count"]) for row in rows} == {(2, 2), (4, 1)}


def test_ranks_that_would_wait_for_each_other_are_refused_before_they_do():
    def items(*calls):
        return [(stream, (), ((0, 1), stream, call), what, ()) for stream, call, what in calls]

    a, b = ("x", "all_gather", "gather of 4"), ("x", "all_gather", "gather of 8")
    prove([items(a, b), items(a, b)])
    with pytest.raises(ValueError, match="ranks 0 and 1 differ at call 1 of the group"):
        prove([items(a, b), items(a, a)])
    with pytest.raises(ValueError, match="would wait for each other: rank 0 at gather of 8"):
        prove([items(a, b), items(a)])
    two = ("y", "all_gather", "gather of 4")
    crossed = [("x", (1,), *items(a)[0][2:]), *items(two)]
    prove([crossed, items(a, two)])
    with pytest.raises(ValueError, match="would wait for each other"):
        prove([crossed, [items(a)[0], ("y", (0,), *items(two)[0][2:])]])
    sends = [("s", (), ((0, 1), "", "send"), "message", ()), ("s", (), ((1, 0), "", "recv"), "message", ())]
    back = [("s", (), ((1, 0), "", "send"), "message", ()), ("s", (), ((0, 1), "", "recv"), "message", ())]
    prove([sends, back])
    with pytest.raises(ValueError, match="would wait for each other"):
        prove([sends[::-1], back[::-1]])
    parts = [
        [("x", (), ((0, 1), "x", "all_to_all"), "parts", row)] for row in (((1, 2), (1, 3)), ((4, 1), (2, 1)))
    ]
    with pytest.raises(ValueError, match="rank 1 sends 4 elements to rank 0"):
        prove(parts)


WRONG = {
    "depends on 9, which is not there": lambda rank: [gather(deps=(9,))],
    "cycle of dependencies": lambda rank: [gather(deps=(2,)), replace(gather(deps=(1,)), id=2)],
    "depends on itself": lambda rank: [gather(deps=(1,))],
    "two nodes have the id 1": lambda rank: [gather(), gather()],
    "comm_size must be an integer": lambda rank: [replace(gather(), call="all_reduce", nbytes=-4)],
    "comm_size must be": lambda rank: [gather(nbytes=1 << 60)],
    "GB are free here": lambda rank: [gather(nbytes=1 << 49)],
    "unknown type 'float128'": lambda rank: [replace(gather(), dtype="float128")],
    "not divide over the 2 ranks": lambda rank: [replace(gather(nbytes=7), call="reduce_scatter", dtype="")],
    "is no whole number of float32": lambda rank: [gather(nbytes=4)],
    "the root 7, which is not in": lambda rank: [replace(gather(root=7), call="broadcast")],
    "a message to its own rank": lambda rank: [Node(1, "s", "send", "s", nbytes=4, peer=rank)],
    "names rank 9 of 2": lambda rank: [Node(1, "s", "send", "s", nbytes=4, peer=9)],
    "duration_ns must be": lambda rank: [gather(seconds=-1.0)],
    "differ at call 0": lambda rank: [gather(nbytes=64 * (rank + 1))],
    "would wait for each other": lambda rank: [gather()] * (rank == 0),
    "streams; the limit is": lambda rank: [replace(gather(), id=i, stream=f"s{i}") for i in range(99)],
}


@pytest.mark.parametrize("message", WRONG)
def test_a_forged_trace_is_refused_in_one_line(message, tmp_path, capsys):
    folder = written(tmp_path, 2, of=WRONG[message])
    assert_refused(main, [str(folder), "-t", "2"], message, capsys)


def test_folders_groups_and_options_that_make_no_sense_are_refused(tmp_path, capsys, monkeypatch):
    def refused(message, *words):
        assert_refused(main, [str(tmp_path), "-t", "2", *words], message, capsys)

    assert_refused(main, [str(tmp_path / "none")], "no such folder", capsys)
    assert_refused(collectives, ["all_gather", "--replay", str(tmp_path)], "no more than its folder", capsys)
    refused("has no traces")
    written(tmp_path / "idle", 2, of=lambda rank: [Node(1, "c", COMPUTE, COMPUTE, seconds=1.0)])
    assert_refused(main, [str(tmp_path / "idle"), "-t", "2"], "has no communication between the 2", capsys)
    written(tmp_path, 2, groups={"g": (0, 1)}, of=lambda rank: [gather(group="g")])
    path, groups = tmp_path / "job.0.et", tmp_path / "job.groups.json"
    data = path.read_bytes()
    for flags, message in (
        (("--modes", "fast"), "unknown 'fast'"),
        (("-n", "0"), "-n: must be at least 1"),
        (("-k", "nccl"), "'nccl' is for arrays of a GPU"),
        (("-k", "mpi"), "'mpi' does not fit ranks that are threads"),
    ):
        refused(message, *flags)
    for text, message in (
        ("[" * 5000, "nested more than"),
        ('{"g": [0, 7]}', "has rank 7, but the trace has the ranks 0 to 1"),
        ('{"g": [0, 0]}', "a rank twice"),
        ('{"g": [1]}', "of a group without rank 0"),
        ('{"h": [0, 1]}', "of the group 'g', which"),
        ("[]", "must be an object"),
    ):
        groups.write_text(text)
        refused(message)
    groups.write_text('{"g": [0, 1]}')
    for bad, message in (
        (data[:-1], "cut off"),
        (b"\xff\xff\xff\xff\x7f", "the limit is"),
        (b"\xff" * 12, "no length"),
        (data + b"\x05hello", "is no Node"),
    ):
        path.write_bytes(bad)
        refused(message)
    path.write_bytes(data)
    written(tmp_path / "four", 4, of=lambda rank: [gather()])
    assert_refused(main, [str(tmp_path / "four"), "-t", "5"], "the trace is of 4 ranks, and 5 run", capsys)
    (tmp_path / "other.0.et").write_bytes(data)
    refused("has traces of 2 jobs")
    (tmp_path / "other.0.et").unlink()
    for name in ("chakra", "chakra.schema", "chakra.schema.protobuf"):
        monkeypatch.setitem(sys.modules, name, None)
    refused("Chakra traces need mlc-chakra")


def test_no_cut_and_no_flip_of_a_trace_raises_anything_else(tmp_path):
    written(
        tmp_path,
        2,
        groups={"g": (0, 1)},
        of=lambda rank: nodes_of(rank, 2)[:6] + [replace(gather(group="g"), id=99)],
    )
    path = tmp_path / "job.0.et"
    data, numbers = path.read_bytes(), random.Random(1)
    refused = 0
    for place in range(200):
        changed = bytearray(data)
        for _ in range(numbers.randrange(1, 4)):
            changed[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        cut = data[: numbers.randrange(len(data))]
        path.write_bytes(cut if place % 2 else bytes(changed))
        try:
            _own(tmp_path, 0, 2)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            refused += 1
        else:
            assert place % 2 == 0, f"{len(cut)} of {len(data)} bytes"
    assert refused > 120


def basic(rank):
    split = [[64, 192], [192, 64]][rank]
    of = {"in_msg_size": 256, "out_msg_size": 256, "dtype": "Float", "world_size": 2}
    return [
        {"comms": "init", "pg_id": 0, "global_ranks": [0, 1], "world_size": 2},
        {"comms": "all_reduce", "startTime_ns": 5_000_000_000, "pg_id": 0, "req": 1, **of},
        {"comms": "wait", "req": 1},
        {"compute": "gemm", "mm_dim": 64, "dtype": "float", "count": 2},
        {"compute": "emb_lookup", "emb_dim": 4},
        {"comms": "all_gather_base", "startTime_ns": 5_000_400_000, "pg_id": 0, **of, "in_msg_size": 128},
        {"comms": "all_to_allv", "in_split": split, "out_split": split, **of},
        {"comms": "broadcast", "root": 1, **of},
        {"comms": "send" if rank == 0 else "recv", "src_rank": 0, "dst_rank": 1, "use_batch": False, **of},
        {"comms": "barrier"},
    ]


def test_a_basic_trace_of_param_replays(tmp_path, capsys):
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps(basic(rank)))
    trace = param.read(tmp_path / "0.json", 0, 2)
    starts = [node.start for node in trace.nodes if node.start is not None]
    assert starts == pytest.approx([0.0, 4e-4]) and trace.nodes[1].flops == 2 * 2 * 64**3
    assert main([str(tmp_path), "-t", "2", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["call"], row["bytes"], row["count"]) for row in found["lines"]}
    calls = ("all_reduce", "all_gather", "all_to_all", "broadcast", "send", "recv")
    assert rows == {(call, 1024, 1) for call in calls} | {("barrier", 0, 1)}
    assert found["notes"] == "not replayed: 1 x emb_lookup" and found["total"]["trace_ms"] is None


def test_an_execution_trace_of_pytorch_replays(capsys):
    assert main([str(TRACES), "-t", "2", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["call"], row["bytes"]): row["count"] for row in found["lines"]}
    assert rows[("broadcast", 4 * 53120)] == 1 and rows[("all_reduce", 4 * 2049000)] == 1
    assert found["trace"].startswith("PyTorch's execution of 2 ranks") and found["wrong"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than"),
        ("{}", "is neither a list"),
        ('[{"comms": "all_magic"}]', "unknown communication 'all_magic'"),
        (
            '[{"comms": "all_reduce", "in_msg_size": -1, "out_msg_size": 1, "dtype": "float"}]',
            "must be numbers",
        ),
        ('[{"comms": "all_reduce", "in_msg_size": 1, "out_msg_size": 1, "dtype": "int4"}]', "type 'int4'"),
        ('[{"comms": "barrier", "pg_id": 0, "global_ranks": [0, -1]}]', "has rank -1"),
        ('[{"neither": 1}]', "neither comms nor compute"),
        ('{"nodes": [{"name": "record_param_comms", "inputs": []}]}', "without the name of a call"),
        ('{"nodes": [3]}', "must be an object"),
        ('[{"comms": "bar', "Unterminated string"),
    ],
)
def test_a_wrong_trace_of_param_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "0.json").write_text(text)
    assert_refused(main, [str(tmp_path), "-t", "2"], message, capsys)


def test_no_cut_of_an_execution_trace_raises_anything_else(tmp_path):
    data, numbers = (TRACES / "resnet_2gpu_et.json").read_bytes(), random.Random(2)
    for place in range(200):
        changed = bytearray(data)
        changed[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        (tmp_path / "0.json").write_bytes(changed if place % 2 else data[: numbers.randrange(len(data) - 1)])
        if place % 2:
            try:
                _own(tmp_path, 0, 2)
            except ValueError:
                pass
        else:
            with pytest.raises(ValueError):
                _own(tmp_path, 0, 2)


@pytest.mark.parametrize(
    "name", ["allreduce", "alltoall", "allgather", "reducescatter", "broadcast", "barrier"]
)
def test_traces_of_chakras_own_generator_replay(name, tmp_path, capsys, monkeypatch):
    generator = pytest.importorskip("chakra.src.generator.generator")
    monkeypatch.chdir(tmp_path)
    getattr(generator, f"one_comm_coll_node_{name}")(2, *([] if name == "barrier" else [4096]))
    assert main([str(tmp_path), "-t", "2", *QUICK, "--modes", "alone", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["lines"]
    assert row["count"] == 1 and row["trace_us"] is None
    assert row["bytes"] == {"barrier": 0, "allgather": 8192}.get(name, 4096)


def test_what_is_written_is_read_again(tmp_path):
    written(
        tmp_path,
        2,
        groups={"g": (1, 0)},
        of=lambda rank: [*nodes_of(rank, 2), replace(gather(group="g"), id=50)],
    )
    trace = chakra.read(tmp_path / "job.1.et", 1, 2)
    again = [replace(node, given=False, on_host=False) for node in trace.nodes]
    for node, wanted in zip(again, [*nodes_of(1, 2), replace(gather(group="g"), id=50)], strict=True):
        size = wanted.nbytes // 2 if wanted.call in ("all_gather", "gather") else wanted.nbytes
        assert node == replace(wanted, nbytes=size)
    assert shown(plan(in_order(trace), 1, 2))
    assert trace.groups == {"g": (1, 0)} and list(trace.alike) == [1]


def test_a_step_that_was_recorded_here_replays_on_its_ranks(tmp_path):
    shape = ["--layers", "2", "--dim", "32", "--heads", "2", "--seq", "16", "--batch", "1", "--steps", "3"]
    done = mpirun(2, ["-m", "bench.replay.record", str(tmp_path / "job"), *shape])
    assert done.returncode == 0, done.stderr
    taken = float(done.stdout.split(" with ")[1].split()[0])
    done = mpirun(2, ["-m", "bench.collectives", "--replay", str(tmp_path / "job"), *QUICK, "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"]["trace_ms"] == pytest.approx(taken, abs=0.01)
    counts = {}
    for row in found["lines"]:
        counts[row["call"]] = counts.get(row["call"], 0) + row["count"]
    # Two blocks and the root: the root's parameters stay between forward and backward, the last block's, too.
    assert counts["reduce_scatter"] == 3 and 5 <= counts["all_gather"] <= 6
    with pytest.raises(SystemExit):
        collectives(["--replay", str(tmp_path / "none")])
