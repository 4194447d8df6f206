"""Settings from TOML, then from the command line; what is wrong is named."""

import pytest

from models.train import DEFAULT, Config
from shardrt.fsdp import ShardingStrategy
from shardrt.train import config as settings


def parse(*arguments):
    return settings.parse(Config, arguments, default=DEFAULT, program="models.train")


def test_the_command_line_goes_over_the_file(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("steps = 7\n[optimizer]\nlr = 0.5\n[model]\nn_layer = 2\nn_head = 2\nn_embd = 8\n")
    config = parse("--config", str(file), "--optimizer.lr", "0.25", "--fsdp.strategy", "SHARD_GRAD_OP")
    assert (config.steps, config.optimizer.lr, config.model.n_layer) == (7, 0.25, 2)
    assert config.fsdp.strategy is ShardingStrategy.SHARD_GRAD_OP


def test_what_is_written_is_what_was_read(tmp_path):
    config = parse("--steps", "3", "--data", "a", "b")
    settings.dump(config, tmp_path / "config.toml")
    assert settings.load(Config, tmp_path / "config.toml") == config


@pytest.mark.parametrize("name", ["default", "gpt-small", "gpt2"])
def test_the_configurations_that_come_along_are_valid(name):
    settings.load(Config, DEFAULT.with_name(f"{name}.toml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optimizer]\nlrr = 1\n", "unknown key 'optimizer.lrr'"),
        ("steps = 'many'\n", "steps must be int"),
        ("[fsdp]\nstrategy = 'FULL'\n", "fsdp.strategy must be one of FULL_SHARD, SHARD_GRAD_OP"),
        ("[model]\nn_embd = 10\nn_head = 3\n", "n_embd must be a multiple of n_head"),
        ("steps = \n", "Invalid value"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, said):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"wrong.toml: .*{said}"):
        parse("--config", str(file))
