"""Generates text from a byte-level model, byte by byte; every rank runs the same forward.

`python -m models.generate runs/NAME --prompt "def "` loads what models.train left there, on any number of
ranks. Each byte costs a forward over the whole window: there is no cache of keys and values here.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardrt import nn, no_grad
from shardrt.checkpoint import load
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.train import config as settings
from shardrt.train.data import VOCABULARY
from shardrt.train.errors import USAGE, one_line

from .gpt import GPT, GPTConfig


@dataclass(frozen=True, kw_only=True)
class Config(settings.SampleConfig):
    """Generate text from a byte-level model that models.train has left."""

    run: Path  # the directory of the run
    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")


def generate(model: nn.Module, config: settings.SampleConfig, *, block_size: int, seed: int) -> bytes:
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


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    with one_line(USAGE, kinds=(ValueError, OSError, RuntimeError)):
        config = settings.command_line(Config, arguments, program="models.generate")
        shape = settings.load(GPTConfig, config.run / "config.toml", section="model")
        mesh = init_device_mesh("auto")
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    with one_line(USAGE, mesh):
        fully_shard(model, mesh=mesh)
        load(config.run / "checkpoint", model)
    text = generate(model, config, block_size=shape.block_size, seed=config.seed)
    if mesh.rank == 0:
        print(text.decode(errors="replace"))


if __name__ == "__main__":
    main(sys.argv[1:])
