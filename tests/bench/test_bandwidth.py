"""bench.offload bandwidth: matrices as nvbandwidth prints them, of the host and of two emulated GPUs."""

import json
import os

import numpy as np
import pytest

from bench.offload import bandwidth, numa
from bench.offload.__main__ import main
from shardrt.device.cpu import CPUDevice
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun
from tests.softgpu.available import missing
from tests.softgpu.fixtures import software, without_cudnn

__all__ = ["software", "without_cudnn"]

SMALL = ["-b", "1", "-i", "3", "--loopCount", "2"]
emulated = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def two_gpus(software, monkeypatch):
    """The emulator with two GPUs."""
    monkeypatch.setattr(software, "visible", (0, 1))
    return software


@pytest.fixture
def two_nodes(monkeypatch):
    """A machine of two NUMA nodes, with the cores that it has."""
    cores = sorted(os.sched_getaffinity(0))
    found = {0: set(cores[:1]), 1: set(cores[-1:])}
    monkeypatch.setattr(numa, "nodes", lambda: found)
    return found


def run(capsys, *words, code=0):
    assert main(["bandwidth", *words, *SMALL, "--json"]) == code
    return json.loads(capsys.readouterr().out)["lines"]


def test_the_host_has_a_matrix_of_its_nodes(two_nodes, capsys):
    lines = run(capsys, "-t", "host_to_host_memcpy")
    assert [(line["row"], line["column"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for line in lines:
        assert line["wrong"] == 0 and len(line["samples_GB_s"]) == 3
        assert line["GB_s"] == sorted(line["samples_GB_s"])[1] > 0
    lines = run(capsys, "-t", "host_to_host_memcpy", "-m")
    for line in lines:
        assert line["GB_s"] == pytest.approx(np.mean(line["samples_GB_s"]))
    assert len(run(capsys, "-d")) == 1


def test_copies_start_on_cores_of_the_row(two_nodes, monkeypatch, capsys):
    seen, right = set(), bandwidth._sample

    def sample(copies, loops, total):
        seen.add(frozenset(os.sched_getaffinity(0)))
        return right(copies, loops, total)

    before = os.sched_getaffinity(0)
    monkeypatch.setattr(bandwidth, "_sample", sample)
    run(capsys, "-t", "host_to_host_memcpy")
    assert seen == {frozenset(cores) for cores in two_nodes.values()}
    assert os.sched_getaffinity(0) == before


def test_a_matrix_is_printed_as_nvbandwidth_does(two_nodes, capsys):
    assert main(["bandwidth", "-v", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("Running host_to_host_memcpy.")
    assert lines[start + 1].startswith("\tSample 0: 0, 0: ") and lines[start + 1].endswith(" GB/s")
    start += 4 * 3
    assert lines[start + 1] == "memcpy CPU(row) -> CPU(column) bandwidth (GB/s)"
    assert lines[start + 2].split() == ["0", "1"]
    rows = [line.split() for line in lines[start + 3 : start + 5]]
    assert [row[0] for row in rows] == ["0", "1"] and all(len(row) == 3 for row in rows)
    assert len({len(line) for line in lines[start + 2 : start + 5]}) == 1
    words, total = lines[start + 6].rsplit(" ", 1)
    assert words == "SUM host_to_host_memcpy"
    figures = [float(figure) for row in rows for figure in row[1:]]
    assert float(total) == pytest.approx(sum(figures), abs=0.03)


def test_a_copy_that_is_wrong_has_no_figure(monkeypatch, capsys):
    right = CPUDevice.copy

    def copy(self, target, source):
        right(self, target, source)
        if target.size == 1 << 20:
            target[-1] = 255  # which no source holds

    monkeypatch.setattr(CPUDevice, "copy", copy)
    assert main(["bandwidth", "-d", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "SUM host_to_host_memcpy 0.00" in out and "# wrong: 1" in out


@emulated
def test_two_gpus_have_a_matrix_for_each_test(two_gpus, two_nodes, capsys):
    lines = run(capsys)
    for name, test in bandwidth.TESTS.items():
        cells = {(line["row"], line["column"]): line for line in lines if line["test"] == name}
        rows = 1 if name == "device_local_copy" else 2
        assert set(cells) == {(row, column) for row in range(rows) for column in range(2)}, name
        for (row, column), line in cells.items():
            itself = test.rows == "GPU" and row == column
            assert (line["GB_s"] is None) == itself and line["wrong"] == 0, name
            assert itself or line["GB_s"] > 0, name


@emulated
@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_the_gpu_of_the_row_starts_copies_between_gpus(reads, two_gpus):
    test = bandwidth.TESTS[f"device_to_device_memcpy_{'read' if reads else 'write'}_ce"]
    (copy,) = test.make(1, 0, 1 << 20, {0: None})
    assert copy.device.index == 1
    source, target = (copy.owner.index, copy.reader.index)
    assert (source, target) == ((0, 1) if reads else (1, 0))
    assert (copy.source.device.id, copy.target.device.id) == (source, target)


@emulated
@pytest.mark.parametrize("name", ["host_to_device_memcpy_ce", "device_to_device_memcpy_read_ce"])
def test_a_copy_that_a_gpu_does_not_make_has_no_figure(name, two_gpus, monkeypatch, capsys):
    monkeypatch.setattr(bandwidth.Copy, "_start", lambda copy: None)
    lines = run(capsys, "-t", name, code=1)
    copied = [line for line in lines if not (name.startswith("device") and line["row"] == line["column"])]
    assert len(copied) == 2
    for line in copied:
        assert line["GB_s"] is None and line["wrong"] == 1 << 20


def test_cores_of_nodes_as_linux_lists_them(tmp_path):
    cores = os.sched_getaffinity(0)
    first = min(cores)
    for node, text in (
        ("node1", f"{max(cores) + 1}-{max(cores) + 3}\n"),
        ("node0", f"{first}\n"),
        ("node2", "\n"),
    ):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    assert numa.nodes(tmp_path) == {0: {first}}  # of the others this process may use no core
    assert numa.nodes(tmp_path / "node0") == {0: cores}
    assert numa._listed("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}


@emulated
def test_the_node_of_a_gpu_is_what_linux_says(two_gpus, tmp_path):
    from bench.gpu.affinity import numa_node

    (tmp_path / "0000:11:00.0").mkdir()
    (tmp_path / "0000:11:00.0" / "numa_node").write_text("1\n")
    assert numa_node(1, tmp_path) == 1 and numa_node(0, tmp_path) is None
    (tmp_path / "0000:11:00.0" / "numa_node").write_text("-1\n")
    assert numa_node(1, tmp_path) is None


def test_tests_are_listed_and_chosen_by_number_and_prefix(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bandwidth", "-l"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[1] == "1, host_to_device_memcpy_ce: memcpy CE CPU(row) -> GPU(column)"
    assert {line["test"] for line in run(capsys, "-t", "0")} == {"host_to_host_memcpy"}
    assert {line["test"] for line in run(capsys, "-p", "host_to_host")} == {"host_to_host_memcpy"}


NONSENSE = {
    "no GPU": (
        ["-t", "host_to_device_memcpy_ce"],
        "-t: 'host_to_device_memcpy_ce' needs a GPU, and there is none",
    ),
    "kernels": (
        ["-t", "host_to_device_memcpy_sm"],
        "-t: 'host_to_device_memcpy_sm' is not here: copies by ke",
    ),
    "unknown": (["-t", "all_to_one"], "-t: unknown 'all_to_one'; known: host_to_host_memcpy, "),
    "prefix": (["-p", "multinode"], "-p: no test begins with 'multinode'; -l lists them"),
    "no check": (["-s"], "-s: not taken here: every copy is verified"),
    "no buffer": (["-b", "0"], "-b: must be at least 1, got 0"),
    "no sample": (["-i", "0"], "-i: must be at least 1, got 0"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(main, ["bandwidth", *words], message, capsys)


@emulated
def test_a_test_of_two_gpus_needs_two(software, monkeypatch, capsys):
    monkeypatch.setattr(software, "visible", (0,))
    words = ["bandwidth", "-t", "device_to_device_memcpy_read_ce"]
    assert_refused(main, words, "needs 2 GPUs, and 1 is here", capsys)


@pytest.mark.mpi
def test_it_is_one_process():
    done = mpirun(2, ["-m", "bench.offload", "bandwidth"])
    assert done.returncode == 2 and done.stdout == ""
    assert "error: bandwidth: one process copies between all pairs" in done.stderr
