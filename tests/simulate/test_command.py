"""`shardrt races` and `prove`: what it prints of a script, and its exit codes."""

import re
import sys

import pytest

from shardrt.__main__ import main
from shardrt.fsdp.whole_gradient import WholeGradient
from tests.simulate.test_script import in_a_process

RACING = """
import sys
import numpy as np
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
here = init_device_mesh("auto").device
model = fully_shard(nn.Linear(8, 8))
optimizer = optim.SGD(model.parameters(), lr=1.0)
x, side = here.zeros((4, 8), np.float32), here.new_stream("side")
for _ in range(2):
    side.submit(here.copy, here.pinned(32, np.float32), x)
    if sys.argv[1] == "reads":
        model(x).sum().item()  # the host waits, for what came first
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(RACING)
    return str(file)


def test_a_race_is_told_with_both_sides_and_the_exit_code_is_1(script, capsys):
    assert main(["races", "--", script, "writes"]) == 1
    message = capsys.readouterr().out
    assert message.startswith("rank 0 of 2: 2 optimizer steps, ")
    first, second = (re.search(rf"  {word} +(.*)", message)[1] for word in ("first", "second"))
    assert re.match(r"rank 0, compute: numpy.fill writes, .*train.py:10", first)
    assert re.match(r"rank 0, side: copy reads, .*train.py:12", second)
    assert "repair  record an event in stream compute after the first, and let stream side wait" in message


def test_the_ranks_that_share_memory_are_recorded_each(script, capsys):
    """Shards of all are in one buffer, and no rank may write its own while another one reads."""
    main(["races", "--ranks", "3", "--shared", script, "writes"])
    message = capsys.readouterr().out
    assert message.startswith("ranks 0, 1, 2 of 3: 2 optimizer steps, ")
    assert "waits for the other ranks" in message


def test_a_script_that_fails_is_no_proof(script, tmp_path, capsys):
    assert main(["races", "--", script]) == 65  # it wants a word more
    assert "IndexError" in capsys.readouterr().err
    assert main(["races", "--", str(tmp_path / "nowhere.py")]) == 2
    assert main(["races"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_where_nothing_runs_nothing_is_proved_and_a_gpu_shares_no_memory(script, tmp_path, capsys):
    (tmp_path / "none.py").write_text("")
    assert main(["races", "--", str(tmp_path / "none.py")]) == 65
    assert "nothing was proved" in capsys.readouterr().err
    assert main(["races", "--shared", "--device", "cuda", "--", script, "writes"]) == 2
    assert "only CPUs share memory" in capsys.readouterr().err


def test_a_rank_of_each_stage_is_recorded_without_being_asked_for(text, capsys):
    small = "--model.n-layer", "2", "--model.block-size", "32", "--sample.length", "0", "--data", "text.txt"
    words = "--parallel.pp", "2", "--micro-batches", "2", "--batch-size", "8", "--steps", "1", *small
    assert main(["races", "--ranks", "4", "--steps", "1", "--", "models.train", *words]) == 0
    message = capsys.readouterr().out
    assert message.startswith("ranks 0, 2 of 4: 1 optimizer step, ") and "no race" in message


def test_the_program_of_the_readme_has_no_race_and_unit_and_stream_are_reported(readme):
    message = in_a_process([sys.executable, "-m", "shardrt", "races", "--ranks", "4", readme])
    assert "no race, at any speed of host, streams and links" in message
    assert re.search(r"compute: \w+\.forward\w* forward blocks\.\d reads", message)
    assert "compute: layer_norm.backward backward blocks.3 writes" in message
    assert re.search(r"waits needed\nshardrt/fsdp/gathers.py:\d+: needed \(gather waits for compute", message)


BLOCKING = """
import sys
import numpy as np
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
mesh = init_device_mesh("auto")
here, ranks = mesh.device, mesh.communicator("gather")
model = fully_shard(nn.Linear(8, 8))
optimizer = optim.SGD(model.parameters(), lr=1.0)
model(here.zeros((4, 8), np.float32)).sum().backward()
x, how = here.zeros(8, np.float32), {"stream": here.current_stream, "tag": "x"}
if sys.argv[1] == "sends":
    ranks.send(x, peer=1 - ranks.rank, **how)
    ranks.recv(x, peer=1 - ranks.rank, **how)
elif sys.argv[1] == "differs":
    ranks.all_gather(x, **how | {"tag": "xy"[ranks.rank]})
elif ranks.rank:
    ranks.all_gather(x, **how)
optimizer.step()
"""


@pytest.mark.parametrize(
    "why, where, found",
    [
        ("sends", ["--each"], "rank 0, send of 32 bytes to rank 1 for x, stream compute, "),
        ("sends", [], "rank 0, send of 32 bytes to rank 1 for x, stream compute, "),
        ("differs", ["--each"], "rank 1, all_gather of 32 bytes for y, stream compute, "),
        ("differs", ["--shared"], "rank 1, all_gather of 32 bytes for y, stream compute, "),
        ("skips", ["--each"], "rank 1, all_gather of 32 bytes for x, stream compute, "),
    ],
)
def test_prove_names_the_calls_at_which_ranks_wait_or_differ(why, where, found, tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(BLOCKING)
    words = ["--order", "--races", "--steps", "1", *where, "--", str(file), why]
    assert main(["prove", *words]) == 1
    order, line, *rest = capsys.readouterr().out.splitlines()
    assert order == "order: NOT PROVED" and line.startswith(f"  {found}") and "train.py:" in line
    assert ("races: proved" in rest) == (why != "skips")


def test_prove_takes_the_shape_of_a_mesh_and_says_what_does_not_go_together(script, capsys):
    assert main(["prove", "--memory", "--ranks", "4", "--mesh", "2x2", "--", script, "writes"]) == 0
    assert "rank 0: " in capsys.readouterr().out
    for words in (["--mesh", "2x3"], ["--shared", "--device", "cuda"]):
        assert main(["prove", *words, "--", script, "writes"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {words[0]}: ")


def test_prove_says_of_each_check_what_it_has_proved(capsys):
    config = ["--config", "models/configs/default.toml", "--steps", "4"]
    assert main(["prove", "--ranks", "8", "--", "train", *config]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if not line.startswith(" ")] == [
        f"{name}: proved" for name in ("order", "races", "gradients", "memory")
    ]
    assert "use each rank's gradient once" in printed
    assert main(["prove", "--ranks", "8", "--memory", "--at-most", "1000", "--", "train", *config]) == 1
    assert capsys.readouterr().out.startswith("memory: NOT PROVED\n")


def test_prove_says_where_a_gradient_is_lost(capsys, monkeypatch):
    send = WholeGradient.send
    monkeypatch.setattr(
        WholeGradient, "send", lambda self, slot, out, accumulate: send(self, slot, out, False)
    )
    words = [
        "--config",
        "models/configs/default.toml",
        "--steps",
        "4",
        "--batch-size",
        "32",
        "--micro-batches",
        "2",
    ]
    assert main(["prove", "--gradients", "--ranks", "4", "--", "train", *words, "--reduce-each", "true"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("gradients: NOT PROVED\n")
    assert "from backward run 0 is lost at " in printed and "adamw.step at " in printed
