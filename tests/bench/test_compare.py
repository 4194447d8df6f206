"""bench.compare: contestants do the same work, others' figures are not shown, and how it refuses."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bench import compare, figures, quiet, workload
from bench.peers.launch import ONE_THREAD, Alarm, _free_port, launch, one_thread
from bench.training import model_of
from shardrt.checkpoint import save
from tests.bench.nonsense import assert_refused
from tests.ranks import ROOT, mpirun

TINY = workload.Workload(layers=1, dim=16, heads=2, seq=8, batch=2, vocab=17)
LLAMA = workload.LlamaWorkload(1, 32, 4, 8, 2, 17, kv_heads=2, hidden=48)
VIT = workload.ViTWorkload(1, 16, 2, 24, image=8, patch=4, batch=2, classes=5)
STEPS = ["--steps", "3", "--warmup", "1", "--json"]


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=one_thread()
    )


# Of each way to start one; that the others compute the same is shown by tests/parity.
CASES = {
    "fsdp2": (TINY, 0, 1e-6),
    "ddp": (LLAMA, 0, 1e-6),
    "fsdp1": (VIT, 0, 1e-6),
    "fsdp2-bf16": (LLAMA, 1e-6, None),  # twice what its losses are from those of ddp, of the same job
    "tp-sp": (replace(LLAMA, vocab=18), 0, 1e-6),
    "pp-zbv": (replace(TINY, layers=4), 0, 1e-6),
}
STRATEGIES = {"tp-sp": "TP_SP", "pp-zbv": "PP_ZBVZeroBubble"}  # ours beside these
# The commands' own main, with the words of one case after the other.
OURS = """
import json, sys
from bench import step
step.SIDE = 64
for _, *sys.argv[1:] in json.loads(sys.argv[1]):
    step.main()
"""
THEIRS = """
import json, os, sys
import torch._dynamo, torch.distributed.fsdp  # what a step needs
from bench import workload
from bench.peers import torch_step
workload.SIDE = 64
for os.environ["MASTER_PORT"], *sys.argv[1:] in json.loads(sys.argv[1]):
    if os.fork() == 0:
        torch_step.main()
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def figures_of_both(tmp_path_factory):
    """By peer: our figures and its own, of the same work from the same weights."""
    pytest.importorskip("torch")
    words = []
    for job, _, _ in CASES.values():
        weights = tmp_path_factory.mktemp("weights")
        save(weights, model_of(job))
        beside = ["--weights", str(weights), "--micro-batches", "2", *STEPS]
        words.append([str(_free_port()), *job.arguments(), *beside])
    named = [
        [*each, "--strategy", STRATEGIES.get(p, "FULL_SHARD")] for each, p in zip(words, CASES, strict=True)
    ]
    done = mpirun(2, ["-c", OURS, json.dumps(named)], **ONE_THREAD)
    ours = map(json.loads, done.stdout.splitlines())
    own = [[*each, "--strategy", peer] for each, peer in zip(words, CASES, strict=True)]
    theirs = map(json.loads, launch(["-c", THEIRS, json.dumps(own)], 2, one_thread()).splitlines())
    return dict(zip(CASES, zip(ours, theirs, strict=True), strict=True))


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize("peer", CASES)
def test_contestants_have_the_same_losses(figures_of_both, peer):
    ours, theirs = figures_of_both[peer]
    _, least, most = CASES[peer]
    if most is None:
        of_both = (figures_of_both[name][1]["losses"] for name in ("ddp", peer))
        most = 2 * compare.difference(*of_both)
        assert 1e-6 < most < 1e-3
    assert theirs["settings"]["strategy"] == peer and theirs["parameters"] == ours["parameters"]
    assert theirs["settings"]["threads_per_rank"] == ours["settings"]["threads_per_rank"] == 1
    assert least <= compare.difference(ours["losses"], theirs["losses"]) < most
    assert ours["received_mb"] == pytest.approx(ours["formula_mb"], abs=2e-3)
    assert 100 < theirs["peak_pss_mb"] < theirs["peak_rss_mb"] < 5000


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
    return figures.figures(TINY, ranks, **about) | {"other_load": other_load, "product_gflops": 77.0}


