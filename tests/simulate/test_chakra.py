"""`simulate --chakra`: what traces hold, and that mlc-chakra reads them. chakra_cases.toml has 20 cases."""

import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import traffic
from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import optim
from shardrt.__main__ import main as shell
from shardrt.comm import init_device_mesh
from shardrt.device.program import HOST, Group
from shardrt.fsdp import fully_shard
from shardrt.simulate import chakra
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Machine
from shardrt.simulate.script import record_of
from shardrt.tools.scripts import name_of
from tests.ranks import python
from tests.simulate.written import Written

H100 = Machine.load("h100-8")
COMMUNICATION = ("COMM_COLL_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE")


# --- reading, by mlc-chakra's own code ----------------------------------------------------------------------


@dataclass
class Read:
    """The metadata's attributes, and nodes with theirs in `a`."""

    facts: dict
    nodes: list


def attributes(message):
    return {each.name: getattr(each, each.WhichOneof("value")) for each in message.attr}


def read(folder, name="train"):
    """(traces by rank, ranks of groups)."""
    et_def = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd

    traces = {}
    for path in sorted(folder.glob(f"{name}.*.et")):
        with openFileRd(str(path)) as file:
            metadata, node, nodes = et_def.GlobalMetadata(), et_def.Node(), []
            assert decodeMessage(file, metadata) and metadata.version == "0.0.4"
            while decodeMessage(file, node):
                kind = et_def.NodeType.Name(node.type)
                after = list(node.data_deps), list(node.ctrl_deps)
                types = {each.name: each.WhichOneof("value") for each in node.attr}
                micros = node.start_time_micros, node.duration_micros
                nodes.append(
                    SimpleNamespace(id=node.id, name=node.name, type=kind, data_deps=after[0],
                                    ctrl_deps=after[1], micros=micros, a=attributes(node), types=types)
                )  # fmt: skip
            assert not file.read(1)
        traces[int(path.name.split(".")[1])] = Read(attributes(metadata), nodes)
    groups = json.loads((folder / f"{name}.groups.json").read_text())
    return traces, groups


def export(folder, *words):
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    assert shell(["simulate", "--chakra", str(folder), *words]) == 0
    return read(folder)


def finished(traces, groups):
    """When each node ends, by rank and id, in ns: of dependencies and durations, and of what ranks share.

    No node begins before the step, except where the trace says so.
    """
    ends = {rank: {} for rank in traces}
    places, come, sent = dict.fromkeys(traces, 0), defaultdict(dict), {}
    moved = True
    while moved:
        moved = False
        for rank, trace in traces.items():
            for node in trace.nodes[places[rank] :]:
                least = trace.facts["start_ns"] + min(0, node.a["start_ns"])
                start = max([least, *(ends[rank][d] for d in (*node.data_deps, *node.ctrl_deps))])
                if node.type == "COMM_COLL_NODE":
                    key = node.a["pg_name"], node.a["comm_tag"]
                    come[key][rank] = start
                    if len(come[key]) < len(traces.keys() & set(groups[key[0]])):
                        break
                    start = max(come[key].values())
                elif node.type in COMMUNICATION:
                    key = node.a["comm_src"], node.a["comm_dst"], node.a["comm_tag"]
                    if node.type == "COMM_SEND_NODE":
                        sent[key] = start
                    elif node.a["comm_src"] in traces:
                        if key not in sent:
                            break
                        start = max(start, sent[key])
                ends[rank][node.id] = start + node.a["duration_ns"]
                places[rank] += 1
                moved = True
    assert all(places[rank] == len(trace.nodes) for rank, trace in traces.items())
    return ends


