"""What `models.train` can be told of sharding, precision and memory, and what of it changes the result."""

import pytest
from safetensors.numpy import load_file

from models import train
from models.language import GPTRecipe as Config
from shardrt.comm import thread
from shardrt.train import config as settings
from shardrt.train import job as jobs
from shardrt.train.errors import USAGE, one_line
from tests.ranks import ROOT
from tests.train.test_command import arguments, furnish, records

RANKS = 4
ALL_ON_HOST = [
    *("--memory.offload-parameters", "True"),
    *("--memory.offload-gradients", "True"),
    *("--memory.offload-optimizer", "True"),
]
# These save memory or traffic and change no bit.
SAME = {
    "NO_SHARD": ["--fsdp.strategy", "NO_SHARD"],
    "SHARD_OPT": ["--fsdp.strategy", "SHARD_OPT"],
    "SHARD_GRAD_OP": ["--fsdp.strategy", "SHARD_GRAD_OP", "--fsdp.prefetch", "2"],
    "larger units": ["--fsdp.blocks", "2", "--memory.recompute", "full"],
    "HYBRID_SHARD": ["--fsdp.strategy", "HYBRID_SHARD", "--fsdp.copies", "2"],
    "recomputation": ["--memory.recompute", "full", "--memory.recompute-every", "2"],
    "recomputation but for products": ["--memory.recompute", "matmul"],
    "activations on the host": ["--memory.offload-activations", "True"],
    "optimizer's state on the host": ["--memory.offload-optimizer", "True"],
    "all on the host": ALL_ON_HOST,
    "updates on the host": [*ALL_ON_HOST, "--memory.update-on", "host"],
    "all in files": [*ALL_ON_HOST, "--memory.directory", "spill"],
}
# These add up in another order.
CLOSE = {
    "micro-batches": ["--micro-batches", "2"],
    "micro-batches, each reduced": ["--micro-batches", "2", "--reduce-each", "True"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the plain run in it, which the others are compared with."""
    folder = furnish(tmp_path_factory.mktemp("options"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("plain")
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def run(name, *options):
    """Train the tiny model on RANKS ranks."""
    with one_line(USAGE):  # as train.main has it; the parser's library is not for several threads
        args = arguments("--batch-size", "8", "--name", name, *options)
        config = train.parse(args)
    thread.run(RANKS, jobs.launch, config)


def curve(folder, name):
    """(losses, norms) of a run."""
    steps = records(folder, name, "step")
    assert len(steps) == 3
    return [step["loss"] for step in steps], [step["norm"] for step in steps]


def weights(folder, name):
    arrays = load_file(folder / "runs" / name / "checkpoint" / "model.safetensors")
    return {key: values.tobytes() for key, values in arrays.items()}


@pytest.mark.parametrize("what", SAME)
def test_what_saves_memory_changes_no_bit(folder, what):
    (folder / "spill").mkdir(exist_ok=True)
    run(what, *SAME[what])
    assert curve(folder, what) == curve(folder, "plain")
    assert weights(folder, what) == weights(folder, "plain")


@pytest.mark.parametrize("what", CLOSE)
def test_a_batch_in_parts_is_the_same_batch(folder, what):
    run(what, *CLOSE[what])
    for ours, plain in zip(curve(folder, what), curve(folder, "plain"), strict=True):
        assert ours == pytest.approx(plain, rel=1e-5)


def test_updates_in_backward_are_those_after_it(folder):
    unclipped = ["--optimizer.clip-norm", "inf"]
    run("unclipped", *unclipped)
    run("in backward", *unclipped, "--optimizer.in-backward", "True")
    assert curve(folder, "in backward")[0] == curve(folder, "unclipped")[0]
    assert weights(folder, "in backward") == weights(folder, "unclipped") != weights(folder, "plain")


def test_another_optimizer_keeps_its_own_state_under_its_own_schedule(folder):
    schedule = ["--optimizer.schedule", "wsd", "--optimizer.decay-steps", "2"]
    run("lion", "--optimizer.name", "lion", "--optimizer.lr", "1e-4", *schedule)
    assert weights(folder, "lion") != weights(folder, "plain")
    (ours,), (plain,) = records(folder, "lion", "run"), records(folder, "plain", "run")
    assert 2 * ours["device_bytes"]["optimizer state"] == plain["device_bytes"]["optimizer state"]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_sixteen_bits_come_close(folder, kind):
    run(kind, "--precision.param", kind, "--precision.reduce", kind)
    losses, plain = curve(folder, kind)[0], curve(folder, "plain")[0]
    assert losses == pytest.approx(plain, rel=1e-3) and losses != plain
    assert weights(folder, kind) != weights(folder, "plain")


def test_the_norm_is_the_one_that_was_asked_for(folder):
    run("largest", "--optimizer.clip-type", "inf")
    assert 0 < curve(folder, "largest")[1][0] < curve(folder, "plain")[1][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--micro-batches", "0"], "micro_batches must be at least 1, got 0"),
        (["--fsdp.copies", "2"], "fsdp.copies must be 1 without a hybrid strategy, got 2 with FULL_SHARD"),
        (["--fsdp.strategy", "HYBRID_SHARD"], "fsdp.copies must be above 1 with a hybrid strategy, got 1"),
        (["--memory.update-on", "host"], "memory.update_on = 'host' needs offload_parameters"),
        (["--memory.recompute", "half"], "'half' for argument '--memory.recompute'"),
        (["--memory.recompute-every", "0"], "memory.recompute_every must be at least 1"),
        (["--memory.directory", "spill"], "memory.directory needs offload_parameters, offload_gradients or"),
        (["--optimizer.in-backward", "True"], "set optimizer.clip_norm to inf"),
        (["--optimizer.decay-steps", "5"], "optimizer.decay_steps needs optimizer.schedule = 'wsd'"),
        (["--optimizer.clip-type", "0"], "optimizer.clip_type must be positive, got 0"),
        (["--precision.param", "float64"], "'float64' for argument '--precision.param'"),
        (["--reduce-each", "True"], "reduce_each needs micro_batches above 1"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_is_written(folder, options, message, capfd):
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run("refused", *options)
    assert stop.value.code == USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert sorted(folder.rglob("*")) == before


def test_every_option_is_described_in_the_documents():
    described = (ROOT / "docs" / "training.md").read_text()
    options = list(_flat(settings.plain(Config())))
    assert len(options) > 40
    assert [option for option in options if f"`{option}`" not in described] == []


def _flat(table, prefix=""):
    for key, value in table.items():
        yield from _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
