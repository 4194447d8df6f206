"""bench.step: its figures agree with one another and with what was done; how it refuses."""

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from bench import figures, step, workload
from bench.harness.command_line import Parser
from bench.harness.environment import facts, write_result
from bench.parts import PARTS, busy, parts
from bench.training import Stamps, model_of
from models import llama, vit
from shardrt.device.timeline import Passed, Recording, Span
from tests.bench.test_compare import LLAMA, STEPS, TINY, VIT, python
from tests.ranks import ROOT, mpirun, mpirun_path

REQUIRED = {"step_ms_median", "tokens_per_s", "peak_rss_mb", "world_size", "parameters", "loss", "settings"}


def figures_of(done):
    """The last line of a run that succeeded."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(message, ranks):
    """A figures object is whole and agrees with itself."""
    assert REQUIRED <= message.keys()
    assert message["world_size"] == ranks
    assert len(message["step_ms"]) == 3 and len(message["losses"]) == 4
    assert message["step_ms_median"] == sorted(message["step_ms"])[1]
    tokens = ranks * TINY.batch * TINY.seq
    assert message["tokens_per_s"] == pytest.approx(1e3 * tokens / message["step_ms_median"], rel=1e-2)
    assert message["loss"] == message["losses"][-1] == pytest.approx(np.log(TINY.vocab), rel=0.05)
    assert 30 < message["peak_pss_mb"] <= message["peak_rss_mb"] < 5000
    assert (
        message["peak_pss_mb"] <= message["job_pss_mb"] <= ranks * (message["peak_pss_mb"] + 0.1)
    )  # rounded
    assert sum(message["parts_ms"].values()) == pytest.approx(message["step_ms_median"], rel=0.02)
    assert all(message["parts_ms"][part] > 0 for part in ("forward", "backward", "optimizer"))
    assert message["received_mb"] == pytest.approx(message["formula_mb"], abs=1e-3)
    assert 0 < message["mfu_of_product"] < 1


def test_batches_are_a_function_of_step_and_rank():
    for job in (TINY, LLAMA, VIT):
        inputs, targets = job.batch_of(3, 1)
        assert len(inputs) == len(targets) == job.batch
        np.testing.assert_array_equal(inputs, job.batch_of(3, 1)[0])
        assert (inputs != job.batch_of(3, 0)[0]).any() and (inputs != job.batch_of(2, 1)[0]).any()
    tokens, targets = TINY.batch_of(3, 1)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])


def test_a_result_is_written_a_row_a_line(tmp_path):
    result = {"a": {"b": [1, 2]}, "rows": [{"c": [0.5]}, {"c": []}], "plain": [1, 2], "none": []}
    write_result(tmp_path / "result.json", result)
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text) == result and list(json.loads(text)) == list(result)
    assert text.count("\n") == 9 and '\n  {"c": [0.5]},\n' in text


def test_a_result_names_no_path_of_a_machine():
    message = facts("python -m bench.step --tcmalloc /usr/lib/a.so --keep=/tmp/k -o bench/a.json")
    assert message["command"] == "python -m bench.step --tcmalloc FILE --keep=FILE -o bench/a.json"
    kept = list((ROOT / "bench" / "results").iterdir())
    assert len(kept) > 30
    paths = re.compile(r"[\s\"'=:](?:~|/[\w.-]+)/[^\s\"']*")
    assert {path.name: found for path in kept if (found := paths.findall(path.read_text()))} == {}


def test_sizes_are_those_of_the_models():
    sizes = workload.SIZES
    llama_100m = replace(llama.SIZES["llama-100m"], block_size=sizes["llama-100m"].seq)
    assert model_of(sizes["llama-100m"]).config == llama_100m
    assert model_of(sizes["vit-s16"]).config == vit.SIZES["vit-s16"]


@pytest.mark.parametrize("job", [TINY, LLAMA, VIT], ids=str)
def test_options_say_a_workload_and_operations_are_those_of_its_matrices(job):
    parser = Parser()
    workload.add_shape(parser)
    assert workload.workload_of(parser.parse_args(job.arguments())) == job
    matrices = {name: p.size for name, p in model_of(job).named_parameters() if len(p.shape) > 1}
    tokens = 5 if job is VIT else job.seq
    attention = job.layers * tokens * job.dim * (2 if job is VIT else 1)  # multiply-adds for each token
    once = {"head.weight": 1, "patches.weight": 4, "token": 0, "positions": 0, "wpe.weight": 0}
    products = sum(size * once.get(name, tokens) for name, size in matrices.items())
    assert job.flops == 6 * job.batch * (products + tokens * attention)


def test_parts_are_the_step_and_each_wait_has_its_source():
    spans = [
        Span("compute", "wait", 1.0, 1.5),  # in forward, for a gather
        Span("compute", "forward blocks.0", 0.5, 4.0),
        Span("compute", "wait", 5.0, 6.0),  # in backward, for a reduction
        Span("compute", "wait", 6.5, 6.75),  # for a point that was passed before
        Span("compute", "all_reduce", 8.0, 9.0),  # of clipping, in the optimizer
        Span("gather", "all_gather blocks.0", 0.0, 1.4),
        Span("reduce", "reduce_scatter blocks.0", 4.5, 5.9),
    ]
    passed = [
        Passed("gather", 1, 1.4, waited=False),
        Passed("reduce", 2, 5.9, waited=False),
        Passed("compute", 1, 1.45, waited=True),
        Passed("compute", 2, 5.95, waited=True),
        Passed("compute", 9, 6.7, waited=True),
    ]
    found = parts(Stamps(0.0, 4.0, 7.5, 9.5, 10.0), Recording(spans, passed))
    values = 3.5, 2.25, 0.5, 1.0, 0.25, 1.0, 1.0, 0.5
    assert found == pytest.approx(dict(zip(PARTS, values, strict=True)))
    assert busy(spans) == pytest.approx({"gather": 1.4, "reduce": 1.4})


def test_forwards_among_the_backwards_of_a_pipeline_are_told_apart():
    spans = [
        Span("compute", "wait", 1.5, 2.0),  # in a forward of stage 1
        Span("compute", "1F0", 1.0, 3.0),
        Span("compute", "wait", 3.0, 3.25),
        Span("compute", "1B0", 3.0, 6.0),
        Span("F 0 to 1", "recv", 0.0, 1.75),
    ]
    found = parts(Stamps(0.5, 0.5, 6.5, 7.0, 7.0), Recording(spans, []))
    message = {"forward": 1.5, "backward": 3.75, "other waits": 0.75, "optimizer": 0.5}
    assert found == pytest.approx(dict.fromkeys(PARTS, 0.0) | message)


def test_a_step_without_mpirun_ends_with_one_json_line():
    message = figures_of(python("-m", "bench.step", *TINY.arguments(), *STEPS[:-1]))
    check(message, ranks=1)
    assert message["received_mb"] == 0 and message["parts_ms"]["waits for gathers"] == 0


@pytest.mark.mpi
def test_strategies_together_have_processes_of_their_own_and_the_same_losses(monkeypatch, capsys):
    mpirun_path()
    monkeypatch.setattr(step, "STRATEGIES", ("HYBRID_SHARD",))  # the others, and equal losses: tests/fsdp
    words = [*TINY.arguments(), *STEPS, "--ranks", "2", "--strategy", "all"]
    monkeypatch.setattr("sys.argv", ["step", *words])
    step.start(step.arguments().parse_args(words))
    (line,) = capsys.readouterr().out.splitlines()
    hybrid, alone = json.loads(line)["strategies"]
    for each in (hybrid, alone):
        check(each, ranks=2)
    assert hybrid["settings"]["mesh"] == [2, 1] and hybrid["received_mb"] > alone["received_mb"] == 0
    assert alone["losses"][0] == hybrid["losses"][0] and alone["losses"][1] != hybrid["losses"][1]
    for message in (step.table([hybrid, alone]), step.lines(hybrid, TINY)):
        assert any("HYBRID_SHARD" in line for line in message)


WRONG = {
    "n_embd must be a multiple of n_head, got 17 and 2": ["--dim", "17", "--heads", "2"],
    "FULL_SHARD": ["--strategy", "HALF_SHARD"],
    "mpirun has started 2": ["--ranks", "3"],
}
# The command's own main, with words that make no sense and then with some that do.
MAIN = """
import json, sys
from bench import step
step.SIDE = 64
for sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        step.main()
    except SystemExit as end:
        print(f"exit code {end.code}", flush=True)
