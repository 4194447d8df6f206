"""Text: a corpus from files, its held-out end, and windows of it that are functions of a sample's number.

Without a tokeniser token i is the i-th byte, so there is nothing to train, download or save before training;
or the tokens come from a token file (tokens.py), which is not read whole. Sample n of a run is the
same window of text at every world size and batch size.
"""

import gzip
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train.filearray import FileArray
from shardrt.train.held_out import shares
from shardrt.train.records import plain_text
from shardrt.train.tokens import SUFFIX, open_tokens

__all__ = ["Corpus", "VOCABULARY", "cut_windows", "held_out_starts", "load_corpus"]

VOCABULARY = 256
HELD_OUT = 20  # the last 1/20 of the text is never trained on

# Folders that are not library code, or tables (encodings), or differ between machines with the same Python.
_LEFT_OUT = {"dist-packages", "encodings", "idle_test", "idlelib", "site-packages", "test", "tests"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text in two parts, and its source."""

    source: str
    digest: str  # of all of it
    train: np.ndarray | FileArray  # 1-D, unsigned integers; uint8 for bytes
    held_out: np.ndarray | FileArray
    kind: str = "bytes"  # or "tokens"
    bytes_per_token: float = 1.0
    documents: np.ndarray | None = None  # int64: where each begins, in both parts together
    end: int | None = None  # the token after each document, if there is one
    tokenizer: str = "bytes"  # that made the tokens: its name and hash

    def gzip_bits_per_byte(self) -> float | None:
        """The size of the held-out text after gzip -9, to compare a model with. None for tokens."""
        if self.kind != "bytes":
            return None
        if self.digest not in _gzipped:  # a plan asks it of each setting
            _gzipped[self.digest] = len(gzip.compress(self.held_out.tobytes(), 9))
        return 8 * _gzipped[self.digest] / self.held_out.size

    def starts(self, samples: range, window: int, seed: int) -> list[int]:
        """Where training samples begin, by their numbers."""
        return [window_start(self.train.size, sample, window, seed) for sample in samples]

    def windows(self, window: int) -> int:
        """The samples of an epoch."""
        return _windows(self.train.size, window)[0]

    def described(self, samples: int, window: int) -> list[str]:
        """A line for each source of a mixture: what it gives of the first `samples`."""
        return []

    def facts(self) -> dict[str, Any]:
        """For logs and checkpoints, of a mixture."""
        return {}

    def named(self, names: Sequence[str]) -> "Corpus":
        """With the names of its files that the user gave."""
        return replace(self, source=", ".join(names)) if names else self


_gzipped: dict[str, int] = {}  # bytes of the held-out part, by the text's digest


def load_corpus(files: Sequence[Path] = (), *, block_size: int, vocabulary: int = VOCABULARY) -> Corpus:
    """The text of `files`, one after the other; of the .py files of Python's own library if there are none.

    Or a token file. Several of those, and FILE:WEIGHT, are a mixture (mixture.py).

    Raises:
        ValueError: naming the file, for one that is missing, empty or no file, for tokens that are not below
            `vocabulary`, and where a part of the text is shorter than one window of `block_size` tokens and a
            target; for sources that can't be mixed.
        OSError: for one that can't be read.
    """
    from shardrt.train.mixture import mixed, sources  # which has corpora of this file

    chosen = sources(files)
    tokenised = [source.path for source in chosen if source.path.suffix == SUFFIX]
    weighted = any(source.weight is not None for source in chosen)
    if len(chosen) > 1 and (tokenised or weighted):
        how = {"block_size": block_size, "vocabulary": vocabulary}
        parts = [load_corpus([source.path], **how) for source in chosen]
        return mixed(parts, [source.weight for source in chosen])
    files = [source.path for source in chosen]
    if tokenised:
        return _tokens(tokenised[0], block_size, vocabulary)
    if vocabulary < VOCABULARY:
        raise ValueError(f"model.vocab_size must be at least {VOCABULARY} for bytes, got {vocabulary}")
    if files:
        source, texts = ", ".join(map(str, files)), [_read(Path(file)) for file in files]
    else:
        source, texts = f"Python {platform.python_version()} standard library", _standard_library()
    text = b"".join(texts)
    cut = _cut(source, len(text), block_size, "bytes")
    tokens = np.frombuffer(text, np.uint8)
    return Corpus(source, f"sha256 {hashlib.sha256(text).hexdigest()}", tokens[:cut], tokens[cut:])


def _tokens(path: Path, block_size: int, vocabulary: int) -> Corpus:
    if not path.exists():
        raise ValueError(f"data: {path} does not exist")
    file = open_tokens(path)
    file.check_vocabulary(vocabulary)
    cut = _cut(str(path), file.tokens.size, block_size, "tokens")
    return Corpus(
        str(path),
        f"xxh3 {file.digest}",
        file.tokens[:cut],
        file.tokens[cut:],
        "tokens",
        file.bytes / file.tokens.size,
        file.documents,
        file.end,
        file.tokenizer,
    )


def _cut(source: str, size: int, block_size: int, kind: str) -> int:
    """Where the held-out part begins."""
    cut = size - size // HELD_OUT
    if size - cut <= block_size:
        raise ValueError(
            f"data: {source} has {size} {kind}, too short: windows of {block_size} tokens, "
            f"with 1/{HELD_OUT} held out, need {HELD_OUT * (block_size + 1)}"
        )
    return cut


def window_start(length: int, sample: int, block_size: int, seed: int) -> int:
    """Where sample number `sample` begins: each epoch takes all windows once, in another order.

    An epoch also moves the windows by another offset, so that their borders move.
    """
    count, offset_range = _windows(length, block_size)
    epoch, index = divmod(sample, count)
    offset, order = _epoch(seed, epoch, count, offset_range)
    return offset + int(order[index]) * block_size


def _windows(length: int, block_size: int) -> tuple[int, int]:
    """(windows of an epoch, the offsets that it can have)."""
    offset_range = min(block_size, length - block_size)
    return (length - offset_range) // block_size, offset_range


def held_out_starts(
    length: int,
    batch_size: int,
    block_size: int,
    *,
    windows: int | None = None,
    rank: int = 0,
    size: int = 1,
) -> Iterator[tuple[list[int], int]]:
    """(where each of batch_size windows begins, how many of them count), this rank's part, batch by batch.

    Args:
        windows: how many, spread evenly over the text; all if None, which makes every token but the first,
            and the few after the last whole window, a target once. Every rank gets equally many batches: the
            forward of a sharded model is collective; windows beyond the last do not count.
    """
    for mine in shares((length - 1) // block_size, batch_size, limit=windows, rank=rank, size=size):
        padded = np.concatenate([mine, np.zeros(batch_size - mine.size, np.int64)])
        yield (padded * block_size).tolist(), mine.size


def cut_windows(
    text: np.ndarray | FileArray, starts: Sequence[int], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, the next tokens: int64 (windows, block_size) each."""
    rows = np.stack([text[start : start + block_size + 1] for start in starts]).astype(np.int64)
    return rows[:, :-1].copy(), rows[:, 1:].copy()  # two arrays: targets may be marked as ignored


@lru_cache(64)  # of each source of a mixture, two
def _epoch(seed: int, epoch: int, count: int, offset_range: int) -> tuple[int, np.ndarray]:
    """(offset, order of the windows), from raw Philox words: the same in every version of NumPy."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count + 1)
    return int(words[0] % offset_range), np.argsort(words[1:], kind="stable")


def _read(path: Path) -> bytes:
    if not path.exists():
        raise ValueError(f"data: {path} does not exist")
    if not path.is_file():
        raise ValueError(f"data: {path} is not a file")
    content = path.read_bytes()
    if not content:
        raise ValueError(f"data: {path} is empty")
    return plain_text(path, content)


def _standard_library() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [each for each in below if _is_library_code(f"{each}/")]  # installed code may be large
        names += [
            (Path(folder) / file).relative_to(root).as_posix() for file in files if file.endswith(".py")
        ]
    kept = sorted(name for name in names if _is_library_code(name))
    if not kept:
        raise ValueError(
            f"data: {root} has no sources of Python's library; pass text files with --data FILE ..."
        )
    return [(root / name).read_bytes() for name in kept]


def _is_library_code(name: str) -> bool:
    *folders, file = name.split("/")
    made_by_installer = file.startswith("_sysconfigdata") or file == "sitecustomize.py"
    return not made_by_installer and not any(f in _LEFT_OUT or f.startswith("config-") for f in folders)
