"""Generates tokens one after the other; every rank runs the same forward.

`python -m models.generate runs/NAME --prompt "def "` loads what models.train left there, or a folder of
Hugging Face's, on any number of ranks. Keys and values of what was read are kept, so a token costs one row;
beyond the model's block_size the window moves, every position with it, and each token costs a forward over
the whole window.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from shardrt import device, nn, no_grad
from shardrt.checkpoint import load
from shardrt.comm import init_device_mesh
from shardrt.comm.talk import from_first
from shardrt.fsdp import fully_shard
from shardrt.nn.ranks import ranks_of
from shardrt.parallel import Pipeline
from shardrt.train import config as settings
from shardrt.train import options
from shardrt.train.data import VOCABULARY
from shardrt.train.errors import USAGE, one_line
from shardrt.train.recipe import Recipe
from shardrt.train.tokenizer import Tokenizer
from shardrt.untrusted import say

from .cache import KVCache
from .gpt import GPT
from .hub import ends_in, kind_in, load_pretrained
from .llama import Llama

TOKENIZER = "tokenizer.json"  # beside weights, as Hugging Face has it


@dataclass(frozen=True, kw_only=True)
class Config(settings.SampleConfig):
    """Generate text from a language model that models.train has left, or from a folder of Hugging Face's."""

    run: Path  # the directory of the run, or the folder with config.json, weights and tokenizer.json
    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        settings.check_numbers(self, seed=2**64 - 1, length=2**20)


class Text(Protocol):
    """How text becomes tokens, and tokens text."""

    size: int  # tokens are below this
    ends: Collection[int]  # tokens behind which a text ends

    def encode(self, text: str) -> np.ndarray:
        """int64 (tokens,), one at least."""

    def decode(self, tokens: np.ndarray) -> str:
        """What tokens stand for; what can't be read is replaced."""


class ByteText:
    """A token for each byte of UTF-8."""

    size = VOCABULARY
    ends: Collection[int] = ()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")


class TokenisedText:
    """By a tokenizer.json of the package tokenizers; a text ends behind one of the tokens `ends`."""

    def __init__(self, path: Path, ends: Collection[int] = ()) -> None:
        """Raises ValueError that names the file."""
        self.ends = frozenset(ends)
        self._tokenizer = Tokenizer(path)
        self._tokenizer.close()  # long before it is needed again
        self.name, self.size = self._tokenizer.name, self._tokenizer.vocabulary

    def encode(self, text: str) -> np.ndarray:
        (ids,) = self._tokenizer.encode([text])
        self._tokenizer.close()
        if not ids.size:
            raise ValueError(f"sample.prompt {text!r} has no token")
        return ids.astype(np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        text = self._tokenizer.decode(tokens.tolist())
        self._tokenizer.close()
        return text


def generate(
    model: nn.Module | Pipeline,
    config: settings.SampleConfig,
    text: Text,
    *,
    block_size: int,
    seed: int,
    told: Callable[[int], None] | None = None,
) -> str:
    """The prompt and `config.length` tokens after it, the same on every rank. Collective.

    Fewer where the text ends before, unless config.past_end.
    told: called with the number of tokens so far.
    Leaves the model in training mode. The text is a function of the weights, the settings and the seed.
    Raises ValueError where logits are not finite.
    """
    random, done = np.random.Generator(np.random.Philox(seed)), iter(range(config.length))

    def choose(logits: np.ndarray) -> list[int]:
        if told:
            told(next(done))
        return [draw(logits[0, : text.size], config.temperature, config.top_k, random.random())]

    prompt = text.encode(config.prompt)
    net = model.model if isinstance(model, Pipeline) else model
    net.eval()
    ends = () if config.past_end else text.ends
    made = continued(model, prompt[None], config.length, choose, block_size=block_size, ends=ends)
    net.train()
    made = made[:, :-1] if made.size and made[0, -1] in ends else made
    return text.decode(np.concatenate([prompt, made[0]]))


def continued(
    model: nn.Module | Pipeline,
    tokens: np.ndarray,
    count: int,
    choose: Callable[[np.ndarray], Sequence[int] | np.ndarray],
    *,
    block_size: int,
    ends: Collection[int] = (),
) -> np.ndarray:
    """The `count` tokens (batch, count) that follow `tokens` (batch, time), time at least 1. Collective.

    ends: tokens behind which a sequence ends. It is filled up with the one that ended it, and there are fewer
    than `count` once all have ended.

    model: a GPT or a Llama, sharded or not, or its Pipeline, in evaluation mode. choose: the next token of
    each sequence from logits (batch, vocab) on the host; `greedy` is one. What rank 0 chooses counts.
    """
    text = np.asarray(tokens, np.int64)
    start, read = text.shape[1], 0
    net = model.model if isinstance(model, Pipeline) else model
    cache, ranks = KVCache(len(net.blocks), min(block_size, start + count)), ranks_of(net)
    ended = np.zeros((len(text), 1), bool)
    with no_grad():
        for _ in range(count):
            if text.shape[1] <= block_size:
                logits, read = model(text[:, read:], cache=cache), text.shape[1]
            else:
                logits = model(text[:, -block_size:])
            last = device.current().to_numpy(logits.data[:, -1])  # (batch, time, vocab) -> (batch, vocab)
            found = np.reshape(choose(last), (-1, 1))
            if ranks is not None:  # an expert that others send rows to may round mine and theirs differently
                found = np.array(from_first(ranks, found.tolist()))
            chosen = np.where(ended, text[:, -1:], found)
            text = np.concatenate([text, chosen], axis=1)
            ended = np.isin(chosen, list(ends))
            if ended.all():
                break
    return text[:, start:]


def greedy(logits: np.ndarray) -> np.ndarray:
    """The likeliest token of each sequence, the first of equals."""
    return logits.argmax(axis=1)


def draw(logits: np.ndarray, temperature: float, top_k: int, uniform: float) -> int:
    """The token that a uniform number in [0, 1) picks from softmax(logits / temperature) over the top_k.

    Raises ValueError for logits that are nan or infinite; -inf is a token that is never picked.
    """
    if not np.isfinite(logits.max()):  # nan if one is
        raise ValueError("the model's logits are not finite numbers, so no token follows")
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    if temperature == 0:
        return int(order[0])
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest alone
        weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / temperature)
    cumulative = np.cumsum(weights)
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


