"""`python -m shardrt plan`: its figures are those of the commands it prints; why plans fail; exit codes."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from shardrt.__main__ import main as shell
from tests.simulate.test_script import in_a_process

SMALL = [
    *("models.train", "--batch-size", "32", "--model.n-layer", "2", "--model.block-size", "32"),
    *("--data", "text.txt", "--steps", "2", "--sample.length", "0"),
]
MANY = "--ranks", "16", "--machine", "h100-8"
pytestmark = pytest.mark.usefixtures("text")
OWN = """
import sys
import numpy as np
from shardrt import functional as F, nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard

lr, width = sys.argv[1], int(sys.argv[sys.argv.index("--width") + 1])
if width == 32:
    sys.exit("a width of 32 can't be")
model = fully_shard(nn.Linear(width, width), mesh=init_device_mesh("auto"))
optimizer = optim.SGD(model.parameters(), lr=float(lr))
for _ in range(2):
    model(np.zeros((4, width), np.float32)).sum().backward()
    optimizer.step()
"""


def planned(capsys, *arguments, code=0):
    assert shell(["plan", *MANY, *arguments]) == code
    return capsys.readouterr().out


def table(capsys, *arguments, code=0):
    return json.loads(planned(capsys, "--json", *arguments, code=code))


def simulated(capsys, command):
    """What the printed command prints, as JSON."""
    python, m, package, *words = shlex.split(command)
    assert (python, m, package, words[0]) == ("python", "-m", "shardrt", "simulate")
    assert shell(["simulate", "--json", *words[1:]]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_of_a_plan_are_those_that_its_command_simulates_to_the_bit(capsys):
    varied = "--vary", "memory.recompute=none,full", "--vary", "parallel.pp=1,2"
    found = table(capsys, "--memory", "1", "--only", *varied, "--", *SMALL)
    assert len(found["plans"]) == 4 == found["tried"]
    for row in found["plans"]:
        again = simulated(capsys, row["simulate"])
        for name in ("ms", "tokens", "tokens_per_s", "mfu", "hfu"):
            assert row[name] == again[name]
        assert row["device_bytes"] == max(again["device_bytes"].values())
        assert row["device_bytes"] == again["device_bytes"][str(row["rank"])]
        if row["rank"] == 0:
            assert row["memory"] == again["memory"]
    words = shlex.split(found["plans"][0]["simulate"])[1:]
    alone = json.loads(in_a_process([sys.executable, *words[:3], "--json", *words[3:]]))
    assert alone["ms"] == found["plans"][0]["ms"]
    assert alone["memory"] == found["plans"][0]["memory"]


def test_an_8b_llama_recomputes_no_more_than_its_memory_asks_for(capsys):
    """On 8 GPUs nothing in 76 GB, and all but matmuls in 60, before what takes more time is tried."""
    Path("text.txt").write_text("to be, or not to be, that is the question. " * 5000)
    train = "models.train", "--architecture", "llama", "--size", "llama-3.1-8b", "--text.window", "8192"
    how = "--batch-size", "8", "--precision.param", "bfloat16", "--data", "text.txt", "--sample.length", "0"
    none, matmul = (
        table(capsys, "--ranks", "8", "--memory", memory, "--tries", tries, "--", *train, *how)["plans"][0]
        for memory, tries in (("76", "1"), ("60", "6"))
    )
    kept = [plan["options"].pop("memory.recompute") for plan in (none, matmul)]
    assert kept == ["none", "matmul"] and none["options"] == matmul["options"]
    assert none["ms"] < matmul["ms"] < 1.1 * none["ms"]


def test_a_pipeline_is_recorded_stage_by_stage_and_its_largest_rank_must_fit(capsys):
    arguments = ["--only", "--vary", "parallel.pp=2", "--", *SMALL, "--model.vocab-size", "20000"]
    (row,) = table(capsys, "--memory", "1", *arguments)["plans"]
    assert row["tokens"] == 32 * 32
    each = simulated(capsys, row["simulate"])["device_bytes"]
    assert list(each) == ["0", "8"] and row["device_bytes"] == max(each.values()) > min(each.values())
    between = sum(each.values()) / 2 / 1e9
    assert table(capsys, "--memory", str(between), *arguments, code=1)["over"][0]["rank"] == row["rank"]


def test_why_plans_failed_is_reported(capsys):
    """Too large, by category; refused, by its line; and what was dropped for another."""
    varied = "--vary", "fsdp.strategy=FULL_SHARD,NO_SHARD", "--vary", "fsdp.prefetch=1,2"
    arguments = ["--only", *varied, "--vary", "fsdp.copies=1,3", "--", *SMALL]
    rows = table(capsys, "--memory", "1", *arguments)
    small, large = (
        next(row for row in rows["plans"] if row["options"]["fsdp.strategy"] == name)
        for name in ("FULL_SHARD", "NO_SHARD")
    )
    limit = str((small["device_bytes"] + large["device_bytes"]) / 2 / 1e9)
    report = planned(capsys, "--memory", limit, *arguments)
    assert "8 candidates: " in report and "measured = false" in report
    assert "5 tried, of which 2 fit (" in report and "1 did not fit and 2 were refused" in report
    assert "; pruned 3 that need at least as much memory as one that did not fit, 0 that" in report
    assert "the fastest that does not fit: " in report and "   device, GB: " in report
    assert "refused 2, not tried 0: fsdp.copies must be 1 without a hybrid strategy, got 3" in report
    assert planned(capsys, "--memory", "1e-9", *arguments, code=1).startswith("16 ranks on h100-8: no plan")


def test_a_script_of_ones_own_is_tried_in_all_settings_that_are_named(capsys, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    command = ["--memory", "1", "--vary", "width=64,32,128", "--vary", "depth=1,2", "--", "own.py", "0.1"]
    found = table(capsys, *command)
    assert {row["script"][3] for row in found["plans"]} == {"64", "128"}
    assert found["plans"][0]["script"][:3] == ["own.py", "0.1", "--width"]
    assert (len(found["plans"]), found["same"]) == (2, 2)  # depth is nothing to it
    (refused,) = found["refused"]
    assert (refused["line"], refused["times"]) == ("a width of 32 can't be", 2)
    again = simulated(capsys, found["plans"][-1]["simulate"])
    assert again["ms"] == found["plans"][-1]["ms"]
    report = planned(capsys, *command)
    assert "refused 2, not tried 0: a width of 32 can't be" in report


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--machine", "abacus", "--", *SMALL], 2, "unknown machine 'abacus'"),
        (["--", "nowhere.py"], 2, "--vary: name the options"),
        (["--vary", "a=1", "--", "nowhere.py"], 2, "nowhere.py"),
        (["--vary", "a", "--", *SMALL], 2, "--vary a: must be OPTION=A,B"),
        (["--vary", "fsdp.prefech=1", "--", *SMALL], 2, "unknown option fsdp.prefech"),
        (["--", *SMALL, "--fsdp.prefetch", "x"], 2, "--fsdp.prefetch: must be int"),
    ],
)
def test_what_is_wrong_is_named(arguments, code, message, capsys):
    assert shell(["plan", *MANY, "--memory", "1", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_command_that_fails_in_all_settings_is_no_plan(capsys):
    wrong = "--", *SMALL, "--batch-size", "8"
    report = planned(capsys, "--memory", "1", "--only", "--vary", "seed=1,2,3,4", *wrong, code=65)
    assert "refused 3, not tried 1: batch_size must divide equally among 16 ranks, got 8" in report
