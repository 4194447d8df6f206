"""The benchmark of offload: all rows are checked, a wrong copy has no figure, nonsense is refused."""

import json

import pytest

from bench.offload import copies, disk
from bench.offload.__main__ import main
from shardrt import device
from shardrt.device import host
from shardrt.device.cpu import CPUDevice
from tests.bench.nonsense import assert_refused

TINY = ["--device", "cpu", "--megabytes", "1", "--blocks", "64K,1M", "--parameters", "4K", "--rounds", "1"]


def test_every_row_has_a_figure_a_ceiling_and_a_check(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert main([*TINY, "--directory", str(tmp_path), "--json", "-o", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(file.read_text())
    rows = result["rows"]
    measured = [row for row in rows if row["theirs"] is not None]
    assert len([row for row in measured if row["section"] == "copies"]) == 3 * 2
    assert len([row for row in measured if row["section"] == "disk"]) == 2 * 2
    updates = [row for row in measured if row["section"] == "optimizer"]
    assert len(updates) == 5 and all(row["check"].startswith("same bits, ") for row in updates)
    assert all(row["figure"] > 0 and row["ratio"] > 0 for row in measured)
    assert all(row["check"] == "equal" for row in measured if row["section"] != "optimizer")
    assert [row["check"] for row in rows if row["figure"] is None] == ["no GPU here"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]  # files of the run are gone


def test_a_copy_that_is_wrong_has_no_figure(monkeypatch):
    right = CPUDevice.copy

    def copy(self, target, source):
        right(self, target, source)
        if target.size == 1 << 16:
            target[7] += 1

    monkeypatch.setattr(CPUDevice, "copy", copy)
    rows, _ = copies.rows(device.get("cpu"), 1 << 18, [1 << 16, 1 << 17], 1)
    found = {row.name: row for row in rows if "blocks" in row.name}
    for name, row in found.items():
        assert (row.figure is None and row.check == "DIFFER") == ("64K" in name), name


def test_a_spill_that_loses_a_page_has_no_figure(monkeypatch, tmp_path):
    right = host.write_out

    def write_out(array):
        right(array)
        if array.size == 1 << 16:
            array[5] = 0  # the page that was written is not what stays

    monkeypatch.setattr(host, "write_out", write_out)
    rows, rate = disk.rows(tmp_path, 1 << 18, [1 << 16, 1 << 17], 1)
    assert rate > 0
    for row in rows:
        assert (row.figure is None and row.check == "DIFFER") == ("64K" in row.name), row.name


NONSENSE = {
    "section": (["tapes"], "section: unknown 'tapes'; known: copies, optimizer, disk"),
    "no division": (["--blocks", "3M"], "--blocks: 256M is no multiple of 3M"),
    "no size": (["--blocks", "many"], "--blocks: must be a size such as 4096, 4K, 16M or 1G, got 'many'"),
    "nothing": (["--megabytes", "0"], "--megabytes: must be at least 1, got 0"),
    "no directory": (["--directory", "/nowhere"], "--directory: /nowhere is no directory"),
    "device": (["--device", "tpu"], "--device: unknown 'tpu'"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(main, words, message, capsys)
