"""The benchmark of offload: all lines are checked, a wrong copy has no figure, nonsense is refused."""

import csv
import json

import pytest

from bench.offload import copies, disk
from bench.offload.__main__ import main
from shardrt import device
from shardrt.device import host
from shardrt.device.cpu import CPUDevice
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun

TINY = ["--device", "cpu", "--megabytes", "1", "--blocks", "64K,1M", "--parameters", "4K", "--rounds", "1"]


def test_every_line_has_a_figure_a_ceiling_and_a_check(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert main([*TINY, "--directory", str(tmp_path), "--json", "-o", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(file.read_text())
    assert result["wrong"] == 0
    lines = result["lines"]
    measured = [line for line in lines if line["percent"] is not None]
    assert len([line for line in measured if line["section"] == "copies"]) == 3 * 2
    assert len([line for line in measured if line["section"] == "disk"]) == 2 * 2
    updates = [line for line in measured if line["section"] == "optimizer"]
    assert len(updates) == 5 and all(line["check"].startswith("same bits, ") for line in updates)
    for line in measured:
        assert line["percent"] == pytest.approx(100 * line["GB_s"] / line["ceiling_GB_s"])
        assert line["slowest_rank_GB_s"] == line["GB_s"] > 0
    assert all(line["check"] == "equal" for line in measured if line["section"] != "optimizer")
    assert [line["check"] for line in lines if line["GB_s"] is None] == ["no GPU here"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]  # files of the run are gone


@pytest.mark.mpi
def test_ranks_copy_and_write_at_once_and_their_sum_counts(tmp_path):
    done = mpirun(2, ["-m", "bench.offload", *TINY, "--directory", str(tmp_path), "--csv"])
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(done.stdout.splitlines()))
    assert {line["section"] for line in lines} == {"copies", "disk"}
    figures = [line for line in lines if line["GB_s"]]
    assert len(figures) == 3 * 3 + 2 * 3
    for line in figures:
        assert 0 < float(line["slowest_rank_GB_s"]) <= float(line["GB_s"]) / 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_the_optimizer_of_several_ranks_is_refused_in_one_line():
    done = mpirun(2, ["-m", "bench.offload", "disk", "optimizer"])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0] == (
        "error: section: 'optimizer' measures one process; start it without mpirun"
    )


def test_a_copy_that_is_wrong_has_no_figure(monkeypatch, capsys):
    right = CPUDevice.copy

    def copy(self, target, source):
        right(self, target, source)
        if target.size == 1 << 16:
            target[7] += 1

    monkeypatch.setattr(CPUDevice, "copy", copy)
    lines, _ = copies.rows(device.get("cpu"), 1 << 18, [1 << 16, 1 << 17], 1)
    found = {line["name"]: line for line in lines if "blocks" in line["name"]}
    assert len(found) == 6
    for name, line in found.items():
        assert (line["GB_s"] is None and line["check"] == "DIFFER" and line["wrong"] == 1) == ("64K" in name)
    assert main(["copies", *TINY]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "# wrong: 3"


def test_a_spill_that_loses_a_page_has_no_figure(monkeypatch, tmp_path):
    right = host.write_out

    def write_out(array):
        right(array)
        if array.size == 1 << 16:
            array[5] = 0  # the page that was written is not what stays

    monkeypatch.setattr(host, "write_out", write_out)
    lines, rate = disk.rows(tmp_path, 1 << 18, [1 << 16, 1 << 17], 1)
    assert rate > 0
    for line in lines:
        assert (line["GB_s"] is None and line["check"] == "DIFFER") == ("64K" in line["name"]), line


NONSENSE = {
    "section": (["tapes"], "section: unknown 'tapes'; known: copies, optimizer, disk"),
    "no division": (["--blocks", "3M"], "--blocks: 256M is no multiple of 3M"),
    "no size": (["--blocks", "many"], "--blocks: must be a size such as 4096, 4K, 16M or 1G, got 'many'"),
    "nothing": (["--megabytes", "0"], "--megabytes: must be at least 1, got 0"),
    "no directory": (["--directory", "/nowhere"], "--directory: /nowhere is no directory"),
    "no room": (
        ["disk", "--megabytes", str(1 << 40), "--blocks", "1M"],
        f"bytes free, and this run needs {1 << 60}",
    ),
    "another command": (["copies", "storage"], "section: 'storage' has options of its own"),
    "device": (["--device", "tpu"], "--device: unknown 'tpu'"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(main, words, message, capsys)
