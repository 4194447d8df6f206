"""Fine-tuning on conversations: a Language task that learns the answers alone, of packed examples."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardrt import nn
from shardrt.functional.attention import starts_on_host
from shardrt.train import config as settings
from shardrt.train.chat import TEMPLATE, Examples, fitted
from shardrt.train.chat_file import examples_of
from shardrt.train.held_out import IGNORED, shares
from shardrt.train.metrics import RunLog
from shardrt.train.mixture import sources
from shardrt.train.packing import Packed
from shardrt.train.tokens import BadTokens

from .gpt import GPT
from .hub import TOKENIZER_FILES, side_files
from .language import Batch, Language
from .sampling import TOKENIZER, Text

HELD_OUT = 20  # every 20th example is never trained on; of fewer, the last


class Chat(Language):
    """A Task: the next token of the assistant's answers, in windows of whole conversations."""

    def read(self) -> None:
        """The conversations, in windows."""
        recipe, room = self.recipe, self.per_sample
        self._restarts = recipe.NETWORK is GPT  # where positions are learnt; turned ones are relative
        if recipe.parallel.cp > 1 and self._restarts:
            raise ValueError(
                "text.chat: positions of a GPT begin again in each conversation, so leave parallel.cp at 1"
            )
        if not recipe.data:
            raise ValueError("text.chat needs data: pass --data FILE.jsonl")
        if any(source.weight is not None for source in sources(recipe.data)):
            raise ValueError("text.chat: conversations have no weights; pass --data a.jsonl b.jsonl")
        self._words: Text = recipe.words()
        self.examples: Examples = examples_of(recipe.data, self._words.folder, recipe.text.split)
        if (largest := self.examples.largest) >= self.shape.vocab_size:
            raise BadTokens(
                f"{recipe.init_from}: its tokenizer makes token {largest}, which is not below the model's "
                f"vocab_size, {self.shape.vocab_size}"
            )
        self.fit = fitted(self.examples, room, recipe.text.too_long)
        count = self.fit.begins.size
        if not count:
            raise BadTokens(
                f"{self.examples.source}: no conversation has an answer within a window of {room} tokens"
            )
        chosen = np.arange(count) % HELD_OUT == HELD_OUT - 1
        chosen[1:][-1:] |= count < HELD_OUT
        self.train, self.kept_out = self._packed(~chosen), self._packed(chosen)

    def _packed(self, chosen: np.ndarray) -> Packed:
        fit, examples = self.fit, self.examples
        own = fit.begins[chosen], fit.sizes[chosen], fit.answers[chosen]
        return Packed(examples.tokens, examples.answers, *own, self.per_sample)

    def facts(self) -> dict[str, Any]:
        """As Task."""
        return {
            "data": self.examples.source,
            "digest": self.examples.digest,
            "train_tokens": self.train.inputs,
            "held_out_tokens": self.kept_out.inputs,
            "train_examples": self.train.examples,
            "held_out_examples": self.kept_out.examples,
            "truncated_examples": self.fit.truncated,
            "skipped_examples": self.fit.skipped,
            "windows": len(self.train),
            "padding_share": self.train.padding(),
            "answer_share": int(self.train.counts.sum()) / self.train.inputs,
        }

    def introduction(self) -> list[str]:
        """As Task."""
        facts = self.facts()
        return [
            self.named(),
            f"data: {facts['data']}, {facts['train_examples']} examples to train on and "
            f"{facts['held_out_examples']} held out ({facts['truncated_examples']} truncated, "
            f"{facts['skipped_examples']} skipped), {facts['digest'][:19]}",
            f"packed: {facts['windows']} windows of {self.per_sample} tokens, "
            f"{facts['padding_share']:.1%} padding; {facts['answer_share']:.1%} of the tokens are answers",
            *self.recipe.warnings(),
        ]

    def batch(self, samples: range) -> Batch:
        """As Task."""
        return self._rows(self.train, self.train.numbers(samples, self.recipe.seed))

    def count(self, samples: range) -> int:
        """As Task: the tokens of answers."""
        return int(self.train.counts[self.train.numbers(samples, self.recipe.seed)].sum())

    def _rows(self, packed: Packed, windows: np.ndarray) -> Batch:
        tokens, targets, documents = packed.rows(windows)
        if max(tokens.max(), targets.max()) >= self.shape.vocab_size:
            raise BadTokens(f"{self.recipe.data[0]}: a token is larger than the header says; make it again")
        starts = starts_on_host(documents)
        positions = np.arange(self.per_sample) - starts if self._restarts else None
        return Batch(tokens, targets, starts, positions)

    def held_out(self, count: int, limit: int | None, rank: int, size: int) -> Iterator[Batch]:
        """As Task."""
        windows = len(self.kept_out)
        for mine in shares(windows, count, limit=limit, rank=rank, size=size) if windows else ():
            batch = self._rows(self.kept_out, np.concatenate([mine, np.zeros(count - mine.size, np.int64)]))
            batch.targets[mine.size :] = IGNORED  # rows beyond the last window
            yield batch

    def held_out_samples(self, limit: int | None) -> int:
        """As Task."""
        windows = len(self.kept_out)
        return windows if limit is None else min(limit, windows)

    def evaluation(self, figures: dict[str, float]) -> dict[str, float]:
        """As Task."""
        return figures

    def close(self, model: nn.Module, run: RunLog) -> dict[str, Any]:
        """As Task: an answer of the model, and its export."""
        chosen, files = self.recipe.text, {}
        if run.directory and (chosen.tokenizer or chosen.chat_template):
            files = side_files(self.recipe.init_from, TOKENIZER_FILES)
            files |= {TOKENIZER: chosen.tokenizer.read_bytes()} if chosen.tokenizer else {}
            files |= {TEMPLATE: chosen.chat_template.read_bytes()} if chosen.chat_template else {}
        self.recipe.leave(model, run, files)
        return self.sampled(model, run)

    def _write_sample(self, model: nn.Module, run: RunLog, sample: settings.SampleConfig) -> str | None:
        """As Language: an answer to sample.prompt, or to the first held-out question if that is not set."""
        words = self._words
        if sample.prompt == settings.SampleConfig.prompt and len(self.kept_out):
            self._words = _Question(words, self.kept_out.question())
        try:
            return super()._write_sample(model, run, sample)
        finally:
            self._words = words


class _Question:
    """A Text whose every prompt is these tokens."""

    def __init__(self, words: Text, tokens: np.ndarray) -> None:
        self.size, self.ends, self.decode, self._tokens = words.size, words.ends, words.decode, tokens

    def encode(self, text: str) -> np.ndarray:
        return self._tokens
