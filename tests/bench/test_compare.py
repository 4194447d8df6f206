"""bench.compare: contestants do the same work, others' figures are not shown, and how it refuses."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from bench import compare, figures, quiet, workload
from bench.peers.launch import ONE_THREAD, launch, one_thread
from bench.peers.torch_step import network
from bench.training import loss_of, model_of
from shardrt.checkpoint import save
from tests.ranks import ROOT, mpirun

TINY = workload.Workload(layers=1, dim=16, heads=2, seq=8, batch=2, vocab=17)
LLAMA = workload.LlamaWorkload(1, 32, 4, 8, 2, 17, kv_heads=2, hidden=48)
VIT = workload.ViTWorkload(1, 16, 2, 24, image=8, patch=4, batch=2, classes=5)
STEPS = ["--steps", "3", "--warmup", "1", "--json"]


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=one_thread()
    )


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize(
    ("job", "peer", "least", "most"),
    [
        (TINY, "fsdp2", 0, 1e-6),
        (LLAMA, "ddp", 0, 1e-6),
        (VIT, "fsdp1", 0, 1e-6),
        (LLAMA, "fsdp2-bf16", 1e-6, compare.LOW_TOLERANCE),
    ],
)
def test_contestants_have_the_same_losses(tmp_path, job, peer, least, most):
    pytest.importorskip("torch")
    save(tmp_path, model_of(job))
    words = [*job.arguments(), "--weights", str(tmp_path), *STEPS]
    done = mpirun(2, ["-m", "bench.step", *words], timeout=120, **ONE_THREAD)
    ours = json.loads(done.stdout.splitlines()[-1])
    module = ["-m", "bench.peers.torch_step", *words, "--strategy", peer]
    theirs = json.loads(launch(module, 2, one_thread()).splitlines()[-1])
    assert theirs["parameters"] == ours["parameters"]
    assert theirs["settings"]["threads_per_rank"] == ours["settings"]["threads_per_rank"] == 1
    assert least <= compare.difference(ours["losses"], theirs["losses"]) < most
    assert 100 < theirs["peak_pss_mb"] < theirs["peak_rss_mb"] < 5000


@pytest.mark.torch
@pytest.mark.parametrize("job", [TINY, LLAMA, VIT], ids=["gpt", "llama", "vit"])
def test_the_models_are_the_same_to_the_gradient(job):
    """With weights five times as large, so that each part of a model shows."""
    torch = pytest.importorskip("torch")
    ours, theirs = model_of(job), network(job)
    weights = {name: values * (1 if "norm" in name else 5) for name, values in ours.state_dict().items()}
    ours.load_state_dict(weights)
    theirs.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in weights.items()})
    inputs, targets = job.batch_of(0, 0)
    loss = loss_of(ours, inputs, targets)
    loss.backward()
    logits = theirs(torch.from_numpy(inputs))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(targets).flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = dict(theirs.named_parameters())
    assert gradients.keys() == weights.keys()
    for name, parameter in ours.named_parameters():
        found, true = parameter.grad, gradients[name].grad.numpy()
        assert np.linalg.norm(found - true) <= 2e-5 * np.linalg.norm(true), name


def test_a_rank_that_fails_ends_the_launch_with_its_error():
    program = (
        "import os, sys, time; sys.exit('rank one fell') if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code 1\n.*rank one fell"):
        launch(["-c", program], 2, one_thread(), timeout=30)


def fake(milliseconds, losses=(2.0, 1.0), other_load=0.0):
    ranks = [
        figures.RankFigures([milliseconds / 1e3] * 3, 0.006, losses, 10.0, 9.0),
        figures.RankFigures([milliseconds / 2e3] * 3, 0.002, losses, 20.0, 5.0),
    ]
    about = {"contestant": "fake", "parameters": 5, "settings": {}, "versions": {"blas": "none"}}
    return figures.figures(TINY, ranks, **about) | {"other_load": other_load}


def test_the_slowest_rank_and_the_largest_memory_count():
    told = fake(8)
    assert told["step_ms_median"] == 8 and told["tokens_per_s"] == 2 * TINY.batch * TINY.seq / 8e-3
    assert (told["peak_rss_mb"], told["peak_pss_mb"], told["job_pss_mb"]) == (20, 9, 14)
    assert told["processor_ms"] == 4


def test_ratios_are_taken_within_a_round():
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", "fsdp2")]
    rounds = [[fake(10), fake(20)], [fake(20), fake(30)], [fake(10), fake(30)]]
    result = compare.summary(contestants, rounds)
    assert result["contestants"][1]["ratios"] == [2.0, 1.5, 3.0]
    assert result["contestants"][1]["ratio"] == 2.0
    assert "2.00 (1.50 to 3.00)" in compare.table(result, "")


@pytest.mark.parametrize(
    ("strategy", "losses", "shown"),
    [
        ("fsdp2", (2.0, 1.0), True),
        ("fsdp2", (2.0, 1.1), False),
        ("fsdp2", (2.0, float("nan")), False),
        ("NONE", (2.0, 1.1), True),  # trained alone: equal until the first update
        ("NONE", (2.1, 1.0), False),
    ],
)
def test_who_has_other_losses_gets_no_figures(strategy, losses, shown):
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", strategy)]
    result = compare.summary(contestants, [[fake(10), fake(10)], [fake(10), fake(98765, losses)]])
    told = compare.table(result, "")
    assert ("step_ms" in result["contestants"][1]) == shown
    assert ("LOSSES DIFFER" in told) == (not shown) and ("98765" in told + json.dumps(result)) == shown


@pytest.mark.parametrize(("other_load", "doubtful"), [(0.01, False), (0.5, True)])
def test_a_run_beside_busy_processes_is_called_doubtful(other_load, doubtful):
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", "fsdp2")]
    rounds = [[fake(10), fake(20)], [fake(10), fake(20, other_load=other_load)]]
    assert ("doubtful" in compare.table(compare.summary(contestants, rounds), "")) == doubtful


def test_the_load_of_other_processes_is_seen():
    program = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", program])
    load, _ = quiet.load_of_others(lambda: time.sleep(1))
    other.wait()
    assert load > 0.3


def test_a_disturbed_run_is_repeated_while_patience_lasts(monkeypatch):
    loads = iter([0.5, 0.0, 0.7, 0.0, 0.02])  # wait, wait, disturbed run, wait, run
    monkeypatch.setattr(quiet, "load_of_others", lambda action: (next(loads), {"run": 1}))
    assert quiet.watched(dict, patience=60) == {"run": 1, "other_load": 0.02}
    loads = iter([0.7])
    assert quiet.watched(dict, patience=0) == {"run": 1, "other_load": 0.7}


def test_a_wait_for_an_idle_machine_is_told_at_once(monkeypatch, capsys):
    loads = iter([0.5, 0.5, 0.0, 0.0])
    said = []

    def load(action):
        said.append(capsys.readouterr().err)  # what stands there while it waits
        return next(loads), {}

    monkeypatch.setattr(quiet, "load_of_others", load)
    quiet.announce(4, 60)
    quiet.watched(dict, patience=60)
    assert "runs: 4, up to 60 s for each" in said[0]
    assert "0.5 cores: waiting up to 60 s" in said[1] and said[2:] == ["", ""]  # once


def test_nonsense_is_refused_in_one_line(tmp_path):
    output = tmp_path / "figures.json"
    output.write_text("mine")
    without = "import sys; sys.modules['torch'] = None; from bench import compare; compare.main()"
    for program, words, told in (
        (["-m", "bench.compare"], ["--output", str(output)], "exists"),
        (["-m", "bench.compare"], ["--against", "fsdp2,fsdp3"], "unknown peer 'fsdp3'; known are fsdp2"),
        (["-m", "bench.compare"], ["--size", "gpt3"], "invalid choice: 'gpt3'"),
        (["-m", "bench.compare"], ["--size", "vit-s16", "--seq", "8"], "vit-s16 is a ViT and has none"),
        (["-m", "bench.compare"], ["--device", "cuda"], "python -m bench.gpu"),
        (["-m", "bench.compare"], ["--ranks", "0"], "at least 1"),
        (["-c", without], [], "PyTorch is not installed"),
    ):
        done = python(*program, *words)
        assert done.returncode == 2 and done.stdout == "", words
        assert len(done.stderr.splitlines()) == 1 and told in done.stderr, (words, done.stderr)
    assert output.read_text() == "mine"
