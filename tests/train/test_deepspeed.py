"""DeepSpeed's JSON becomes a recipe: each key is mapped, has no effect for a reason, or is refused.

deepspeed_keys.json has every key of DeepSpeed's sources (deepspeed_keys.py made it). ZERO3 has the keys of
the example in Hugging Face's documentation of the Trainer (stage 3 with offload, values "auto").
"""

import json
import random
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from models import train
from shardrt import nn
from shardrt.__main__ import main
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, no_sync
from shardrt.train import deepspeed
from shardrt.train.conversion import Unconverted
from tests.lab import jobs

KEYS = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text())["keys"]
ZERO2 = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": 2e-4,
            "warmup_num_steps": 2,
            "total_num_steps": 3,
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "wall_clock_breakdown": False,
}
OFFLOADED = {f"memory.offload_{part}": True for part in ("parameters", "gradients", "optimizer")}
BF16 = {"precision.param": "bfloat16", "precision.reduce": "bfloat16"}
ZERO3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
FILES = {
    "stage 2": (
        ZERO2,
        {
            **BF16,
            **OFFLOADED,
            "memory.update_on": "host",
            "batch_size": 8,
            "micro_batches": 2,
            "reduce_each": True,
            "report.log_interval": 1,
            "optimizer.clip_norm": 0.5,
            "optimizer.name": "adamw",
            "optimizer.lr": 2e-4,
            "optimizer.betas": (0.9, 0.99),
            "optimizer.weight_decay": 0.01,
            "optimizer.schedule": "linear",
            "optimizer.min_lr": 0.0,
            "optimizer.warmup_steps": 2,
            "steps": 3,
            "fsdp.strategy": "SHARD_GRAD_OP",
        },
    ),
    "stage 3": (
        ZERO3,
        {
            **OFFLOADED,
            "memory.update_on": "host",
            "fsdp.strategy": "FULL_SHARD",
            "optimizer.name": "adamw",
            "optimizer.schedule": "wsd",
            "optimizer.decay_steps": 1,
            "report.log_interval": 2000,
            "export": True,
        },
    ),
}


MUON = {  # the keys of DeepSpeed's example, and what they become
    "lr": 1e-3,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "muon_lr": 0.02,
    "ns_method": "gram",
}


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        (MUON, {"lr": 1e-3, "muon_lr": 0.02}),
        ({**MUON, "adam_lr": 3e-3}, {"lr": 3e-3, "muon_lr": 0.02}),
        ({**MUON, "muon_lr": None}, {"lr": 1e-3}),
        ({"momentum": 0.9, "weight_decay": 0.1}, {"lr": 3e-4, "muon_lr": 0.02}),
    ],
)
def test_both_rates_of_muon_are_taken_over(params, rates):
    found = deepspeed.convert({"optimizer": {"type": "Muon", "params": params}}, ranks=1).settings
    expected = {"name": "muon", "momentum": 0.9, "weight_decay": 0.1, "betas": (0.9, 0.95), **rates}
    expected |= {"adjust_lr_fn": "original"}
    found = {name.removeprefix("optimizer."): value for name, value in found.items() if "optimizer" in name}
    assert found == expected


