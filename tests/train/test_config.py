"""Settings: from the file, then from the command line; what is unknown or wrong is named."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from models import gpt, llama, train, vit
from models.gpt import GPT, GPTConfig
from models.language import GPTRecipe as Config
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.train import config as settings
from shardrt.train.tokens import write as write_tokens
from tests.ranks import ROOT, clean_environment, python

CONFIGS = sorted((Path(train.__file__).parent / "configs").glob("*.toml"))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "settings.toml"


def parse(*arguments):
    return train.parse(arguments)


def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(file):
    file.write_text("steps = 7\nseed = 3\n[optimizer]\nlr = 0.5\nmin_lr = 0.25\n")
    config = parse("--config", str(file), "--seed", "4", "--optimizer.lr", "0.125")
    assert (config.steps, config.seed) == (7, 4)
    assert (config.optimizer.lr, config.optimizer.min_lr) == (0.125, 0.25)
    assert config.batch_size == Config.batch_size


def test_runs_with_the_same_bits_on_all_ranks_have_sums_by_the_tree():
    assert parse().reduction == "nccl" and parse("--fsdp.reduction", "tree").reduction == "tree"
    assert parse("--deterministic", "world-invariant", "--micro-batches", "4").reduction == "tree"


def test_without_a_file_the_settings_are_those_of_the_default_one():
    assert parse() == settings.load(train.LlamaRecipe, train.DEFAULT)


def test_the_last_of_two_files_is_taken(file, tmp_path):
    file.write_text("steps = 7\n")
    other = tmp_path / "other.toml"
    other.write_text("steps = 8\n")
    assert parse("--config", str(file), f"--config={other}").steps == 8


def test_the_command_line_takes_lists_names_and_truth_values():
    config = parse(
        *("--data", "a.txt", "b.txt", "--optimizer.betas", "0.8", "0.9"),
        *("--fsdp.strategy", "SHARD_GRAD_OP", "--model.tied", "False"),
    )
    assert config.data == (Path("a.txt"), Path("b.txt"))
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.fsdp.strategy is ShardingStrategy.SHARD_GRAD_OP
    assert config.model.tied is False


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_that_come_along_load(path):
    train.load(path)


def test_what_is_dumped_loads_as_it_was(file):
    config = Config(
        name='a "name"',
        data=(Path("x y.txt"), Path("/z")),
        seed=2**63 - 1,
        model=GPTConfig(n_layer=2, dropout=0.5, bias=False),
        optimizer=settings.OptimizerConfig(lr=1e-30, clip_norm=float("inf"), betas=(0.0, 0.5)),
        fsdp=settings.FSDPConfig(strategy=ShardingStrategy.SHARD_GRAD_OP, prefetch=0),
        sample=settings.SampleConfig(prompt="é\n\t\\"),
    )
    settings.dump(config, file)
    assert settings.load(Config, file) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 3", "unknown key 'stepps'; known: architecture, size, name, data,"),
        ("[fsdp]\nstrat = 1", "unknown key 'fsdp.strat'; known: strategy, blocks, prefetch"),
        ("steps = 'a'", "steps must be int, got 'a'"),
        ("steps = true", "steps must be int, got True"),
        ("data = 'a.txt'", "data must be tuple"),
        ("optimizer = 3", "optimizer must be OptimizerConfig, got 3"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas must be"),
        ("[optimizer]\nlr = -1", "optimizer.lr must be at least 0, got -1"),
        ("[optimizer]\nlr = nan", "optimizer.lr must be at least 0, got nan"),
        (
            "[fsdp]\nstrategy = 'HALF'",
            "fsdp.strategy must be one of NO_SHARD, SHARD_OPT, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD, "
            "HYBRID_SHARD_GRAD_OP, got 'HALF'",
        ),
        ("[model]\nn_embd = 10\nn_head = 3", "n_embd must be a multiple of n_head, got 10 and 3"),
        ("[model]\nvocab_size = 255", "model.vocab_size must be at least 256 for bytes, got 255"),
        ("[fsdp", "Expected ']'"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_the_file_and_the_key(file, text, message):
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        settings.load(Config, file)
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepps", "3"], "--stepps"),
        (["--steps", "a"], "--steps: "),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--seed", str(2**64)], "seed must be at least 0 and below 2^64"),
        (["--config"], "--config"),
        (["--fsdp.strategy", "HALF"], "'HALF' for argument '--fsdp.strategy'"),
        (["--fsdp.prefetch", "-1"], "fsdp.prefetch must be at least 0, got -1"),
        (["--model.n-embd", "10", "--model.n-head", "3"], "model: n_embd must be an even multiple of n_head"),
        (["--optimizer.betas", "0.9", "1"], "optimizer.betas must be two numbers in [0, 1)"),
        (["--optimizer.clip-norm", "0"], "optimizer.clip_norm must be positive, got 0"),
        (["--report.log-interval", "0"], "report.log_interval must be at least 1, got 0"),
        (["--sample.prompt", ""], "sample.prompt must hold at least one byte"),
        (
            ["--architecture", "vit", "--images.smoothing", "1"],
            "images.smoothing must be in [0, 1), got 1",
        ),
    ],
)
def test_what_is_wrong_on_the_command_line_is_told_with_the_option(arguments, message, capfd):
    with pytest.raises(ValueError) as error:
        parse(*arguments)
    assert message in str(error.value)
    assert "settings" not in str(error.value), "a name that the user never gave"
    assert capfd.readouterr() == ("", ""), "the one who catches the error speaks"


def test_the_rate_warms_up_and_comes_down():
    config = settings.OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [config.lr_at(step, 20) for step in range(20)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.02)


def test_the_rate_comes_down_as_the_schedule_says():
    settled = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4}
    line = settings.OptimizerConfig(schedule=settings.Schedule.linear, **settled)
    assert [line.lr_at(step, 14) for step in (4, 9, 14)] == pytest.approx([1.0, 0.55, 0.1])
    stable = settings.OptimizerConfig(schedule=settings.Schedule.wsd, **settled)
    assert [stable.lr_at(step, 40) for step in (4, 36, 38, 40)] == pytest.approx([1.0, 1.0, 0.55, 0.1])
    assert replace(stable, decay_steps=20).lr_at(30, 40) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("arguments", "architecture", "shape"),
    [
        (["--size", "gpt2"], "gpt", gpt.SIZES["gpt2"]),
        (["--size=gpt2-medium", "--model.n_layer", "2"], "gpt", replace(gpt.SIZES["gpt2-medium"], n_layer=2)),
        (["--size", "llama-100m"], "llama", llama.SIZES["llama-100m"]),
        (["--size", "vit-s16"], "vit", vit.SIZES["vit-s16"]),
        (["--architecture", "gpt", "--size", "gpt2"], "gpt", gpt.SIZES["gpt2"]),
    ],
)
def test_a_size_on_the_command_line_is_that_model_and_no_other_files(arguments, architecture, shape):
    recipe = parse(*arguments)
    assert (recipe.ARCHITECTURE, recipe.model) == (architecture, shape)
    assert recipe.optimizer == settings.OptimizerConfig(), "the default file's are for its small model"


def test_a_size_that_is_not_known_is_not_a_files_mistake(file):
    file.write_text("steps = 3\n")
    for more in ([], ["--config", str(file)]):
        with pytest.raises(ValueError, match="^size must be one of gpt2, .*, got 'gpt3'$"):
            parse("--size", "gpt3", *more)


def test_the_vocabulary_is_that_of_the_data_unless_it_is_given(file, tmp_path):
    file.write_text("steps = 3\n[model]\nn_layer = 2\nn_head = 2\nn_embd = 64\n")
    own, data = ["--config", str(file)], tmp_path / "some.tokens"
    write_tokens(data, [b"a"], lambda _: [1, 299] * 500, vocabulary=301, tokenizer="none")
    assert parse(*own).model.vocab_size == 256, "of bytes"
    assert parse(*own, "--data", str(data)).model.vocab_size == 301
    assert parse(*own, "--data", str(data), "--model.vocab-size", "512").model.vocab_size == 512
    assert parse("--architecture", "llama", "--data", str(data)).model.vocab_size == 301
    assert parse("--size", "gpt2", "--data", str(data)).model.vocab_size == 50257
    recipe = train.load(file)
    assert recipe.network().config.vocab_size == 256
    assert sum(p.size for p in recipe.network().parameters()) < 300_000
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        GPT(GPTConfig(vocab_size=0))


def test_what_a_files_section_leaves_out_is_as_on_the_command_line(file):
    file.write_text('architecture = "vit"\n[model]\nn_layer = 7\n')
    assert parse("--config", str(file)).model == parse("--architecture", "vit", "--model.n-layer", "7").model


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("steps", 10**12),
        ("batch_size", 2**63),
        ("threads", 10**12),
        ("ahead", 10**12),
        ("sample.length", 10**12),
        ("model.n_layer", 2**63),
        ("optimizer.warmup_steps", 10**400),
    ],
)
def test_numbers_that_nobody_means_are_one_line_from_both(file, name, number):
    section, _, key = name.rpartition(".")
    file.write_text((f"[{section}]\n" if section else "") + f"{key} = {number}\n")
    for arguments in (["--config", str(file)], [f"--{name}", str(number)]):
        with pytest.raises(ValueError, match=rf"{name} must be at most \d+, got {number}$"):
            parse(*arguments)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("optimizer.weight_decay", ["1e39", "1e300", "inf", "nan"]),
        ("optimizer.lr", ["1e39", "inf", "nan"]),
        ("optimizer.clip_type", ["1e-320", "1e-46", "1e39", "nan"]),
        ("optimizer.clip_norm", ["nan", "-inf"]),
        ("watchdog.limit", ["1e12", "1e300", "inf", "nan"]),
        ("checkpoint.stop_after", ["1e12", "inf"]),
        ("sample.temperature", ["1e39", "nan"]),
        ("model.init_std", ["inf", "nan"]),
    ],
)
def test_fractions_without_sense_are_one_line(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name.rpartition('.')[2]} must be "):
            parse(f"--{name}={value}")


def test_switches_stand_alone_or_with_a_word_and_names_have_hyphens_or_underscores():
    for words in (["--export"], ["--export", "True"], ["--export=true"], ["--export", "--seed", "3"]):
        assert parse(*words).export is True
    assert parse("--export", "False").export is False
    assert parse("--text.separate_documents", "--data", "a").text.separate_documents is True
    assert parse("--text.separate-documents").text.separate_documents is True
    with pytest.raises(ValueError, match="--export: must be True or False, got 'perhaps'"):
        parse("--export", "perhaps")


def test_help_shows_defaults_where_there_are_some(capfd):
    with pytest.raises(SystemExit):
        parse("--help")
    out = " ".join(capfd.readouterr().out.split())
    assert "(default: )" not in out and "(default: .)" not in out and "None" not in out
    assert "updates of the weights (default: 1120)" in out
    assert "decay of AdamW's two moments; Lion's two (default: 0.9 0.95)" in out
    assert "micro_batches are those of all ranks together." in out, "the comment above a field"


def test_nothing_is_said_to_one_who_reads_only_the_beginning_of_the_help():
    command = f"{sys.executable} -m models.train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=clean_environment()
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: models.train")


def test_errors_are_told_in_every_encoding_and_at_every_width():
    how = {"PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    done = python("-m", "models.train", "--optimizer.lr", -1, **how)
    assert (done.returncode, done.stderr) == (2, "error: optimizer.lr must be at least 0, got -1.0\n")


def test_a_peak_that_is_never_reached_is_reported():
    assert parse("--optimizer.warmup-steps", "40", "--steps", "40").warnings() == []
    (message,) = parse("--steps", "40").warnings()
    assert "optimizer.warmup_steps is 60, of 40 steps" in message
