"""What `models.train` can be told of sharding, precision and memory, and what of it changes the result."""

from functools import partial

import pytest

from models.language import GPTRecipe as Config
from shardrt.train import config as settings
from shardrt.train import options
from tests.lab import jobs
from tests.lab.jobs import curves, records

pytestmark = pytest.mark.usefixtures("here")

COMMON = ("--batch-size", "8")
run = partial(jobs.run, 4, common=COMMON)
# These save memory or traffic and change no bit.
SAME = {
    "NO_SHARD": ["--fsdp.strategy", "NO_SHARD"],
    "SHARD_GRAD_OP": ["--fsdp.strategy", "SHARD_GRAD_OP", "--fsdp.prefetch", "2"],
    "larger units": ["--fsdp.blocks", "2", "--memory.recompute", "full"],
    "HYBRID_SHARD": jobs.HYBRID,
    "recomputation but for products": ["--memory.recompute", "matmul", "--memory.recompute-every", "2"],
    "all on the host": [*jobs.ON_HOST, "--memory.offload-activations", "True"],
    "updates on the host": [*jobs.ON_HOST, "--memory.update-on", "host"],
    "all in files": [*jobs.ON_HOST, "--memory.directory", "spill"],
}
# These add up in another order.
CLOSE = {
    "micro-batches": ["--micro-batches", "2"],
    "micro-batches, each reduced": ["--micro-batches", "2", "--reduce-each", "True"],
}


folder = jobs.folder_of({"plain": (4, ())}, COMMON)


def weights(folder, name):
    return curves(folder, name)[2]


def losses_and_norms(folder, name):
    """Those of all steps."""
    steps = records(folder, name, "step")
    assert len(steps) == 3
    return [step["loss"] for step in steps], [step["norm"] for step in steps]


@pytest.mark.parametrize("what", SAME)
def test_what_saves_memory_changes_no_bit(folder, what):
    (folder / "spill").mkdir(exist_ok=True)
    run(what, *SAME[what])
    assert curves(folder, what) == curves(folder, "plain")


@pytest.mark.parametrize("what", CLOSE)
def test_a_batch_in_parts_is_the_same_batch(folder, what):
    run(what, *CLOSE[what])
    jobs.assert_alike(folder, what, "plain", 1e-5)


def test_updates_in_backward_are_those_after_it(folder):
    unclipped = ["--optimizer.clip-norm", "inf"]
    run("unclipped", *unclipped)
    run("in backward", *unclipped, "--optimizer.in-backward", "True")
    assert losses_and_norms(folder, "in backward")[0] == losses_and_norms(folder, "unclipped")[0]
    assert weights(folder, "in backward") == weights(folder, "unclipped") != weights(folder, "plain")


def test_another_optimizer_keeps_its_own_state_under_its_own_schedule(folder):
    schedule = ["--optimizer.schedule", "wsd", "--optimizer.decay-steps", "2"]
    run("lion", "--optimizer.name", "lion", "--optimizer.lr", "1e-4", *schedule)
    assert weights(folder, "lion") != weights(folder, "plain")
    (ours,), (plain,) = records(folder, "lion", "run"), records(folder, "plain", "run")
    assert 2 * ours["device_bytes"]["optimizer state"] == plain["device_bytes"]["optimizer state"]


def test_both_rates_of_muon_follow_the_schedule():
    config = Config(optimizer=settings.OptimizerConfig(settings.Algorithm.muon, lr=0.005, muon_lr=0.02))
    rates = [config.optimizer.lr_at(step, config.steps) for step in (0, config.steps // 2, config.steps)]
    assert [config.optimizer.lr_of({"use_muon": False}, rate) for rate in rates] == rates
    assert [config.optimizer.lr_of({"use_muon": True}, rate) for rate in rates] == [r * 4 for r in rates]


def test_muon_goes_on_where_it_was_saved(folder):
    how = ("--optimizer.name", "muon", "--optimizer.muon-lr", "1e-2", "--checkpoint.every", "1")
    run("muon", *how)
    run("cut", *how)
    jobs.remove_after(folder / "runs" / "cut", 2)
    run("cut", *how, "--resume", "auto")
    run("at one rate", *how, "--optimizer.muon-lr", "0")
    assert curves(folder, "cut") == curves(folder, "muon") != curves(folder, "at one rate")


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_sixteen_bits_come_close(folder, kind):
    run(kind, "--precision.param", kind, "--precision.reduce", kind)
    losses, plain = losses_and_norms(folder, kind)[0], losses_and_norms(folder, "plain")[0]
    assert losses == pytest.approx(plain, rel=1e-3) and losses != plain
    assert weights(folder, kind) != weights(folder, "plain")


def test_the_norm_is_the_one_that_was_asked_for(folder):
    run("largest", "--optimizer.clip-type", "inf")
    assert 0 < losses_and_norms(folder, "largest")[1][0] < losses_and_norms(folder, "plain")[1][0]


test_what_does_not_go_together_is_told_before_anything_is_written = jobs.one_line_tests(
    ("micro_batches must be at least 1, got 0", "--micro-batches", "0"),
    ("fsdp.copies must be 1 without a hybrid strategy, got 2 with FULL_SHARD", "--fsdp.copies", "2"),
    ("fsdp.copies must be above 1 with a hybrid strategy, got 1", "--fsdp.strategy", "HYBRID_SHARD"),
    ("memory.update_on = 'host' needs offload_parameters", "--memory.update-on", "host"),
    ("'half' for argument '--memory.recompute'", "--memory.recompute", "half"),
    ("memory.recompute_every must be at least 1", "--memory.recompute-every", "0"),
    ("memory.directory needs offload_parameters, offload_gradients or", "--memory.directory", "spill"),
    ("set optimizer.clip_norm to inf", "--optimizer.in-backward", "True"),
    ("optimizer.decay_steps needs optimizer.schedule = 'wsd'", "--optimizer.decay-steps", "5"),
    ("optimizer.muon_lr falls as optimizer.lr does", "--optimizer.muon-lr", "1e-3", "--optimizer.lr", "0"),
    ("optimizer.clip_type must be positive, got 0", "--optimizer.clip-type", "0"),
    ("'float64' for argument '--precision.param'", "--precision.param", "float64"),
    ("reduce_each needs micro_batches above 1", "--reduce-each", "True"),
)


def test_every_setting_is_an_option_of_the_help_and_of_the_generated_page():
    flags = {option.flag for _, found in options.sections(Config) for option in found}
    names = list(_flat(settings.plain(Config())))
    assert len(names) > 40
    assert [name for name in names if f"--{name.replace('_', '-')}" not in flags] == []


def _flat(table, prefix=""):
    for key, value in table.items():
        yield from _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