def leaves(value, name=""):
    """The whole names of all leaves."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, each in value.items() for leaf in leaves(each, f"{name}.{key}" if name else key)]


def nested(flat):
    table = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return table


@pytest.fixture
def file(tmp_path):
    def write(table):
        path = tmp_path / "ds_config.json"
        path.write_text(table if isinstance(table, str) else json.dumps(table))
        return path

    return write


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_becomes_settings_or_has_a_reason(name):
    table, expected = FILES[name]
    found = deepspeed.convert(table)
    assert found.settings == expected
    assert sorted(key.name for key in found.keys) == sorted(leaves(table))
    assert all(key.settings or key.note for key in found.keys)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_trains_as_it_says(name, file, tmp_path, monkeypatch, capsys):
    folder = jobs.furnish(tmp_path)
    monkeypatch.chdir(folder)
    table, _ = FILES[name]
    assert main(["config", "convert", str(file(table)), "-o", "recipe.toml"]) == 0
    ranks = "2" if name == "stage 2" else "N"
    assert f"to train: mpirun -n {ranks} shardrt train --config recipe.toml" in capsys.readouterr().out
    shape = {"n-layer": "2", "n-head": "2", "n-embd": "16", "block-size": "16"}
    options = [word for key, value in shape.items() for word in (f"--model.{key}", value)]
    options += ["--sample.length", "4", "--report.eval-samples", "4"]
    options += (
        [] if name == "stage 2" else ["--steps", "3", "--batch-size", "4", "--optimizer.warmup-steps", "1"]
    )
    recipe = train.parse(["--config", "recipe.toml", "--data", "text.txt", "--name", "new", *options])
    thread.run(2, train.launch, recipe)
    kept = tomllib.loads((folder / "runs" / "new" / "config.toml").read_text())
    assert kept["memory"]["update_on"] == "host" and kept["steps"] == 3
    assert len(jobs.curves(folder, "new")[0]) >= 1
    assert (folder / "runs" / "new" / "pretrained" / "model.safetensors").exists() == (name == "stage 3")


def test_every_key_of_deepspeed_is_known():
    aliases = {"bfloat16", "tensor_parallel.tensor_parallel"}
    known = deepspeed.known()
    for key in KEYS:
        sections = {key.rsplit(".", each)[0] for each in range(key.count(".") + 1)}
        is_section = any(each.startswith(f"{key}.") for each in known)
        assert sections & set(known) or is_section or key in aliases, key


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_deepspeed_is_never_unknown(key):
    for value in (None, "auto", False, True, 1, 0.5, "x", [], {}, [1], {"inner": 1}):
        try:
            found = deepspeed.convert(nested({key: value}), ranks=8)
        except Unconverted as error:
            assert error.lines and (isinstance(value, dict) or "unknown key" not in str(error)), (
                value,
                error,
            )
        else:
            written = {deepspeed.whole_name(leaf) for leaf in leaves(nested({key: value}))}
            assert written <= {each.name for each in found.keys}


def test_no_leaf_of_a_random_file_is_dropped():
    generator = random.Random(39)
    values = (None, "auto", False, True, 0, 1, 2, 3, 0.5, "cpu", "none", "AdamW", "WarmupLR", [], [0.9, 0.99])
    for _ in range(300):
        chosen = generator.sample(KEYS, generator.randint(1, 30))
        chosen = [key for key in chosen if not any(other.startswith(f"{key}.") for other in chosen)]
        flat = {key: generator.choice(values) for key in chosen}
        flat |= {f"zero_optimization.new{generator.randrange(9)}": 1} if generator.random() < 0.3 else {}
        try:
            refused, accounted = [], {key.name for key in deepspeed.convert(nested(flat), ranks=8).keys}
        except Unconverted as error:
            refused = [line.partition(":")[0] for line in error.lines]
            accounted = set(refused)
            try:  # what is left when all that is refused is dropped
                names = [name for name in dict.fromkeys(refused) if name in flat]
                accounted |= {key.name for key in deepspeed.convert(nested(flat), names, ranks=8).keys}
            except Unconverted as again:
                assert all(line for line in again.lines)
                continue
        renamed = {deepspeed.whole_name(name) for name in flat}
        assert renamed <= accounted, renamed - accounted


REFUSED = {
    '{"zero_optimisation": {"stage": 2}}': [
        "zero_optimisation.stage: 2: unknown key; the nearest is zero_optimization.stage"
    ],
    '{"train_micro_batch_size_per_gpu": 2}': ["it counts each rank's samples: give --ranks N"],
    '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}': [
        "train_batch_size: 8: train_micro_batch_size_per_gpu x gradient_accumulation_steps is 3"
    ],
    '{"zero_optimization": {"stage": 4}}': ["zero_optimization.stage: 4: must be one of 0, 1, 2, 3"],
    '{"zero_optimization": true}': ["zero_optimization: True: must be a table of keys"],
    '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}': ["give --ranks N"],
    '{"zero_optimization": {"stage": 3, "zero_quantized_weights": 4}}': ["must be true or false"],
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "x.y": 1}': [
        "x.y: a key with a dot is none of DeepSpeed's"
    ],
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "a\\u001bb"}}}': [
        "must be the folder for files"
    ],
    '{"fp16": {"enabled": true, "loss_scale": 128}}': ["fp16.loss_scale: 128: the loss scale is dynamic"],
    '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}': ["fp16.enabled: True: bf16 is enabled"],
    '{"optimizer": {"type": "OneBitAdam", "params": {"lr": 1, "new": 2}}}': [
        "must be one of Adam, AdamW, Lion"
    ],
    '{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}}': ["must be one of WarmupLR"],
    '{"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}': [
        "optimizer.params.lr: fast: must be a number"
    ],
    '{"optimizer": {"type": "Adam", "params": {"betas": [2, 1]}}}': ["optimizer.betas must be two numbers"],
    '{"data_efficiency": {"enabled": true, "seed": 1}}': [
        "data_efficiency.enabled: True: samples have one order"
    ],
    '{"a": 1, "a": 2}': ["duplicate key 'a'"],
    '{"a": 1e999}': ["too large"],
    '{"a": NaN}': ["NaN is not valid JSON"],
    '{"data_types": {"grad_accum_dtype": "bf16"}}': [
        "grad_accum_dtype: bf16: gradients are added in float32"
    ],
    '{"data_types": {"grad_accum_dtype": "int8"}}': ["grad_accum_dtype: int8: must be one of"],
    '{"a": ': ["Expecting value"],
    '{"a":' * 200 + "1" + "}" * 200: ["deep"],
    "{" * 100000: ["Expecting property name"],
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_what_has_no_counterpart_is_named_and_nothing_is_written(text, file, tmp_path, capsys):
    path = file(text)
    assert main(["config", "convert", str(path), "-o", str(tmp_path / "recipe.toml")]) == jobs.DATA
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == len(REFUSED[text]), err
    for line, expected in zip(err.splitlines(), REFUSED[text], strict=True):
        assert line.startswith(f"error: {path}: ") and expected in line
    assert not (tmp_path / "recipe.toml").exists()


def test_groups_of_zeropp_and_mics_are_hybrid_shards():
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        table = {"zero_optimization": {"stage": 3, key: 8}}
        assert deepspeed.convert(table, ranks=32).settings == {
            "fsdp.strategy": "HYBRID_SHARD",
            "fsdp.copies": 4,
        }
        assert deepspeed.convert(table, ranks=8).settings == {"fsdp.strategy": "FULL_SHARD"}


def test_zeropp_is_quantised_between_hosts():
    table = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    bits = {"precision.quantized_weights": 8, "precision.quantized_gradients": 8}
    full = {"fsdp.strategy": "FULL_SHARD", **bits}
    assert deepspeed.convert({"zero_optimization": table}).settings == full
    table["zero_hpz_partition_size"] = 8  # of the weights' bits, so the optimizer's state stays sharded
    found = deepspeed.convert({"zero_optimization": table}, ranks=32).settings
    assert found == {**full, "precision.hpz_partition_size": 8}
    two = deepspeed.convert({"zero_optimization": {**table, "stage": 2}}).settings
    assert two == {"fsdp.strategy": "SHARD_GRAD_OP"}


def test_what_a_secondary_partition_costs_here_is_said():
    table = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    (note,) = [key.note for key in deepspeed.convert(table, ranks=32).keys if "hpz" in key.name]
    assert "4 times DeepSpeed's optimizer state; without the key it is FULL_SHARD" in note
    table["zero_optimization"] = {"stage": 3, "mics_shard_size": 8}
    assert not any("times" in key.note for key in deepspeed.convert(table, ranks=32).keys)


@pytest.mark.parametrize("dtype", ["fp32", "float32", None])
def test_gradients_are_added_in_float32(dtype):
    """As many bfloat16 additions of 1 would stay at 256."""
    table = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}}
    assert deepspeed.convert(table).settings["precision.reduce"] == "bfloat16"
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=init_device_mesh("auto"), mp_policy=policy)
    for part in range(300):
        with no_sync(model) if part < 299 else nullcontext():
            model(np.ones((1, 1), np.float32)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad.tolist() == [300.0]


def test_the_ranks_of_axes_do_not_multiply_the_batch():
    table = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}}
    found = deepspeed.convert(table, ranks=8)
    assert (
        found.settings == {"batch_size": 4, "parallel.tp": 4, "fsdp.strategy": "NO_SHARD"}
        and found.ranks == 8
    )


def test_ranks_are_refused_where_the_file_has_them(file, capsys):
    path = file({"distributed_type": "NO"})
    assert main(["config", "convert", str(path)]) == 0
    assert "num_processes in the file" in jobs.tool_refuses(capsys, "config", "convert", path, "--ranks", 2)
