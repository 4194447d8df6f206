"""The benchmark of kernels: every op is right, nothing wrong has a figure, nonsense is refused."""

import csv
import json

import numpy as np
import pytest

from bench.kernels import measure, options, report
from bench.kernels.__main__ import main
from bench.kernels.case import Case, Ceilings, Maker, Sizes
from shardrt.kernels import cpu
from tests.bench.nonsense import assert_refused

TINY = {"tokens": 8, "width": 16, "heads": 2, "time": 4, "vocab": 40, "multiplied": 8, "classified": 4}
TINY |= {"elements": 64, "side": 7}
WORDS = [word for name, size in TINY.items() for word in (f"--{name}", str(size))]
ONCE = [*WORDS, "--rounds", "1"]


@pytest.fixture(autouse=True)
def ordinary_memory(monkeypatch):
    """What is freed goes back: the tests after these count memory."""
    monkeypatch.setattr("bench.kernels.__main__.keep_freed_memory", lambda: None)


@pytest.mark.torch
def test_every_pass_of_every_op_is_right_and_so_are_its_peers():
    attentions = {"plain": (2, 2, 2, 5, 8, False), "grouped": (1, 4, 2, 6, 8, True)}
    convolutions = {"grouped": (2, 4, 6, 3, 2, 1, 2, 7), "depthwise": (1, 4, 4, 3, 1, 1, 4, 5)}
    more = {"planes": (2, 3), "attentions": attentions, "convolutions": convolutions}
    judge = measure.Judge("float32", 1, pytest.importorskip("torch"))
    ceilings = Ceilings(1e9, 1e10)
    lines = []
    for op, function in options.OPS.items():
        found = [judge.line(case, ceilings) for case in function(Maker(Sizes(**TINY, **more), "float32"))]
        assert found and {line["op"] for line in found} == {op}
        lines += found
    assert not [line for line in lines if line["wrong"]]
    assert all(line["bytes"] > 0 and line["ours_ms"] > 0 and line["torch_ms"] > 0 for line in lines)
    assert len({(line["op"], line["which"], line["shape"]) for line in lines}) == len(lines) > 60


@pytest.mark.torch
def test_a_kernel_that_is_wrong_has_no_figure(capsys, monkeypatch):
    forward = cpu.rotary.forward

    def wrong(x, cos, sin, y, heads):
        forward(x, cos, sin, y, heads)
        y[-1, -1] += 0.01

    monkeypatch.setattr(cpu.rotary, "forward", wrong)
    assert main([*ONCE, "--op", "rotary,add", "--csv"]) == 1
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["op"], row["wrong"]) for row in rows] == [("rotary", "ours"), ("rotary", ""), ("add", "")]
    figures = [name for name in rows[0] if name.startswith("ours_") or "ratio" in name or "of_roof" in name]
    assert len(figures) == 8 and not any(rows[0][name] for name in figures) and rows[0]["torch_ms"]
    assert float(rows[1]["ours_ms"]) > 0 and float(rows[1]["of_roofline"]) > 0
    assert main([*ONCE, "--op", "rotary"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: ours" in printed and "wrong: rotary forward" in printed.splitlines()[-1]


@pytest.mark.torch
def test_float64_is_held_to_more_digits_but_where_a_pass_is_float32(capsys):
    assert main([*ONCE, "--op", "layer_norm,sgd", "--dtype", "float64", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [line["dtype"] for line in lines] == ["float64", "float64", "float32"]
    assert max(lines[0]["error"], lines[1]["error"]) < 1e-13 < 1e-9 < lines[2]["error"]


def test_results_that_are_not_numbers_or_of_another_shape_are_wrong():
    right = [np.ones(3), np.zeros(2)]
    assert measure.apart(right, right) == 0
    assert measure.apart([np.ones(3), np.full(2, 1e-3)], right) == pytest.approx(1e-3)
    assert not measure.apart([np.array([1, np.nan, 1]), np.zeros(2)], right) <= 1
    assert measure.apart([np.ones((3, 1)), np.zeros(2)], right) == np.inf


def test_figures_follow_from_the_rounds():
    case = Case("op", "forward", "8", 4e9, 1e9, lambda: None, (), (), lambda torch: tuple)
    ceilings = Ceilings(2e9, 1e10)
    assert (ceilings.seconds(case), ceilings.bound(case)) == (2.0, "bytes")
    seconds = {"ours": [4.0, 5.0, 8.0], "torch": [8.0, 10.0, 40.0]}
    found = report.record(case, "float32", ceilings, 1e-5, {"ours": 0.0, "torch": 0.0}, seconds)
    assert (found["ours_ms"], found["ours_fastest_ms"], found["of_roofline"]) == (5000, 4000, 0.4)
    assert (found["torch_ratio"], found["torch_ratio_low"], found["torch_ratio_high"]) == (2, 2, 3.5)
    assert found["wrong"] == ""


@pytest.mark.torch
def test_the_json_has_what_the_table_has(capsys, tmp_path):
    file = tmp_path / "kernels.json"
    assert main([*ONCE, "--op", "gelu", "-o", str(file)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [line["which"] for line in result["lines"]] == ["forward", "backward"]
    assert all(line["torch_ms"] > 0 and line["torch_ratio"] > 0 for line in result["lines"])
    assert result["torch"] and "GFLOP/s" in result["product"] and "load average" in result
    assert result["verdict"] in printed and "8 x 64" in printed


NONSENSE = {
    "op": (["--op", "gelu,fft"], "--op: unknown 'fft'; known: matmul"),
    "dtype": (["--dtype", "int8"], "--dtype: unknown 'int8'"),
    "16 bits": (["--dtype", "bfloat16"], "--dtype: the CPU computes bfloat16 in float32"),
    "device": (["--device", "tpu"], "--device: unknown 'tpu'"),
    "heads": (["--width", "100"], "--width: 100 is no multiple of 2 * 12 heads"),
    "time": (["--tokens", "1000"], "--tokens: 1000 is no multiple of --time, 1024"),
    "nothing": (["--rounds", "0"], "--rounds: must be at least 1, got 0"),
    "no PyTorch": ([], "PyTorch is not installed"),
    "no size": (["--elements", "1Q"], "must be a size such as 4096, 4K, 16M or 1G, got '1Q'"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert_refused(main, words, message, capsys)