def check(traces, groups):
    """What holds of every export."""
    ends = finished(traces, groups)
    for rank, trace in traces.items():
        start = trace.facts["start_ns"]
        longest = max(ends[rank].values()) - start
        assert longest == pytest.approx(trace.facts["duration_ns"], rel=0.01)
        before = [0]  # of each node, the nodes before it: a bit for each
        for number, node in enumerate(trace.nodes, 1):
            deps = node.data_deps + node.ctrl_deps
            assert (
                node.id == number and all(1 <= dep < number for dep in deps) and len(set(deps)) == len(deps)
            )
            others = 0
            for dep in deps:
                others |= before[dep]
            assert not any(others >> dep & 1 for dep in deps), "a dependency follows from another"
            for dep in deps:
                others |= 1 << dep
            before.append(others)
            begin, duration = node.a["start_ns"], node.a["duration_ns"]
            assert node.micros == (max(0, round(begin / 1e3)), round(duration / 1e3))
            assert ends[rank][number] == pytest.approx(start + begin + duration, abs=1000)
            if node.type in COMMUNICATION:
                assert rank in groups[node.a["pg_name"]] and not node.a["is_cpu_op"]
    orders = defaultdict(list)
    for trace in traces.values():
        order = defaultdict(list)
        for node in trace.nodes:
            if node.type == "COMM_COLL_NODE":
                same = [node.a.get(each) for each in ("comm_type", "comm_tag", "comm_dtype", "root")]
                # Bytes of the host have any length, and in an all-to-all (6) ranks may give other counts.
                free = node.a.get("comm_dtype") == "uint8" or node.a["comm_type"] == 6
                order[node.a["pg_name"]].append([*same, 0 if free else node.a["comm_size"]])
        for group, calls in order.items():
            orders[group].append(calls)
    for several in orders.values():
        assert all(calls == several[0] for calls in several)
    messages = defaultdict(list)
    for rank, trace in traces.items():
        for node in trace.nodes:
            if node.type in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
                ends_of = node.a["comm_src"], node.a["comm_dst"]
                assert ends_of[node.type == "COMM_RECV_NODE"] == rank
                if set(ends_of) <= traces.keys():
                    messages[*ends_of, node.a["comm_tag"]].append((node.type[5:9], node.a["comm_size"]))
    for both in messages.values():
        assert sorted(kind for kind, _ in both) == ["RECV", "SEND"] and len({size for _, size in both}) == 1


