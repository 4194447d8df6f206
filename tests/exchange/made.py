"""Small checkpoints of a Llama with AdamW state, made without training."""

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


assert FORMATS["llama"].holds(CONFIG)
