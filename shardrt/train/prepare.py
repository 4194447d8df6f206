"""From texts and records to a token file, document by document; and token files that training makes itself.

Training on a Parquet file, say, first writes runs/.tokens/NAME-KEY.tokens, once: after that the samples are
those of any token file, at every number of ranks, and a run resumes at any of them at once. A preparation
that is killed goes on where it was.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from shardrt.comm import mpi_world
from shardrt.train.metrics import RUNS
from shardrt.train.reading import TEXT, Progress, Row, batches, made_from, rows
from shardrt.train.screen import Screen
from shardrt.train.tokenizer import LARGEST, Tokenizer
from shardrt.train.tokens import SUFFIX, BadTokens, TokenFile, TokenWriter
from shardrt.train.workers import in_order
from shardrt.untrusted import read_regular

__all__ = ["Preparation", "make_tokens", "prepared"]

CACHE = ".tokens"  # in runs/
BYTES = 256  # the vocabulary without a tokeniser
_BATCH = 1 << 20  # characters of text that are tokenised together
_AHEAD = 2  # tokenizers, each of which uses all cores; one works while the other is given its texts
_ABANDONED = 7 * 86400.0  # seconds without a write
_FORMAT = 1  # of what is made; after a change all files are made again


@dataclass(frozen=True)
class Preparation:
    """How records become tokens."""

    tokenizer: Path | None = None  # a tokenizer.json; None: bytes
    end: str = ""  # the token behind each document, if any
    column: str = "text"
    split: str = "train"
    vocabulary: int = 0  # of the model that will read the tokens, which decides none of them; 0: any

    def made_from(self, paths: Sequence[Path]) -> str:
        """A hash of sources and settings. Raises BadTokens, BadRecords, OSError as make_tokens does."""
        from xxhash import xxh3_128_hexdigest

        made_by = None
        if self.tokenizer is not None:
            made_by = xxh3_128_hexdigest(read_regular(self.tokenizer, LARGEST))
        return made_from(paths, self.split, _FORMAT, made_by, self.end, self.column)


def prepared(path: Path, how: Preparation) -> Path:
    """The token file of records: the one that was made of them before, or else made now.

    Ranks and runs that want the same file wait for the one that makes it. A changed source (its size or
    time), tokenizer or setting makes another file.

    Raises:
        BadTokens, BadRecords: for what can't be used.
        OSError: if the file system fails.
    """
    key = how.made_from([path])
    return once(f"{path.name.split('.')[0]}-{key[:16]}{SUFFIX}", lambda out: make_tokens(out, [path], how))


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The file of this name in runs/.tokens, made by `make` if it is not there. Others wait meanwhile."""
    out = RUNS / CACHE / name
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system gives it back when a process ends, however it ends
        if not out.exists():
            _remove_abandoned(out.parent)
            with _all_cores():
                make(out)
    return out


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files with which no process has gone on for a week."""
    for left in folder.glob(".*.part"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let what is started inside use the cores of the other ranks, which wait."""
    if mpi_world.launch() is None:
        yield
        return
    own = os.sched_getaffinity(0)  # the launcher may have bound each rank to cores of its own
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the system leaves out what is not this job's
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def make_tokens(out: Path, paths: Sequence[Path], how: Preparation) -> TokenFile:
    """Make a token file of texts and records. A line on the screen says how far it is.

    Raises:
        FileExistsError: for an `out` that exists.
        BadTokens, BadRecords: for what can't be used.
        Refused: if another process is making the file.
        OSError: if the file system fails; called again, it goes on.
    """
    if how.tokenizer is None and how.end:
        raise BadTokens("--end needs --tokenizer: byte tokens have no end token")
    if out.exists():
        raise FileExistsError(17, "exists already", str(out))
    source = how.made_from(paths)
    if how.tokenizer is None:
        tokenizer, last, limit = None, [], None
        facts = {"vocabulary": BYTES, "tokenizer": "bytes", "made_from": source}
    else:
        tokenizer, limit = Tokenizer(how.tokenizer), TEXT
        if 0 < how.vocabulary < tokenizer.vocabulary:  # said before hours of work
            raise BadTokens(
                f"{how.tokenizer}: its largest token is {tokenizer.vocabulary - 1}, which is not below "
                f"model.vocab_size, {how.vocabulary}; pass --model.vocab-size 0 to take the tokenizer's"
            )
        last = _end(tokenizer, how)
        facts = {"vocabulary": tokenizer.vocabulary, "tokenizer": tokenizer.name}
        facts |= {"end": last[0] if last else None, "made_from": f"{source} {version('tokenizers')}"}
    screen = Screen()
    with TokenWriter(out, **facts) as writer, screen.moving():
        progress = Progress(screen, paths, writer.documents)
        found = rows(paths, [how.column], how.split, writer.facts.get("place", ()), limit)
        for batch, texts, tokens in _tokenised(batches(found, _BATCH), how, tokenizer):
            for text, ids in zip(texts, tokens, strict=True):
                writer.add(np.append(ids, last).astype(np.int64) if last and ids.size else ids, len(text))
            writer.keep(place=batch[-1].place)
            progress.show(batch)
        if not writer.documents:
            raise BadTokens(f"{', '.join(map(str, paths))}: there is no text")
        return writer.finish()


def _end(tokenizer: Tokenizer, how: Preparation) -> list[int]:
    """The end token, put after each document."""
    last = [tokenizer.token_to_id(how.end)] if how.end else []
    if last == [None]:
        raise BadTokens(f"{how.tokenizer}: the tokenizer has no token {how.end!r}")
    return last


def _tokenised(
    found: Iterator[list[Row]], how: Preparation, tokenizer: Tokenizer | None
) -> Iterator[tuple[list[Row], list[bytes], list[np.ndarray]]]:
    """Batches, their texts and the tokens of each text."""
    texts = ((batch, [_text(row, how.column) for row in batch]) for batch in found)
    if tokenizer is None:
        yield from ((batch, own, [np.frombuffer(text, np.uint8) for text in own]) for batch, own in texts)
        return

    def encode(worker: Tokenizer, given: tuple[list[Row], list[bytes]]) -> tuple:
        return *given, worker.encode([text.decode(errors="replace") for text in given[1]])

    yield from in_order(encode, texts, tokenizer, lambda: Tokenizer(tokenizer.path), _AHEAD)


def _text(row: Row, column: str) -> bytes:
    """The document of a row."""
    if isinstance(row.value, bytes):
        return row.value
    text = row.value[column]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise BadTokens(f"{row.where}: column {column!r} must have strings, got {kind}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadTokens(f"{row.where}: column {column!r} has text that is not Unicode") from None
