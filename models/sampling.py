"""Text from a language model: keys and values of the tokens read so far are kept, so a token costs one row.

Beyond the model's block_size the window moves, every position with it, and each token costs a forward over
the whole window.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from shardrt import device, nn, no_grad
from shardrt.comm.objects import broadcast_object
from shardrt.nn.ranks import ranks_of
from shardrt.parallel import Pipeline
from shardrt.train import config as settings
from shardrt.train.chat import ChatFolder
from shardrt.train.data import VOCABULARY
from shardrt.train.tokenizer import Tokenizer

from .cache import KVCache

TOKENIZER = "tokenizer.json"  # next to weights, as Hugging Face has it


class Text(Protocol):
    """How text becomes tokens, and tokens text."""

    size: int  # tokens are below this
    ends: Collection[int]  # tokens behind which a text ends

    def encode(self, text: str) -> np.ndarray:
        """int64 (tokens,), one at least."""

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens; unreadable bytes are replaced."""


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
            raise ValueError(f"sample.prompt must have at least one token, got {text!r}")
        return ids.astype(np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        text = self._tokenizer.decode(tokens.tolist())
        self._tokenizer.close()
        return text


class ChatText:
    """By the tokenizer and the chat template of a folder: a prompt is what a user says, and is answered."""

    def __init__(self, folder: ChatFolder, ends: Collection[int] = ()) -> None:
        """Raises ValueError that names the file."""
        self.folder, self.size = folder, folder.tokenizer.vocabulary
        self.ends = frozenset([*ends, *folder.end_of_turn()])
        folder.tokenizer.close()

    def encode(self, text: str) -> np.ndarray:
        ids = self.folder.prompt([{"role": "user", "content": text}])
        self.folder.tokenizer.close()
        return ids.astype(np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        text = self.folder.tokenizer.decode(tokens.tolist())
        self.folder.tokenizer.close()
        return text


def generate(
    model: nn.Module | Pipeline,
    config: settings.SampleConfig,
    text: Text,
    *,
    block_size: int,
    seed: int,
    on_token: Callable[[int], None] | None = None,
) -> str:
    """The prompt and `config.length` tokens after it, the same on every rank. Collective.

    Fewer where the text ends before, unless config.past_end.
    on_token: called with the number of tokens so far.
    Leaves the model in training mode. The text is a function of the weights, the settings and the seed.
    Raises ValueError where logits are not finite.
    """
    random, done = np.random.Generator(np.random.Philox(seed)), iter(range(config.length))

    def choose(logits: np.ndarray) -> list[int]:
        if on_token:
            on_token(next(done))
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
    each sequence from logits (batch, vocab) on the host; `greedy` is one. Rank 0's choice counts.
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
                found = np.array(broadcast_object(ranks, found.tolist()))
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
        raise ValueError("generate: the model's logits are NaN or infinite, so no token can be drawn")
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    if temperature == 0:
        return int(order[0])
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest alone
        weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / temperature)
    cumulative = np.cumsum(weights)
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])
