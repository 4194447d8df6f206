"""Recipes of GPT and Llama for models.train to train language models, and their task.

Text is bytes, records (Parquet, Arrow, JSON lines) or a token file (`python -m shardrt data make`).
`init_from` begins with the weights of a folder of Hugging Face's. Conversations are another task (chat.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shardrt import Tensor, device, nn
from shardrt.comm import DeviceMesh
from shardrt.functional.attention import starts_on_host
from shardrt.nn.parameter_placement import whole_size
from shardrt.parallel import shard_sequence
from shardrt.parallel.styles import Style
from shardrt.train import config as settings
from shardrt.train.chat import ChatFolder, TooLong
from shardrt.train.data import VOCABULARY, Corpus, cut_windows, held_out_starts, load_corpus
from shardrt.train.held_out import IGNORED
from shardrt.train.metrics import BITS, RunLog
from shardrt.train.mixture import sources
from shardrt.train.prepare import Preparation, prepared
from shardrt.train.records import has_records
from shardrt.train.tokens import SUFFIX, BadTokens, open_tokens

from . import gpt, llama
from .hub import TOKENIZER_FILES, ends_in, side_files
from .plans import plan_of
from .pretrained import PretrainedRecipe
from .sampling import TOKENIZER, ByteText, ChatText, Text, TokenisedText, generate


@dataclass(frozen=True)
class TextConfig:
    """How text becomes samples."""

    window: int = 0  # tokens of a sample; 0: the model's block_size
    separate_documents: bool = False  # tokens do not see other documents in their window; needs a token file
    tokenizer: Path | None = None  # tokenizer.json of the tokens; without it the sample is left out
    column: str = "text"  # of records (Parquet, Arrow, JSON lines) that are trained on: what is a document
    split: str = "train"  # of a folder of records that has several
    end: str = ""  # a token put behind each document of records, as <|endoftext|>
    chat: bool = False  # records are conversations, whose answers alone are learnt; needs init_from
    chat_template: Path | None = None  # a file in place of init_from's own template
    too_long: TooLong = TooLong.truncate  # what to do about a conversation beyond a window: or skip it

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"text.window must be at least 0, got {self.window}")


@dataclass(frozen=True)
class LanguageRecipe(PretrainedRecipe):
    """Train a language model, fully sharded."""

    text: TextConfig = TextConfig()
    sample: settings.SampleConfig = settings.SampleConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        paths = [source.path for source in sources(self.data)]
        tokenised = any(path.suffix == SUFFIX or has_records(path) for path in paths)
        if self.text.end and not any(has_records(path) for path in paths):
            raise ValueError("text.end is put behind records alone; `shardrt data make` has --end for texts")
        as_bytes = not self.pretrained and not tokenised
        if as_bytes and 0 < self.model.vocab_size < VOCABULARY:
            raise ValueError(
                f"model.vocab_size must be at least {VOCABULARY} for bytes, got {self.model.vocab_size}"
            )

    def task(self) -> "Language":
        if self.text.chat:
            from .chat import Chat  # which is a Language

            return Chat(self)
        return Language(self)

    def chat_folder(self) -> ChatFolder:
        """The tokenizer and template of init_from. Raises ValueError, OSError."""
        if not self.pretrained:
            raise ValueError(
                "text.chat needs init_from: a folder with a model, its tokenizer and its template"
            )
        return ChatFolder(self.init_from, tokenizer=self.text.tokenizer, template=self.text.chat_template)

    def network(self) -> nn.Module:
        """A new model: of the recipe's shape, or that of init_from."""
        shape = self.resolved().model
        own = {"dropout", "loss_chunk", "balance_loss", "pooled_balance", "capacity_factor", "expert_bias"}
        named = own & shape.__dataclass_fields__.keys()
        return self.begun(shape, **{name: getattr(shape, name) for name in named})

    def resolved(self) -> "LanguageRecipe":
        """As Recipe: a vocabulary of 0 is that of the data."""
        tokens = self.token_files()
        if self.model.vocab_size or self.pretrained:
            return self
        size = max((open_tokens(path).vocabulary for path in tokens), default=VOCABULARY)
        return replace(self, model=replace(self.model, vocab_size=size))

    def files(self) -> list[Path]:
        """The data, with weights as they are given, and a token file in place of records.

        Makes those that were not made yet. Raises ValueError, OSError.
        """
        self.check_origin()
        text, found = self.text, []
        size = 0 if self.pretrained else self.model.vocab_size
        how = Preparation(text.tokenizer, text.end, text.column, text.split, size)
        for given, source in zip(self.data, sources(self.data), strict=True):
            if has_records(source.path):
                weight = str(given)[len(str(source.path)) :]
                found.append(Path(f"{prepared(source.path, how)}{weight}"))
            else:
                found.append(given)
        return found

    def token_files(self) -> list[Path]:
        """Those of the data, without weights. Raises ValueError, OSError."""
        if self.text.chat:
            return []
        paths = [source.path for source in sources(self.files())]
        return [path for path in paths if path.suffix == SUFFIX]

    def words(self) -> Text:
        """How prompts become tokens and tokens text. Raises ValueError if nothing says so."""
        if self.text.chat:
            return ChatText(self.chat_folder(), ends_in(self.init_from))
        tokens = self.token_files()
        file = open_tokens(tokens[0]) if tokens else None
        made_by = file.tokenizer if file else "bytes"
        if made_by == "bytes":
            if self.text.tokenizer is not None:
                raise ValueError(
                    f"text.tokenizer: the data are byte tokens; make a token file of them by `shardrt data "
                    f"make`, or leave it out; got {self.text.tokenizer}"
                )
            return ByteText()
        if self.text.tokenizer is None:
            raise ValueError(f"text.tokenizer: {tokens[0]} was made by {made_by}; pass that tokenizer.json")
        ends = ends_in(self.init_from) if self.pretrained else []
        ends = ends if file.end is None else [*ends, file.end]
        words = TokenisedText(self.text.tokenizer, ends)
        if words.name.split()[1:] != made_by.split()[1:]:
            raise ValueError(f"text.tokenizer: {tokens[0]} was made by {made_by}, got {words.name}")
        return words


