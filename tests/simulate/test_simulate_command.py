"""`python -m shardrt simulate`: scripts and modules as they stand, on more ranks than there are."""

import json
import re

import pytest

from shardrt.__main__ import main as shell
from shardrt.simulate.machine import FOLDER
from shardrt.tools import trace
from shardrt.tools.runs import read_trace

SCRIPT = """
import sys
import numpy as np
import shardrt
from shardrt import functional as F, nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from models.gpt import GPT, GPTConfig

mesh = init_device_mesh("auto")
model = GPT(GPTConfig(2, 2, 32, 32, 64))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
tokens = np.zeros((2, 32), np.int64)
while True:
    F.cross_entropy(model(tokens), tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("a step of", mesh.size)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "none.py").write_text("")
    return ["--", "train.py", "0.1"]


def report(capsys, *arguments):
    assert shell(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_script_on_4096_ranks_is_told_to_people_and_to_programs(script, capsys):
    many = "--ranks", "4096", "--machine", "h100-8"
    text = report(capsys, *many, *script)
    assert text.startswith("rank 0 of 4,096 on h100-8, step 1: ")
    assert "262,144 tokens a step" in text and "measured = false" in text
    assert "shardrt/nn/utils.py" in text and "made up: norm" in text
    found = json.loads(report(capsys, *many, "--json", *script))
    assert (found["ranks"], found["step"], found["tokens"]) == (4096, 1, 4096 * 64)
    assert sum(found["split"].values()) == pytest.approx(found["ms"])
    assert {"forward", "backward", "optimizer"} <= found["split"].keys()
    assert {"all_gather blocks.0", "reduce_scatter blocks.1"} <= found["exposed"].keys()
    again = json.loads(report(capsys, *many, "--json", *script))
    assert (again["ms"], again["exposed"]) == (found["ms"], found["exposed"])  # a simulation knows no noise


def test_more_nodes_take_longer_and_measure_the_wait(script, capsys):
    one, many = (json.loads(report(capsys, "--ranks", n, "--json", *script)) for n in ("8", "4096"))
    assert many["exposed"][""] > 10 * one["exposed"][""]
    assert "between nodes" in many["links"] and "between nodes" not in one["links"]
    assert many["memory"]["device"]["sharded parameters"] < one["memory"]["device"]["sharded parameters"]


def test_a_mesh_is_given_to_a_script_that_says_no_shape(script, capsys):
    """Two axes: copies, and shards inside the nodes."""
    found = json.loads(report(capsys, "--ranks", "64", "--mesh", "8x8", "--json", *script))
    assert set(found["links"]["between nodes"]) <= {"all_reduce", "all_gather", "reduce_scatter"}
    flat = json.loads(report(capsys, "--ranks", "64", "--json", *script))
    between, of_flat = (each["links"]["between nodes"]["all_gather"] for each in (found, flat))
    assert between < of_flat
    shards = (each["memory"]["device"]["sharded parameters"] for each in (found, flat))
    assert next(shards) > 4 * next(shards)


def test_the_trace_is_read_as_that_of_a_run(script, capsys, tmp_path):
    # Where the host is late, spans of units hold its time too, as those of a run do.
    at_once = re.sub(r"(item|launch) = .*", r"\1 = 0", (FOLDER / "h100-8.toml").read_text())
    (tmp_path / "mine.toml").write_text(at_once)
    words = "--ranks", "16", "--machine", "mine.toml", "--json", "--steps", "3", "--trace", "t.json"
    found = json.loads(report(capsys, *words, *script))
    events = read_trace(tmp_path / "t.json")
    assert list(trace.steps_of(events, 0)) == [found["step"]] == [2]
    parts = trace.split(events, 0, 2)
    assert sum(parts.values()) == pytest.approx(found["ms"], abs=0.01)
    for part in ("forward", "backward", "waiting for streams"):
        assert parts[part] == pytest.approx(found["split"].get(part, 0.0), rel=0.1, abs=0.05)
    assert {"gather", "reduce"} <= trace.busy(events, 0, 2).keys()


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--machine", "abacus", "--", "train.py", "1"], 2, "unknown machine 'abacus'"),
        (["--", "nowhere.py"], 2, "nowhere.py"),
        (
            ["--ranks", "8", "--mesh", "2x8", "--", "train.py", "1"],
            2,
            "(2, 8) has 16 ranks, but --ranks is 8",
        ),
        (["--record", "1", "--", "train.py", "1"], 2, "--record: must be ranks from 0"),
        (["--record", "0,x", "--", "train.py", "1"], 2, "--record: must be ranks from 0"),
        (["--", "train.py"], 65, "IndexError"),
        (["--", "none.py"], 65, "error: no optimizer step was recorded"),
    ],
)
def test_what_is_wrong_is_named(script, arguments, code, message, capsys):
    assert shell(["simulate", *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, word, message",
    [
        ("--jitter", "-1", "must be at least 0, got -1"),
        ("--jitter", "nan", "must be at least 0, got nan"),
        ("--mesh", "4xq", "must be sizes such as 512x8, got 4xq"),
    ],
)
def test_a_word_that_is_none_is_refused(script, option, word, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        shell(["simulate", option, word, *script])
    assert message in capsys.readouterr().err


def test_stages_of_a_pipeline_are_recorded_each_and_other_ranks_of_them_are_compared(script, capsys):
    """A batch of each of 8 ranks goes through both stages."""
    options = "--batch-size", "32", "--parallel.pp", "2", "--steps", "2", "--model.n-layer", "2"
    options += "--optimizer.name", "adamw"  # with Muon ranks own other matrices
    more = "--check-roles", "1", "--jitter", "1e-3", "--json"
    found = json.loads(report(capsys, "--ranks", "16", *more, "--", "models.train", *options))
    assert found["tokens"] == 32 * 128 and "2 ranks recorded" in found["assumptions"]
    for rank, first in (7, 0), (15, 8):
        words = f"roles: rank {rank} has the collectives and bytes of rank {first}"
        assert any(report.startswith(words) for report in found["assumptions"])
    assert any("1 ms of standard deviation" in report for report in found["assumptions"])
    assert {"forward", "backward"} <= found["split"].keys()
    again = json.loads(
        report(capsys, "--ranks", "16", "--record", "0,8", "--json", "--", "models.train", *options)
    )
    assert (again["tokens"], again["memory"]) == (found["tokens"], found["memory"])
    assert again["ms"] < found["ms"]
    assert any(label.startswith("recv") for label in found["exposed"])
