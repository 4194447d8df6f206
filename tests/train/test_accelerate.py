"""Accelerate's YAML becomes a recipe: each key is mapped, has no effect for a reason, or is refused.

The files have the keys of those in Accelerate's repository (examples/config_yaml_templates, examples/slurm,
examples/torch_native_parallelism, tests/test_configs), as FILES says.
"""

import json
import re
import sys
import tomllib

import pytest

from models import train
from shardrt.__main__ import main
from shardrt.comm import thread
from shardrt.train.accelerate import convert, known
from tests.lab import jobs
from tests.ranks import ROOT
from tests.train import accelerate_keys

yaml = pytest.importorskip("yaml")

FSDP1 = """
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
"""
COMMON = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
num_machines: 1
"""
HYBRID = (
    COMMON
    + """
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000000
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
"""
)
CONTEXT = HYBRID.replace("cp_size: 1", "cp_size: 8").replace("_size: 2", "_size: 1")
ANNOUNCED = """
deepspeed_config: {}
distributed_type: FSDP
fsdp_config:
  min_num_params: 2000
  offload_params: false
  sharding_strategy: 1
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""
MPI = COMMON.replace("num_machines: 1", "num_machines: 4") + (
    "distributed_type: MULTI_CPU\nmixed_precision: no\nnum_processes: 16\nmain_process_ip: 127.0.0.1\n"
    "main_process_port: 29500\nmpirun_config:\n  mpirun_hostfile: hosts\n"
)
NODES = (
    "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: 5\n"
)
ZERO3 = (
    COMMON
    + """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 2
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_optimizer_nvme_path: none
  offload_param_device: nvme
  offload_param_nvme_path: spill
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_multinode_launcher: standard
  deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock
"""
)
RECOMPUTED = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_activation_checkpointing_offload: true
"""
BF16 = {"precision.param": "bfloat16", "precision.reduce": "bfloat16"}
FLOAT32 = {"precision.param": "float32", "precision.reduce": "float32"}
OFFLOADED = {f"memory.offload_{part}": True for part in ("parameters", "gradients", "optimizer")}
FILES = {
    "config_yaml_templates/fsdp.yaml": (
        FSDP1,
        {
            **BF16,
            **OFFLOADED,
            "memory.update_on": "host",
            "memory.recompute": "full",
            "fsdp.blocks": 1,
            "fsdp.prefetch": 1,
            "fsdp.strategy": "SHARD_GRAD_OP",
            "architecture": "gpt",
            "export": True,
        },
    ),
    "configs/tp_hsdp.yaml": (
        HYBRID,
        {
            **BF16,
            "memory.recompute": "none",
            "fsdp.blocks": 1,
            "fsdp.strategy": "HYBRID_SHARD",
            "fsdp.copies": 2,
            "parallel.tp": 2,
        },
    ),
    "configs/cp.yaml": (
        CONTEXT,
        {
            **BF16,
            "memory.recompute": "none",
            "fsdp.blocks": 1,
            "fsdp.strategy": "FULL_SHARD",
            "parallel.cp": 8,
        },
    ),
    "the announcement of FSDP": (ANNOUNCED, {**FLOAT32, "fsdp.strategy": "FULL_SHARD"}),
    "test_configs/0_28_0_mpi.yaml": (MPI, {**FLOAT32, "fsdp.strategy": "NO_SHARD"}),
    "config_yaml_templates/deepspeed.yaml": (
        ZERO3,
        {
            **BF16,
            **OFFLOADED,
            "memory.update_on": "host",
            "memory.directory": "spill",
            "fsdp.strategy": "FULL_SHARD",
            "micro_batches": 4,
            "reduce_each": True,
            "optimizer.clip_norm": 1.0,
            "export": True,
        },
    ),
    "activations on the host": (
        RECOMPUTED,
        {
            "fsdp.strategy": "FULL_SHARD",
            "memory.recompute": "full",
            "memory.offload_activations": True,
        },
    ),
    "hybrid over nodes": (NODES, {"fsdp.strategy": "HYBRID_SHARD_GRAD_OP", "fsdp.copies": 2}),
}


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "accelerate.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_becomes_settings_or_has_a_reason(name):
    text, expected = FILES[name]
    table = yaml.safe_load(text)
    found = convert(table)
    assert found.settings == expected
    keys = sum(len(value) or 1 if isinstance(value, dict) else 1 for value in table.values())
    assert len({key.name for key in found.keys if "default" not in key.note}) == keys
    assert all(key.settings or key.note for key in found.keys)


@pytest.mark.parametrize("name", FILES)
def test_the_training_command_takes_the_recipe(name, file, tmp_path):
    text, _ = FILES[name]
    recipe = tmp_path / "recipe.toml"
    assert main(["config", "convert", str(file(text)), "-o", str(recipe)]) == 0
    settings = tomllib.loads(recipe.read_text())
    parsed = train.parse(["--config", str(recipe), "--model.n-layer", "1"])
    assert parsed.fsdp.strategy.name == settings["fsdp"]["strategy"]
    ranks = yaml.safe_load(text).get("num_processes")
    assert not ranks or parsed.axes(ranks)


def test_a_recipe_trains_as_it_says(file, tmp_path, monkeypatch, capsys):
    folder = jobs.furnish(tmp_path)
    monkeypatch.chdir(folder)
    assert main(["config", "convert", str(file(FSDP1)), "-o", "recipe.toml"]) == 0
    printed = capsys.readouterr().out
    assert "to train: mpirun -n 2 shardrt train --config recipe.toml" in printed
    shape = [
        "--model.n-layer",
        "2",
        "--model.n-head",
        "2",
        "--model.n-embd",
        "16",
        "--model.block-size",
        "16",
    ]
    small = ["--steps", "3", "--batch-size", "4", "--sample.length", "4", "--report.eval-samples", "4"]
    recipe = train.parse(["--config", "recipe.toml", "--data", "text.txt", "--name", "new", *shape, *small])
    thread.run(2, train.launch, recipe)
    kept = tomllib.loads((folder / "runs" / "new" / "config.toml").read_text())
    assert kept["memory"]["update_on"] == "host" and kept["precision"]["param"] == "bfloat16"
    assert len(jobs.curves(folder, "new")[0]) >= 1
    assert (folder / "runs" / "new" / "pretrained" / "model.safetensors").exists()


DDP = "distributed_type: MULTI_GPU\n"
FSDP = "distributed_type: FSDP\nfsdp_config:\n"
REFUSED = {
    "invalid_key: x\nother: [1]\n" + DDP: ["invalid_key: x: unknown key", "other: list: unknown key"],
    "distributed_type: MEGATRON_LM\nzzz: 1\n": [
        "distributed_type: MEGATRON_LM: Megatron-LM's settings are not read"
    ],
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n": [
        "deepspeed_config.deepspeed_config_file: ds.json: convert this file itself"
    ],
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 4\n": [
        "deepspeed_config.zero_stage: 4: must be one of 0, 1, 2, 3"
    ],
    "distributed_type: MULTI_XPU\n": ["distributed_type: MULTI_XPU: it is for other processors"],
    "num_processes: 2\n": ["distributed_type: None: it must be there, as for Accelerate"],
    DDP + "mixed_precision: fp8\n": ["mixed_precision: fp8: in a loop of your own"],
    DDP + "mixed_precision: half\n": ["mixed_precision: half: must be one of no, fp32, fp16, bf16"],
    DDP + "num_processes: 0\n": ["num_processes: 0: must be an integer of at least 1"],
    DDP + "num_processes: true\n": ["num_processes: True: must be an integer of at least 1"],
    DDP + "tpu_name: mine\n": ["tpu_name: mine: it is for TPUs"],
    "compute_environment: AMAZON_SAGEMAKER\n" + DDP: ["compute_environment: AMAZON_SAGEMAKER: start"],
    FSDP + "  fsdp_ignored_modules: head\n": [
        "fsdp_config.fsdp_ignored_modules: head: in a loop of your own"
    ],
    FSDP + "  fsdp_transformer_layer_cls_to_wrap: BertLayer\n": ["wrap: BertLayer: the training command has"],
    FSDP + "  fsdp_transformer_layer_cls_to_wrap: [GPT2Block]\n": ["wrap: list: must be a text"],
    FSDP + "  fsdp_offload_params: maybe\n": [
        "fsdp_config.fsdp_offload_params: maybe: must be true or false"
    ],
    FSDP + "  fsdp_version: 3\n": ["fsdp_config.fsdp_version: 3: must be one of 1, 2"],
    FSDP + "  fsdp_offload_params: true\n  offload_params: true\n": [
        "fsdp_offload_params: it stands there twice"
    ],
    FSDP + "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: NO_SHARD\n": [
        "fsdp_config.fsdp_reshard_after_forward: NO_SHARD: fsdp_sharding_strategy is FULL_SHARD"
    ],
    FSDP + "  fsdp_new: 1\n": ["fsdp_config.fsdp_new: 1: unknown key"],
    "fsdp_config: 3\ndistributed_type: FSDP\n": ["fsdp_config: 3: must be a table of keys"],
    HYBRID.replace("num_processes: 8", "num_processes: 6"): ["8 ranks, num_processes is 6", "rank"],
    HYBRID + "  fsdp_min_params: 1\n": ["fsdp_min_params: 1: unknown key"],
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_counterpart_is_named_and_nothing_is_written(text, file, tmp_path, capsys):
    path = file(text)
    assert main(["config", "convert", str(path), "-o", str(tmp_path / "recipe.toml")]) == jobs.DATA
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and len(lines) == len(REFUSED[text]), err
    for line, expected in zip(lines, REFUSED[text], strict=True):
        assert line.startswith(f"error: {path}: ") and expected in line
    assert not (tmp_path / "recipe.toml").exists()


def test_a_refused_key_can_be_dropped_by_name(file, capsys):
    path = str(file(DDP + "invalid_key: x\n"))
    assert main(["config", "convert", path, "--drop", "invalid_key"]) == 0
    assert re.search(r"invalid_key = x +dropped", capsys.readouterr().out)
    assert main(["config", "convert", path, "--drop", "invalid"]) == jobs.DATA
    assert "--drop invalid: there is no such key" in capsys.readouterr().err


BAD = {
    "a: [1\n": "while parsing a flow sequence",
    "a: 1\na: 2\n": "the key 'a' stands there twice",
    "a: &x [1]\nb: *x\n": "references are not read, line 2",
    "a: !!python/object/apply:os.system ['true']\n": "could not determine a constructor",
    "- 1\n": "it must be a table of keys and values",
    "1: 2\n": "it must be a table of keys and values",
    "": "it must be a table of keys and values",
    "[" * 5000: "nested too deeply",
    "a: 1\n---\nb: 1\n": "expected a single document",
    "a: \x00\n": "special characters are not allowed",
    f"a: {'9' * 5000}\n": "Exceeds the limit",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:12])
def test_bad_yaml_is_one_line(text, file, capsys):
    line = jobs.tool_refuses(capsys, "config", "convert", file(text))
    assert BAD[text] in line


def test_files_that_are_not_there_or_too_large_are_one_line(file, tmp_path, capsys):
    jobs.tool_refuses(capsys, "config", "convert", tmp_path / "none.yaml")
    assert "the limit is" in jobs.tool_refuses(capsys, "config", "convert", file("#" * (1 << 21)))
    (tmp_path / "there.toml").write_text("kept")
    words = ("config", "convert", file(DDP), "-o", tmp_path / "there.toml")
    assert "is there already" in jobs.tool_refuses(capsys, *words)
    assert (tmp_path / "there.toml").read_text() == "kept"


def test_without_pyyaml_a_line_says_what_to_install(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'shardrt[yaml]'" in jobs.tool_refuses(capsys, "config", "convert", file(DDP))


SHOWN = {"yaml": "accelerate.yaml -o recipe.toml", "json": "ds_config.json -o zero2.toml"}


@pytest.mark.parametrize("kind", SHOWN)
def test_the_page_shows_a_file_and_what_the_command_prints_for_it(kind, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "howto" / "from_accelerate.md").read_text()
    text, shown = re.search(
        rf"^```{kind}\n(.*?)^```.*?^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    ).groups()
    monkeypatch.chdir(tmp_path)
    (tmp_path / SHOWN[kind].split()[0]).write_text(text)
    assert main(f"config convert {SHOWN[kind]}".split()) == 0
    assert capsys.readouterr().out == shown


KEYS = json.loads((ROOT / "tests" / "train" / "accelerate_keys.json").read_text())
# Fields of plugins -> keys of the file by another name.
NAMED = {
    "cpu_offload": "fsdp_offload_params",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "hf_ds_config": "deepspeed_config_file",
    "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names",
}


def lists():
    """The kept keys, and those of the installed package."""
    package = accelerate_keys.installed()
    return {"kept": KEYS} | ({"installed": accelerate_keys.keys(package)} if package else {})


@pytest.mark.parametrize("which", lists())
def test_every_key_of_accelerate_is_known(which):
    found = {name.replace(".parallelism_config_", ".") for name in lists()[which]["file"]}
    sections = {name.partition(".")[0] for name in known() if "." in name}
    assert len(found) > 70 and found - {*known(), *sections} == {"fp8_config", "megatron_lm_config"}
    for name in sorted(found - {*known(), *sections}):
        converted = convert({"distributed_type": "FSDP", "num_processes": 2, name: {"a": 1}})
        assert "alone" in next(key.note for key in converted.keys if key.name == f"{name}.a")


@pytest.mark.parametrize("which", lists())
@pytest.mark.parametrize("plugin", ["FullyShardedDataParallelPlugin", "DeepSpeedPlugin"])
def test_every_field_of_a_plugin_is_a_key_or_on_the_page(which, plugin):
    page = (ROOT / "docs" / "howto" / "from_accelerate.md").read_text()
    ours = {name.rpartition(".")[2] for name in known()}
    fields = lists()[which][plugin]
    assert len(fields) > 10
    for name in fields:
        by_name = {name, f"fsdp_{name}", NAMED.get(name)}
        assert ours & by_name or f"`{name}`" in page, name