SMALL = ["--batch-size", "16", "--model.n-layer", "2"]
FEW = {
    "4 ranks": ["--ranks", "4", "--record", "0,1,2,3", "--", "train", *SMALL],
    "2 ranks of a CPU": ["--ranks", "2", "--record", "0,1", "--machine", "cpu-2", "--", "train", *SMALL],
    "tensor and pipeline": [
        *("--ranks", "8", "--record", "0,1,2,3,4,5,6,7", "--", "train", *SMALL),
        *("--parallel.pp", "2", "--parallel.tp", "2"),
    ],
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of each of FEW, made once."""
    folders = {}

    def of(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("traces")
            export(folders[name], *FEW[name])
        return folders[name]

    return of


@pytest.mark.parametrize("name", FEW)
def test_each_recorded_rank_has_a_trace_in_order_whose_longest_path_is_the_step(name, exported):
    traces, groups = read(exported(name))
    assert list(traces) == list(range(int(FEW[name][1])))
    check(traces, groups)
    for rank, trace in traces.items():
        facts = trace.facts
        assert (facts["schema"], facts["world_size"], facts["rank"]) == ("shardrt", len(traces), rank)
        assert (facts["ranks"], facts["step"]) == (str(rank), 1)
    kinds = {node.type for trace in traces.values() for node in trace.nodes}
    assert ("COMM_SEND_NODE" in kinds and "COMM_RECV_NODE" in kinds) == (name == "tensor and pipeline")


def test_barriers_are_collectives_without_bytes_and_a_cpu_s_kernels_are_its_own(exported):
    traces, _ = read(exported("2 ranks of a CPU"))
    nodes = traces[0].nodes
    barriers = [node for node in nodes if node.a.get("comm_type") == 9]
    assert barriers and all(node.a["comm_size"] == 0 and "comm_dtype" not in node.a for node in barriers)
    assert all(
        node.a["is_cpu_op"] for node in nodes if node.type == "COMP_NODE" and node.a["stream"] == "compute"
    )


def test_a_kernel_has_its_operations_and_a_collective_its_unit_and_type(exported):
    traces, _ = read(exported("4 ranks"))
    matmul = next(node for node in traces[0].nodes if node.name == "linear.forward")
    assert matmul.a["num_ops"] > 0 and matmul.a["tensor_size"] > 0
    gather = next(node for node in traces[0].nodes if node.name == "all_gather blocks.1")
    assert (gather.a["tag"], gather.a["comm_type"], gather.a["comm_dtype"]) == ("blocks.1", 2, "float32")
    assert gather.a["comm_size"] == 4 * gather.a["comm_count"] and gather.a["pg_desc"] == "gather"


FEEDER = {  # ASTRA-sim's et_feeder_node.cpp reads these fields, whatever an attribute has
    **dict.fromkeys(("num_ops", "comm_type", "comm_size"), "int64_val"),
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag"), "int32_val"),
    **{"is_cpu_op": "bool_val", "tensor_size": "uint64_val", "pg_name": "string_val"},
}


def test_attributes_have_the_types_that_the_feeder_reads_and_groups_are_numbers(exported):
    traces, groups = read(exported("tensor and pipeline"))
    nodes = [node for trace in traces.values() for node in trace.nodes]
    assert FEEDER.keys() <= {name for node in nodes for name in node.types}
    for node in nodes:
        assert {name: node.types[name] for name in FEEDER.keys() & node.types} == {
            name: kind for name, kind in FEEDER.items() if name in node.types
        }
    assert all(int(group) > 0 for group in groups)  # "0" is the world there


def test_another_export_of_the_name_leaves_no_trace_of_the_one_before(exported, tmp_path):
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    for name in "train.17.et", "other.17.et", "train.17.et.old":
        (tmp_path / name).write_text("")
    export(tmp_path, "--ranks", "2", "--", "train", *SMALL)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"train.0.et", "train.groups.json", "other.17.et", "train.17.et.old"}
    assert read(tmp_path)[0][0].facts["ranks"] == "0-1"


# --- bytes --------------------------------------------------------------------------------------------------


def test_bytes_on_links_are_those_of_the_report(tmp_path, capsys):
    """In rings, as they are over two nodes."""
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    words = [
        "--ranks",
        "16",
        "--chakra",
        str(tmp_path),
        "--json",
        "--",
        "train",
        *SMALL,
        "--parallel.tp",
        "2",
    ]
    assert shell(["simulate", *words]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    traces, groups = read(tmp_path)
    for call, kind in ("all_gather", 2), ("reduce_scatter", 7):
        nodes = [node for node in traces[0].nodes if node.a.get("comm_type") == kind]
        sizes = ((len(groups[node.a["pg_name"]]), node.a["comm_size"]) for node in nodes)
        sent = sum(nbytes * (n - 1) // (1 if kind == 2 else n) for n, nbytes in sizes)
        reported = sum(link.get(call, 0) for link in links.values())
        assert sent == pytest.approx(reported, abs=len(nodes)) and sent > 0


STRATEGIES = [("FULL_SHARD", (8,)), ("SHARD_GRAD_OP", (8,)), ("HYBRID_SHARD", (2, 4))]


@pytest.mark.parametrize("strategy, shape", STRATEGIES)
def test_bytes_of_units_are_those_of_the_formula(strategy, shape):
    formula = []

    def step():
        names = {"mesh_dim_names": ("replicate", "shard")} if len(shape) > 1 else {}
        mesh = init_device_mesh("auto", shape=shape, **names)
        model = GPT(GPTConfig(2, 2, 32, 32, 64))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, strategy=strategy)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        tokens = np.zeros((2, 32), np.int64)
        for _ in range(2):
            F.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        formula.append(traffic.expected(model))

    timing = price(record_of(step, 8), H100)
    (trace,), groups = chakra.traces_of(timing, H100)
    received = 0
    for node in trace.nodes:
        if node.type == "COMM_COLL_NODE" and node.values.get("tag"):
            n, nbytes = len(groups[node.values["pg_name"]]), node.values["comm_size"]
            times = {"ALL_GATHER": n - 1, "REDUCE_SCATTER": (n - 1) / n, "ALL_REDUCE": 2 * (n - 1) / n}
            received += nbytes * times[node.values["comm_type"]]
    assert received == formula[0] > 0


# --- dependencies of programs written by hand ---------------------------------------------------------------

PLAIN = replace(H100, host_streams=(), host=replace(H100.host, item=0.0, launch=0.0, touch=0.0))


def nodes_of(*written, machine=PLAIN):
    for program in written:
        program.step()
    traces, _ = chakra.traces_of(price(written, machine), machine)
    return traces[0].nodes


class Stepped(Written):
    def step(self):
        from shardrt.device.program import Step

        self.items.append(Step(0))

    def kernel(self, stream):
        self.work(stream, "", nbytes=1 << 30)
        return len([item for item in self.items if hasattr(item, "nbytes")])


def after(node):
    return node.data_deps, node.ctrl_deps


def test_an_event_is_a_data_dependency_unless_another_one_says_so():
    program = Stepped()
    a = program.kernel("gather")
    early = program.record("gather")
    b = program.kernel("gather")
    late = program.record("gather")
    c = program.kernel("compute")
    program.wait("compute", early, "")
    program.wait("compute", late, "")
    d = program.kernel("compute")
    program.wait("compute", late, "")
    e = program.kernel("compute")
    found = [after(node) for node in nodes_of(program)]
    assert found == [((), ()), ((a,), ()), ((), ()), ((c, b), ()), ((d,), ())]
    assert e == 5


def test_an_event_of_a_stream_that_only_waited_is_what_it_waited_for():
    program = Stepped()
    a = program.kernel("gather")
    program.wait("reduce", program.record("gather"), "")
    program.wait("compute", program.record("reduce"), "")
    program.kernel("compute")
    assert [after(node) for node in nodes_of(program)][-1] == ((a,), ())


def test_what_the_host_waited_for_orders_all_that_it_issues_next():
    program = Stepped()
    a = program.kernel("compute")
    program.wait(HOST, program.record("compute"), "")
    b = program.kernel("compute")  # in order anyway
    c = program.kernel("gather")
    program.kernel("gather")
    found = [after(node) for node in nodes_of(program)]
    assert found == [((), ()), ((a,), ()), ((), (a,)), ((c,), ())] and b == 2


def test_where_the_host_is_late_its_time_is_a_node():
    machine = replace(PLAIN, host=replace(PLAIN.host, launch=1.0))
    program = Stepped()
    program.kernel("compute")
    program.kernel("compute")
    first, a, second, b = nodes_of(program, machine=machine)
    assert [node.name for node in (first, second)] == ["host", "host"] and first.values["is_cpu_op"]
    assert (after(a), after(second), after(b)) == (((), (1,)), ((1,), ()), ((2,), (3,)))
    assert (first.start, first.stop, second.stop) == (0.0, 1.0, 2.0)
    assert a.start == first.stop and b.start == second.stop


def exchanging(rank):
    program = Stepped(rank, 2)
    program.kernel("link")
    program.call("link", "send", "", nbytes=64, number=3, peer=1 - rank)
    program.items[-1] = replace(program.items[-1], grouped=True)
    program.call("link", "recv", "", nbytes=64, number=3, peer=1 - rank)
    program.kernel("link")
    return program


def test_both_messages_of_an_exchange_run_at_the_same_time():
    _, send, recv, last = nodes_of(exchanging(0), exchanging(1))
    assert (after(send), after(recv)) == (((1,), ()), ((1,), ()))
    assert set(last.data_deps) == {2, 3}
    assert (send.values["comm_src"], send.values["comm_dst"], send.values["grouped"]) == (0, 1, True)
    assert (recv.values["comm_src"], recv.values["comm_dst"]) == (1, 0)


def test_a_message_has_no_part_of_the_time_in_which_its_sender_comes():
    sender, receiver = Stepped(0, 2), Stepped(1, 2)
    sender.kernel("link")
    for program, call in (sender, "send"), (receiver, "recv"):
        program.call("link", call, "", nbytes=64, number=0, peer=1 - program.rank)
        program.step()
    timing = price([sender, receiver], PLAIN)
    (sending, receiving), _ = chakra.traces_of(timing, PLAIN)
    kernel, send = sending.nodes
    (recv,) = receiving.nodes
    assert kernel.stop > 0 and (recv.start, recv.stop) == (send.start, send.stop)


def test_messages_of_two_groups_of_the_same_ranks_have_different_tags():
    program = Stepped(0, 2)
    program.groups["other"] = Group(range(2))
    for group in "all", "other":
        for number in range(2):
            program.call("link", "send", "", group=group, nbytes=64, number=number, peer=1)
    tags = [node.values["comm_tag"] for node in nodes_of(program)]
    assert len(set(tags)) == 4


def test_a_broadcast_names_its_root():
    program = Stepped(5, 8)
    program.groups["some"] = Group((1, 5, 6))
    program.call("compute", "broadcast", "", group="some", nbytes=64)
    program.items[-1] = replace(program.items[-1], root=2, dtype="float32")
    (node,) = nodes_of(program)
    assert (node.values["root"], node.values["comm_type"], node.values["comm_count"]) == (6, "BROADCAST", 16)


def test_a_program_without_a_step_has_no_trace():
    program = Written()
    program.work("compute", "", nbytes=1)
    with pytest.raises(ValueError, match="rank 0 has ended no step"):
        chakra.traces_of(price([program], PLAIN), PLAIN)


# --- the command --------------------------------------------------------------------------------------------


def refused(capsys, folder, message):
    assert shell(["simulate", "--chakra", str(folder), "--", "train", *SMALL]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and message in err


def test_without_mlc_chakra_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "chakra.schema.protobuf", None)
    refused(capsys, tmp_path / "traces", "pip install 'shardrt[chakra]'")
    assert not (tmp_path / "traces").exists()


def test_a_folder_that_is_a_file_or_can_t_be_made_is_refused(tmp_path, capsys):
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    (tmp_path / "file").write_text("")
    refused(capsys, tmp_path / "file", f"--chakra: can't write to {tmp_path / 'file'}: File exists")
    refused(capsys, tmp_path / "file" / "in", "Not a directory")
    refused(capsys, "/proc/none", "--chakra: can't write to /proc/none")


def test_without_the_option_mlc_chakra_is_not_imported(tmp_path):
    code = (
        "import sys, shardrt; from shardrt.__main__ import main; main(sys.argv[1:]);"
        "assert not [name for name in sys.modules if name.startswith(('chakra', 'google'))]"
    )
    done = python("-c", code, "simulate", "--", "train", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command, name",
    [
        (["--", "train", "--steps", "1"], "train"),
        (["a b/train_text.py", "x.py"], "train_text"),
        (["--", "-m", "shardrt.models.train"], "train"),
        (["odd name!.py"], "odd_name_"),
    ],
)
def test_traces_have_the_short_name_of_the_script(command, name):
    assert name_of(command) == name


def test_ranks_are_written_as_runs():
    assert [chakra._runs(each) for each in (range(16), [3], [0, 2, 4], [*range(8), *range(64, 72)])] == [
        "0-15",
        "3",
        "0,2,4",
        "0-7,64-71",
    ]


def test_the_jsonizer_of_mlc_chakra_takes_a_trace(exported, tmp_path, monkeypatch):
    jsonizer = pytest.importorskip("chakra.src.jsonizer.jsonizer")
    path = exported("tensor and pipeline") / "train.5.et"
    words = ["--input_filename", str(path), "--output_filename", str(tmp_path / "json")]
    monkeypatch.setattr(sys, "argv", ["jsonizer", *words])
    jsonizer.main()
    text = (tmp_path / "json").read_text()
    assert text.count('"COMM_RECV_NODE"') == text.count('"name": "comm_src"') / 2


def test_the_visualizer_of_mlc_chakra_takes_a_trace(exported, tmp_path, monkeypatch):
    pytest.importorskip("graphviz")
    visualizer = pytest.importorskip("chakra.src.visualizer.visualizer")
    path = exported("4 ranks") / "train.0.et"
    words = ["--input_filename", str(path), "--output_filename", str(tmp_path / "graph.graphml")]
    monkeypatch.setattr(sys, "argv", ["visualizer", *words])
    visualizer.main()
    edges = sum(len(node.data_deps) + len(node.ctrl_deps) for node in read(path.parent)[0][0].nodes)
    assert (tmp_path / "graph.graphml").read_text().count("<edge ") == edges


# --- the 20 cases -------------------------------------------------------------------------------------------

TABLE = tomllib.loads((Path(__file__).parent / "chakra_cases.toml").read_text())
CASES = [(model, ranks, own) for model, cases in TABLE["cases"].items() for ranks, own in cases.items()]


def test_there_are_20_cases_of_8_to_16384_ranks():
    assert len(CASES) == 20
    assert {min(int(ranks) for _, ranks, _ in CASES), max(int(ranks) for _, ranks, _ in CASES)} == {8, 16384}
    options = " ".join(own for *_, own in CASES)
    assert all(axis in options for axis in ("HYBRID_SHARD", "tp", "pp", "cp", "ep"))


@pytest.mark.slow
@pytest.mark.parametrize("model, ranks, own", CASES)
def test_a_large_step_is_exported_and_read(model, ranks, own, tmp_path):
    """`shardrt simulate` as a process: its memory is given back."""
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    words = [*TABLE["models"][model].split(), *own.split()]
    command = [sys.executable, "-m", "shardrt", "simulate", "--ranks", ranks, "--chakra", tmp_path]
    done = subprocess.run([*command, "--", "train", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    traces, groups = read(tmp_path)
    stages = int(words[words.index("--parallel.pp") + 1]) if "--parallel.pp" in words else 1
    assert len(traces) == stages and {trace.facts["world_size"] for trace in traces.values()} == {int(ranks)}
    check(traces, groups)