def reported_of(result):
    return compare.table(result | {"processor": "a processor"}, "")


def test_what_is_not_products_is_told_beside():
    """A step without what its operations take at the rate of the products."""
    run = {"step_ms_median": 10.0, "gflops_per_rank": 60.0, "product_gflops": 80.0}
    assert compare.beside_products(run) == 2.5
    assert compare.beside_products(run | {"product_gflops": 50.0}) == 0
    job = compare.Contestant("shardrt", "", "FULL_SHARD")
    runs = [fake(10) | run, fake(20) | run | {"step_ms_median": 30.0}]
    (message,) = compare.summary([job], [[each] for each in runs])["contestants"]
    assert message["beside_products_ms"] == 5.0
    assert "      80        5  " in reported_of(compare.summary([job], [[each] for each in runs]))


def test_losses_in_bfloat16_are_held_to_twice_what_those_of_torch_are_from_float32():
    exact, low = (compare.Contestant("a", "", name) for name in ("FULL_SHARD", "FULL_SHARD-bf16"))
    assert exact.tolerance(exact, 3e-5) == compare.TOLERANCE
    assert exact.tolerance(low, 3e-4) == low.tolerance(exact, 3e-4) == low.tolerance(low, 3e-4) == 6e-4
    assert low.tolerance(low, 3e-5) == 2 * compare.ROUNDING
    asked = []

    def run(contestant, _):
        asked.append(contestant.strategy)
        return fake(1, (2.0, 1.0) if contestant.strategy == "fsdp2" else (2.0, 1.01))

    peers = [compare.Contestant("b", "", name) for name in ("fsdp2", "fsdp2-bf16")]
    assert compare.rounding_of([exact, peers[0]], [fake(1), fake(1)], (), run) == 0 and not asked
    assert compare.rounding_of([low, peers[0]], [fake(1), fake(1)], (), run) == pytest.approx(0.01, rel=0.02)
    assert asked == ["fsdp2-bf16"]
    both = [fake(1), fake(1), fake(1, (2.0, 1.02))]
    assert compare.rounding_of([low, *peers], both, (), run) == pytest.approx(0.02, rel=0.03)
    assert compare.rounding_of([low], [fake(1)], (), run) == pytest.approx(0.01, rel=0.02)
    assert sorted(asked) == ["fsdp2", "fsdp2-bf16", "fsdp2-bf16"]
    rounds = [[fake(10), fake(20, (2.0, 1.03))]]
    shown = {
        limit: compare.summary([low, peers[1]], rounds, limit)["contestants"][1] for limit in (0.01, 0.02)
    }
    assert "step_ms" not in shown[0.01] and "step_ms" in shown[0.02]


def test_each_run_is_told_as_it_comes_and_a_peer_that_is_hopeless_is_left_out_after_a_step(capsys):
    contestants = [
        compare.Contestant("ours", "bench.step", "FULL_SHARD"),
        compare.Contestant("slow", "bench.peers.torch_step", "fsdp2-bf16"),
        compare.Contestant("peer", "bench.peers.torch_step", "fsdp2"),
    ]
    first_steps, said, asked = {"ours": 300.0, "slow": 45e3, "peer": 900.0}, [], []

    def run(contestant, first_step):
        said.append(capsys.readouterr().err)
        asked.append(contestant.name)
        if 0 < first_step < first_steps[contestant.name]:
            raise Alarm
        return fake(300 if contestant.name == "ours" else 600)

    rounds, left_out = compare.rounds_of(contestants, 2, run)
    said.append(capsys.readouterr().err)
    assert asked == ["ours", "slow", "peer", "ours", "peer"]
    assert said == [
        "",
        "round 1 of 2: ours: 300.0 ms per step\n",
        "round 1 of 2: slow: left out: "
        "its first step takes more than 6000 ms, 20 times a step of the first\n",
        "round 1 of 2: peer: 600.0 ms per step, 2.00 times the first's; losses differ by 0.0e+00\n",
        "round 2 of 2: ours: 300.0 ms per step\n",
        "round 2 of 2: peer: 600.0 ms per step, 2.00 times the first's; losses differ by 0.0e+00\n",
    ]
    result = compare.summary(contestants, rounds, 0.0, [*left_out.values()])
    assert [each["contestant"] for each in result["contestants"]] == ["ours", "peer"]
    assert "slow                   left out: its first step takes more than 6000 ms, 20 times" in reported_of(
        result
    )
    assert compare.rounding_of(contestants, rounds[0], left_out, run) == 0 and len(asked) == 5


