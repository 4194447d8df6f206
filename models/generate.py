"""Generates tokens one after the other; every rank runs the same forward.

`python -m models.generate runs/NAME --prompt "def "` loads what models.train left there, on any number of
ranks. Keys and values of what was read are kept, so a token costs one row; beyond the model's block_size the
window moves, every position with it, and each token costs a forward over the whole window.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardrt import device, nn, no_grad
from shardrt.checkpoint import load
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.train import config as settings
from shardrt.train.data import VOCABULARY
from shardrt.train.errors import USAGE, one_line

from .cache import KVCache
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

    def choose(logits: np.ndarray) -> list[int]:
        return [draw(logits[0, :VOCABULARY], config.temperature, config.top_k, random.random())]

    prompt = np.frombuffer(config.prompt.encode(), np.uint8).astype(np.int64)
    model.eval()
    made = continued(model, prompt[None], config.length, choose, block_size=block_size)
    model.train()
    return config.prompt.encode() + made.astype(np.uint8).tobytes()


def continued(
    model: nn.Module,
    tokens: np.ndarray,
    count: int,
    choose: Callable[[np.ndarray], Sequence[int]],
    *,
    block_size: int,
) -> np.ndarray:
    """The `count` tokens (batch, count) that follow `tokens` (batch, time), time at least 1. Collective.

    model: a GPT or a Llama, sharded or not, in evaluation mode. choose: the next token of each sequence from
    logits (batch, vocab) on the host; it must give the same on every rank. Greedy: that of `greedy`.
    """
    text = np.asarray(tokens, np.int64)
    start = text.shape[1]
    cache = KVCache(len(model.blocks), min(block_size, start + count))
    with no_grad():
        for _ in range(count):
            if text.shape[1] <= block_size:
                logits = model(text[:, cache.length :], cache=cache)
            else:
                logits = model(text[:, -block_size:])
            last = device.current().to_numpy(logits.data[:, -1])  # (batch, time, vocab) -> (batch, vocab)
            text = np.concatenate([text, np.reshape(choose(last), (-1, 1))], axis=1)
    return text[:, start:]


def greedy(logits: np.ndarray) -> np.ndarray:
    """The likeliest token of each sequence, the first of equals."""
    return logits.argmax(axis=1)


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
