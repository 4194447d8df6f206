"""Small checkpoints of a Llama with AdamW state, made without training."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from models import llama
from models.formats import FORMATS
from shardrt.exchange.checkpoint import FIRST_MOMENT, PARAMETER, SECOND_MOMENT, Checkpoint, Training
from shardrt.exchange.formats import Options, own
from shardrt.exchange.output import Output

CONFIG = llama.LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, vocab_size=64, block_size=16
)
OPTIMIZER = {
    "name": "adamw", "schedule": "cosine", "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2,
    "weight_decay": 0.1, "betas": [0.9, 0.95],
}  # fmt: skip
RECIPE = {"architecture": "llama", "steps": 10, "optimizer": OPTIMIZER, "model": asdict(CONFIG)}


class Held:
    """A tensor in memory."""

    def __init__(self, values):
        self.values, self.dtype, self.shape = values.reshape(-1), values.dtype, values.shape

    def read_into(self, out, start):
        out[...] = self.values[start : start + out.size]


def whole(tensor):
    """All values of a tensor."""
    out = np.empty(int(np.prod(tensor.shape)), tensor.dtype)
    tensor.read_into(out, 0)
    return out.reshape(tensor.shape)


def checkpoint(config=CONFIG, step=7, seed=0):
    """A checkpoint in memory, with shardrt's names."""
    random, tensors = np.random.default_rng(seed), {}
    for name, parameter in llama.Llama(config).named_parameters():
        for kind in (PARAMETER, FIRST_MOMENT, SECOND_MOMENT):
            values = random.normal(size=parameter.whole_shape).astype(np.float32)
            tensors[kind, name] = Held(np.square(values) if kind == SECOND_MOMENT else values)
    names = {name for _, name in tensors}
    training = Training(step, dict.fromkeys(names, step), extra={"config": RECIPE, "scaler": {}})
    return Checkpoint(Path("memory"), tensors, training)


def write(made, target, ranks=2):
    """A checkpoint of shardrt's in a folder, written; gives the folder."""
    plan = own.files(made, Options(target, ranks))
    Output(plan.target, {}).write(plan.files)
    return plan.target


def adapter(target, config=CONFIG, rank=2, layers=("self_attn.q_proj", "mlp.down_proj"), more=(), **said):
    """A folder of PEFT's with an adapter of some layers; gives the folder.

    more: names of further tensors. said: further settings.
    """
    from safetensors.numpy import save_file

    random, tensors = np.random.default_rng(1), {}
    for layer, number in ((layer, n) for layer in layers for n in range(config.n_layer)):
        inputs = config.n_hidden if "down" in layer else config.n_embd
        for letter, shape in (("A", (rank, inputs)), ("B", (config.n_embd, rank))):
            name = f"base_model.model.model.layers.{number}.{layer}.lora_{letter}.weight"
            tensors[name] = random.normal(size=shape).astype(np.float32)
    tensors |= {f"base_model.model.{name}": np.ones((2, 4), np.float32) for name in more}
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none"}
    settings |= said
    names = [layer.rpartition(".")[2] for layer in layers]
    (target / "adapter_config.json").write_text(json.dumps({"target_modules": names, **settings}))
    return target


assert FORMATS["llama"].holds(CONFIG)