@pytest.mark.torch
def test_a_peer_gives_up_in_a_first_step_that_takes_too_long():
    pytest.importorskip("torch")
    slow = compare.Contestant("slow", "bench.peers.torch_step", "fsdp2")
    with pytest.raises(Alarm):
        slow.run([*TINY.arguments(), "--steps", "1000000"], 2, first_step=1e-3)


def test_the_slowest_rank_and_the_largest_memory_count():
    message = fake(8)
    assert message["step_ms_median"] == 8 and message["tokens_per_s"] == 2 * TINY.batch * TINY.seq / 8e-3
    assert (message["peak_rss_mb"], message["peak_pss_mb"], message["job_pss_mb"]) == (20, 9, 14)
    assert message["processor_ms"] == 4


def test_ratios_are_taken_within_a_round():
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", "fsdp2")]
    rounds = [[fake(10), fake(20)], [fake(20), fake(30)], [fake(10), fake(30)]]
    result = compare.summary(contestants, rounds)
    assert result["contestants"][1]["ratios"] == [2.0, 1.5, 3.0]
    assert result["contestants"][1]["ratio"] == 2.0
    message = reported_of(result)
    assert "2.00 (1.50 to 3.00)" in message
    assert "processor: a processor" in message and message.count(" 77 ") == 2, "the rates of products"
    assert "matmuls of a: none" in message and "matmuls of b: none" in message, "their libraries"


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
    message = reported_of(result)
    assert ("step_ms" in result["contestants"][1]) == shown
    assert ("LOSSES DIFFER" in message) == (not shown) and ("98765" in message + json.dumps(result)) == shown


def test_a_run_beside_busy_processes_is_called_doubtful():
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", "fsdp2")]
    for other_load, doubtful in (0.01, False), (0.5, True):
        rounds = [[fake(10), fake(20)], [fake(10), fake(20, other_load=other_load)]]
        assert ("doubtful" in reported_of(compare.summary(contestants, rounds))) == doubtful


def test_the_load_of_other_processes_is_seen():
    program = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", program])
    load, _ = quiet.load_of_others(lambda: time.sleep(1))
    other.wait()
    assert load > 0.3


def test_a_disturbed_run_is_repeated_and_each_wait_is_told_at_once(monkeypatch, capsys):
    loads = iter([0.5, 0.4, 0.0, 0.7, 0.0, 0.02])  # wait, wait, disturbed run, wait, run
    said = []

    def load(action):
        said.append(capsys.readouterr().err)  # what stands there while it waits
        return next(loads), {"run": 1}

    monkeypatch.setattr(quiet, "load_of_others", load)
    quiet.announce(4, 60)
    assert quiet.watched(dict, patience=60) == {"run": 1, "other_load": 0.02}
    assert "runs: 4, up to 60 s for each" in said[0]
    assert "0.5 cores: waiting up to 60 s" in said[1] and said[2:4] == ["", ""], "once"
    assert "0.7 cores meanwhile: this run is repeated" in said[4]
    loads = iter([0.7])
    assert quiet.watched(dict, patience=0) == {"run": 1, "other_load": 0.7}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "figures.json"], "exists"),
        (["--against", "fsdp2,fsdp3"], "unknown peer 'fsdp3'; known are fsdp2"),
        (["--size", "gpt3"], "invalid choice: 'gpt3'"),
        (["--size", "vit-s16", "--seq", "8"], "vit-s16 is a ViT and has none"),
        (["--device", "cuda"], "python -m bench.gpu"),
        (["--ranks", "0"], "at least 1"),
        ([], "PyTorch is not installed"),
    ],
)
def test_nonsense_is_refused_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "figures.json").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert_refused(with_words(monkeypatch, compare.main), words, message, capsys)
    assert (tmp_path / "figures.json").read_text() == "mine"


def with_words(monkeypatch, main):
    """`main` as a function of its words."""

    def call(words):
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        main()

    return call