"""


@pytest.fixture(scope="module")
def two_ranks():
    low = [*TINY.arguments(), *STEPS, "--strategy", "FULL_SHARD-bf16"]
    words = [*WRONG.values(), low, [*TINY.arguments(), *STEPS, "--clip", "0.5"]]
    return mpirun(2, ["-c", MAIN, json.dumps(words)])


@pytest.mark.mpi
def test_a_clipped_step_on_two_ranks_shows_its_collectives(two_ranks):
    message = figures_of(two_ranks)
    assert message["parts_ms"]["collectives"] > 0 and message["received_mb"] >= message["formula_mb"]


@pytest.mark.mpi
def test_a_step_in_bfloat16_is_told_like_the_others_and_gathers_half_the_bytes(two_ranks):
    low, exact = (json.loads(line) for line in two_ranks.stdout.splitlines() if line.startswith("{"))
    check(low, ranks=2)
    assert low["settings"]["strategy"] == "FULL_SHARD-bf16"
    assert 0.5 * exact["formula_mb"] < low["formula_mb"] < 0.75 * exact["formula_mb"]
    np.testing.assert_allclose(low["losses"][0], exact["losses"][0], rtol=1e-3)


@pytest.mark.mpi
def test_nonsense_is_refused_once_for_two_ranks(two_ranks):
    assert two_ranks.stdout.count("exit code 2\n") == 2 * len(WRONG)
    for message, line in zip(WRONG, two_ranks.stderr.strip().splitlines(), strict=True):
        assert message in line
    refused = python("-m", "bench.step", "--ranks", "3", "--strategy", "HYBRID_SHARD")  # by ranks it starts
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and "even" in refused.stderr


@pytest.mark.parametrize(
    ("words", "launched", "message"),
    [
        (["--strategy", "all"], 2, "python -m bench.step --ranks 2 --strategy all"),
        (["--strategy", "all", "--save", "there"], None, "no --save"),
        (["--device", "cuda"], None, "python -m bench.gpu"),
        (["--warmup", "-1"], None, "at least 0"),
        (["--size", "vit-s16", "--kv_heads", "2"], None, "is a ViT and has none"),
    ],
)
def test_options_that_do_not_fit_are_named(words, launched, message):
    with pytest.raises(ValueError, match=message):
        options = step.arguments().parse_args(words)
        workload.workload_of(options)
        step.check(options, launched)


def test_shared_pages_count_once():
    """A page that two processes have in common counts as half a page for each."""
    code = (
        "import os, mmap; from bench import figures as f; n = 1 << 26\n"
        "m = mmap.mmap(-1, n); m.write(b'1' * n); alone = f.proportional_mb()\n"
        "(r, w), (end, _) = os.pipe(), os.pipe(); child = os.fork()\n"
        "if child == 0: [m[i] for i in range(0, n, 4096)]; os.write(w, b'1'); os.read(end, 1)\n"
        "os.read(r, 1); print(alone - f.proportional_mb()); os.kill(child, 9)"
    )
    done = python("-c", code)
    assert float(done.stdout) > 0.4 * (1 << 26) / 1e6, done.stderr


def test_the_highest_sample_of_memory_is_kept():
    with figures.sampled(figures.proportional_mb) as sampled:
        held = np.ones(1 << 24)
        time.sleep(0.3)
        del held
    assert max(sampled) - sampled[0] > 100 and len(sampled) > 2
