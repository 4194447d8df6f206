"""Generates text from a byte-level model, byte by byte; every rank runs the same forward.

`python -m models.generate runs/NAME --prompt "def "` loads what models.train left there, on any number of
ranks. Each byte costs a forward over the whole window: there is no cache of keys and values here.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import numpy as np

from shardrt import nn, no_grad
from shardrt.checkpoint import load
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.train.config import SampleConfig
from shardrt.train.data import VOCABULARY
from shardrt.train.errors import USAGE, one_line

from .gpt import GPT, GPTConfig


def generate(model: nn.Module, config: SampleConfig, *, block_size: int, seed: int) -> bytes:
    """The prompt and `config.length` bytes after it, the same on every rank. Collective.

    Leaves the model in training mode. The text is a function of the weights, the settings and the seed.
    """
    random = np.random.Generator(np.random.Philox(seed))
    text = bytearray(config.prompt.encode())
    model.eval()
    with no_grad():
        for _ in range(config.length):
            window = np.frombuffer(text[-block_size:], np.uint8).astype(np.int64)
            logits = np.asarray(model(window[None]))[0, -1, :VOCABULARY]  # (1, time, vocab) -> (256,)
            text.append(draw(logits, config.temperature, config.top_k, random.random()))
    model.train()
    return bytes(text)


def draw(logits: np.ndarray, temperature: float, top_k: int, uniform: float) -> int:
    """The token that a uniform number in [0, 1) picks from softmax(logits / temperature) over the top_k."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    if temperature == 0:
        return int(order[0])
    weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / temperature)
    cumulative = np.cumsum(weights)
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


def main() -> None:
    """The command line."""
    defaults = SampleConfig()
    parser = argparse.ArgumentParser(prog="models.generate", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the directory of a run of models.train")
    parser.add_argument("--prompt", default=defaults.prompt, help="what the text begins with")
    parser.add_argument("--length", type=int, default=defaults.length, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=defaults.temperature, help="0: likeliest byte")
    parser.add_argument("--top-k", type=int, default=defaults.top_k, help="of so many bytes; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with one_line(USAGE):
        sample = SampleConfig(options.prompt, options.length, options.temperature, options.top_k)
        with open(options.run / "config.toml", "rb") as file:
            config = GPTConfig(**tomllib.load(file)["model"])
        mesh = init_device_mesh("auto")
    model = GPT(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with one_line(USAGE, mesh):
        load(options.run / "checkpoint", model)
    text = generate(model, sample, block_size=config.block_size, seed=options.seed)
    if mesh.rank == 0:
        print(text.decode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