def of_folder(directory: Path) -> tuple[nn.Module, Text]:
    """The language model in a folder of Hugging Face's, and its tokenizer.json.

    Without one tokens are bytes, if there are 256. Raises ValueError if it writes no text; OSError.
    """
    kind = kind_in(directory)
    if kind not in (GPT, Llama):
        raise ValueError(f"{directory} holds a {kind.__name__}, which writes no text")
    model = load_pretrained(directory)
    path, tokens = directory / TOKENIZER, model.config.vocab_size
    if not path.exists() and tokens != VOCABULARY:
        raise ValueError(f"{path} is not there, and the model's {tokens} tokens are not bytes")
    words = TokenisedText(path, ends_in(directory)) if path.exists() else ByteText()
    if words.size > tokens:
        raise ValueError(f"{path} has {words.size} tokens, more than the model's {tokens}")
    return model, words


def of_recipe(recipe: Recipe) -> tuple[nn.Module, Text]:
    """The language model of a run, whose weights are still to be loaded, and what its tokens stand for."""
    from .language import LanguageRecipe  # which generates with what is above

    if not isinstance(recipe, LanguageRecipe):
        raise ValueError(f"a run of {recipe.ARCHITECTURE} writes no text")
    model = recipe.network()
    recipe.lora.prepare(model)
    return model, recipe.words()


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    from .train import load as load_recipe  # as above

    with one_line(USAGE, kinds=(ValueError, OSError, RuntimeError)):
        config = options.command_line(Config, arguments, program="models.generate")
        is_run = not (config.run / "config.json").exists()
        recipe = load_recipe(config.run / "config.toml") if is_run else None
        mesh = init_device_mesh("auto")
    with one_line(USAGE, mesh):
        model, words = of_recipe(recipe) if recipe else of_folder(config.run)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if recipe:
            load(config.run / "checkpoint", model)
        text = generate(model, config, words, block_size=model.config.block_size, seed=config.seed)
    if mesh.rank == 0:
        say(text, lines=True)


if __name__ == "__main__":
    main(sys.argv[1:])