@dataclass(frozen=True)
class GPTRecipe(LanguageRecipe):
    """Train a GPT, fully sharded, on text. Every option can also stand in the TOML file."""

    model: gpt.GPTConfig = gpt.GPTConfig(vocab_size=0)

    ARCHITECTURE: ClassVar[str] = "gpt"
    NETWORK: ClassVar[type] = gpt.GPT
    SIZES: ClassVar[dict[str, Any]] = gpt.SIZES


@dataclass(frozen=True)
class LlamaRecipe(LanguageRecipe):
    """Train a Llama, fully sharded, on text. Every option can also stand in the TOML file."""

    model: llama.LlamaConfig = llama.LlamaConfig(vocab_size=0)

    ARCHITECTURE: ClassVar[str] = "llama"
    NETWORK: ClassVar[type] = llama.Llama
    SIZES: ClassVar[dict[str, Any]] = llama.SIZES


class Batch(NamedTuple):
    """Windows of text: int64 (rows, window) each. starts: where each token's document begins, if it matters.

    positions: of the tokens in their windows, where these are parts of windows.
    """

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray | None = None
    positions: np.ndarray | None = None


class Language:
    """A Task (shardrt.train.tasks): the next token of windows of text."""

    unit = "token"

    def __init__(self, recipe: LanguageRecipe) -> None:
        self.recipe = recipe
        self.shape = shape = recipe.network().config
        self.block_size = shape.block_size
        self.per_sample = recipe.text.window or self.block_size
        if self.per_sample > self.block_size:
            raise ValueError(
                f"text.window must be at most the model's block_size, {self.block_size}, got "
                f"{self.per_sample}"
            )
        self._last_bits = float("nan")
        self.read()

    def read(self) -> None:
        """The data, and how its tokens are text."""
        recipe = self.recipe
        how = {"block_size": self.per_sample, "vocabulary": self.shape.vocab_size}
        names = [str(source.path) for source in sources(recipe.data)]
        self.corpus: Corpus = load_corpus(recipe.files(), **how).named(names)
        if recipe.text.separate_documents and self.corpus.documents is None:
            raise ValueError(
                "text.separate_documents needs a token file, which records where documents begin"
            )
        self.samples = recipe.steps * recipe.batch_size
        self._words = self._known_words()
        self.gzip = self.corpus.gzip_bits_per_byte()

    def _known_words(self) -> Text | None:
        """For the sample at the end; found out now, not after hours of training."""
        recipe = self.recipe
        if self.corpus.kind == "tokens" and recipe.text.tokenizer is None:
            return None  # the meaning of the tokens is unknown
        words = recipe.words()
        if words.encode(recipe.sample.prompt).max() >= self.shape.vocab_size:
            raise ValueError(
                f"sample.prompt has tokens that are not below the model's vocab_size, {self.shape.vocab_size}"
            )
        return words

    def facts(self) -> dict[str, Any]:
        """As Task."""
        corpus, result = self.corpus, {}
        if self.gzip is not None:
            result["gzip_bits_per_byte"] = self.gzip
        return {
            "data": corpus.source,
            "digest": corpus.digest,
            "train_tokens": int(corpus.train.size),
            "held_out_tokens": int(corpus.held_out.size),
            "bytes_per_token": corpus.bytes_per_token,
            **corpus.facts(),
            **result,
        }

    def introduction(self) -> list[str]:
        """As Task."""
        corpus = self.corpus
        gzip = "" if self.gzip is None else f" (gzip -9: {self.gzip:.3f} bits per byte)"
        return [
            self.named(),
            f"data: {corpus.source}, {corpus.train.size} {corpus.kind} to train on and "
            f"{corpus.held_out.size} held out{gzip}, {corpus.digest[:19]}",
            *corpus.described(self.samples, self.per_sample),
            *self.recipe.warnings(),
        ]

    def named(self) -> str:
        """The model, for the reader."""
        config = self.shape
        begun = f" from {self.recipe.init_from}" if self.recipe.pretrained else ""
        shape = f"{config.n_layer} x {config.n_embd}, T {self.per_sample}"
        if experts := getattr(config, "experts", 0):
            shape += f", {config.experts_per_token} of {experts} experts"
        return f"{self.recipe.NETWORK.__name__} {shape}{begun}"

    def model(self, mesh: DeviceMesh) -> nn.Module:
        """As Task."""
        return self.recipe.network()

    def plan(self, model: nn.Module, *, sequence: bool) -> Mapping[str, Style]:
        """As Task."""
        return plan_of(model, sequence_parallel=sequence)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """As Task: the blocks."""
        return list(model.blocks)

    def ends(self, model: nn.Module) -> list[list[nn.Module]]:
        """As Task: the embedding; the last norm and the head. None where the head is the embedding."""
        untied = isinstance(model, llama.Llama) and not model.config.tied
        return [[model.embedding], [model.norm, model.head]] if untied else []

    def flops(self, model: nn.Module) -> float:
        """As Task: six for each weight that a token meets, and causal attention's (PaLM, 2022, app. B)."""
        shape, window = model.config, self.per_sample
        weights = sum(map(_active, model.modules()))
        head = shape.vocab_size * shape.n_embd if getattr(shape, "tied", True) else 0
        heads = shape.n_head * getattr(shape, "head_dim", shape.n_embd // shape.n_head)
        # Twice the keys that a token sees, on average: those of causal attention, or of a window of so many.
        seen = (min(window, getattr(b.attention, "window", None) or window) for b in model.blocks)
        keys = sum(most * (2 - most / window) for most in seen)
        return 6.0 * window * (weights + head + heads * keys)

    def batch(self, samples: range) -> Batch:
        """As Task."""
        starts = self.corpus.starts(samples, self.per_sample, self.recipe.seed)
        return self._windows(self.corpus.train, starts, 0)

    def part(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        """As Task."""
        part = shard_sequence(batch.tokens, batch.targets, mesh=mesh, starts=batch.starts)
        return Batch(part.tokens, part.targets, part.starts, part.positions)

    def count(self, samples: range) -> int:
        """As Task: the targets that count."""
        if not self.recipe.text.separate_documents:
            return len(samples) * self.per_sample
        starts = np.array(self.corpus.starts(samples, self.per_sample, self.recipe.seed), np.int64)
        borders = np.searchsorted(self.corpus.documents, (starts, starts + self.per_sample), side="right")
        return len(samples) * self.per_sample - int((borders[1] - borders[0]).sum())

    def _windows(self, text: np.ndarray, starts: list[int], offset: int) -> Batch:
        """offset: where `text` begins in the whole."""
        tokens, targets = cut_windows(text, starts, self.per_sample)
        if max(tokens.max(), targets.max()) >= self.shape.vocab_size:
            raise BadTokens(
                f"{self.corpus.source}: a token is not below the vocabulary that the header says; "
                "see `python -m shardrt data check`"
            )
        if not self.recipe.text.separate_documents:
            return Batch(tokens, targets)
        places = np.array(starts, np.int64)[:, None] + np.arange(self.per_sample + 1) + offset
        numbers = np.searchsorted(self.corpus.documents, places, side="right")
        targets[numbers[:, 1:] != numbers[:, :-1]] = IGNORED  # the first of a document can't be predicted
        return Batch(tokens, targets, starts_on_host(numbers[:, :-1]))

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """As Task: the targets too, since the model makes the loss."""
        given = {"tokens": batch.tokens, "targets": batch.targets, "reduction": "sum"}
        if batch.starts is not None:
            given["starts"] = device.current().asarray(batch.starts, np.int64)
        if batch.positions is not None:
            given["positions"] = batch.positions
        return given

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """As Task: the model's output."""
        return output

    def held_out(self, count: int, limit: int | None, rank: int, size: int) -> Iterator[Batch]:
        """As Task: neighbouring windows."""
        corpus, window = self.corpus, self.per_sample
        place = {"windows": limit, "rank": rank, "size": size}
        for starts, there in held_out_starts(corpus.held_out.size, count, window, **place):
            batch = self._windows(corpus.held_out, starts, corpus.train.size)
            batch.targets[there:] = IGNORED  # rows beyond the last window
            yield batch

    def held_out_samples(self, limit: int | None) -> int:
        """As Task."""
        windows = (self.corpus.held_out.size - 1) // self.per_sample
        return windows if limit is None else min(limit, windows)

    def measure(self, output: Tensor, batch: Batch) -> dict[str, tuple[float, float]]:
        """As Task."""
        return {"held_out_loss": (float(output), float((batch.targets != IGNORED).sum()))}

    def evaluation(self, figures: dict[str, float]) -> dict[str, float]:
        """As Task."""
        bits = figures["held_out_loss"] * BITS / self.corpus.bytes_per_token
        self._last_bits = bits
        return {**figures, "held_out_bits_per_byte": bits}

    def close(self, model: nn.Module, run: RunLog) -> dict[str, Any]:
        """As Task: text that the model makes, and its export."""
        gzip = "" if self.gzip is None else f"; gzip -9 needs {self.gzip:.3f}"
        run.say(f"held-out text: {self._last_bits:.3f} bits per byte{gzip}")
        for line in self.corpus.described(self.samples, self.per_sample):
            run.say(f"trained on {line}")
        self.export(run, model, self.corpus.end)
        return self.sampled(model, run)

    def export(self, run: RunLog, model: nn.Module, end: int | None) -> None:
        """The trained model in files, if the recipe says so, with the tokenizer."""
        tokenizer, files = self.recipe.text.tokenizer, {}
        if run.directory and tokenizer is not None:
            files = side_files(tokenizer.parent, TOKENIZER_FILES) | {TOKENIZER: tokenizer.read_bytes()}
        known = {} if self.recipe.pretrained or end is None else {"bos_token_id": end, "eos_token_id": end}
        self.recipe.leave(model, run, files, **known)

    def sampled(self, model: nn.Module, run: RunLog) -> dict[str, Any]:
        """The record of a text that the model makes; {} if it makes none."""
        with run.screen.moving():
            made = self._write_sample(model, run, self.recipe.sample)
        return {} if made is None else {"sample": made}

    def preview(self, model: nn.Module, run: RunLog) -> None:
        """As Task: a short text, if the settings ask for one."""
        if length := self.recipe.sample.first:
            self._write_sample(model, run, replace(self.recipe.sample, length=length))

    def _write_sample(self, model: nn.Module, run: RunLog, sample: settings.SampleConfig) -> str | None:
        """Print text that the model makes, and return it; None for no text, or tokens of unknown meaning."""
        if self._words is None or not sample.length:
            return None

        def show(done: int) -> None:
            run.screen.show("writing a sample, tokens", done, sample.length, lines=True)

        how = {"block_size": self.block_size, "seed": self.recipe.seed, "on_token": show}
        try:
            made = generate(model, sample, self._words, **how)
        except BadTokens as error:  # a tokenizer that can't decode is no reason to end the run
            run.say(f"warning: no sample: {error}")
            return None
        run.say(f"--- sample ---\n{made}\n--------------")
        return made


def _active(module: nn.Module) -> float:
    """The weights of a module's own products that a token meets: of experts, those of the chosen ones."""
    if isinstance(module, nn.MoE):
        experts, router = module.experts, module.router
        part = router.per_token / router.n_experts
        return whole_size(router.weight) + part * (whole_size(experts.up) + whole_size(experts.down))
    return whole_size(module.weight) if isinstance(module, nn.Linear) else 0
