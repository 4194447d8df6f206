"""Text as bytes: a corpus from files, its held-out end, and batches that are functions of a sample's number.

Token i is the i-th byte, so there is nothing to train, download or save before training. Sample n of a run
is the same window of text at every world size and batch size.
"""

import gzip
import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

VOCABULARY = 256
IGNORED = -100  # the target that F.cross_entropy leaves out
HELD_OUT = 20  # the last 1/20 of the text is never trained on

# Folders that are no library code, or tables (encodings), or differ between machines with the same Python.
_LEFT_OUT = {"dist-packages", "encodings", "idle_test", "idlelib", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Corpus:
    """Text in two parts, and where it is from."""

    source: str
    sha256: str  # of the whole text
    train: np.ndarray  # uint8
    held_out: np.ndarray  # uint8

    def gzip_bits_per_byte(self) -> float:
        """What gzip -9 makes of the held-out text: a figure to compare a model with."""
        return 8 * len(gzip.compress(self.held_out.tobytes(), 9)) / self.held_out.size


def load_corpus(files: Sequence[Path] = (), *, block_size: int) -> Corpus:
    """The text of `files`, one after the other; of the .py files of Python's own library if there are none.

    Raises ValueError, naming the file, for one that is missing, empty or no file, and where a part of the
    text is shorter than one window of `block_size` tokens and a target; OSError for one that can't be read.
    """
    if files:
        source, texts = ", ".join(map(str, files)), [_read(Path(file)) for file in files]
    else:
        source, texts = f"Python {platform.python_version()} standard library", _standard_library()
    text = b"".join(texts)
    cut = len(text) - len(text) // HELD_OUT
    if len(text) - cut <= block_size:
        raise ValueError(
            f"data: {source} has {len(text)} bytes, too short: windows of {block_size} tokens, "
            f"with 1/{HELD_OUT} held out, need {HELD_OUT * (block_size + 1)}"
        )
    tokens = np.frombuffer(text, np.uint8)
    return Corpus(source, hashlib.sha256(text).hexdigest(), tokens[:cut], tokens[cut:])


def training_batch(
    text: np.ndarray, step: int, batch_size: int, block_size: int, *, seed: int, rank: int = 0, size: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """This rank's tokens and targets, int64 (batch_size / size, block_size), of a global batch.

    Step s takes samples [s * batch_size, (s + 1) * batch_size), of which each rank has an equal, contiguous
    part. Raises ValueError if there is no equal part.
    """
    if batch_size % size:
        raise ValueError(
            f"batch_size {batch_size} cannot be divided by {size} ranks; take a multiple of {size}"
        )
    share = batch_size // size
    first = step * batch_size + rank * share
    starts = [window_start(text.size, sample, block_size, seed) for sample in range(first, first + share)]
    return _windows(text, starts, block_size)


def window_start(length: int, sample: int, block_size: int, seed: int) -> int:
    """Where sample number `sample` begins: each epoch takes all windows once, in another order.

    An epoch also moves the windows by another offset, so that they are cut elsewhere.
    """
    offset_range = min(block_size, length - block_size)
    count = (length - offset_range) // block_size
    epoch, index = divmod(sample, count)
    offset, order = _epoch(seed, epoch, count, offset_range)
    return offset + int(order[index]) * block_size


def held_out_batches(
    text: np.ndarray,
    batch_size: int,
    block_size: int,
    *,
    windows: int | None = None,
    rank: int = 0,
    size: int = 1,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's (tokens, targets), int64 (batch_size, block_size), over neighbouring windows of the text.

    windows: how many, spread evenly over the text; all if None, which makes every byte but the first, and the
    few behind the last whole window, a target once. Every rank gets as many batches, since the forward of a
    sharded model is collective; rows beyond the last window have only IGNORED targets.
    """
    count = (text.size - 1) // block_size
    taken = count if windows is None else min(windows, count)
    chosen = np.arange(taken) * count // taken
    for first in range(0, taken, batch_size * size):
        mine = chosen[first + rank * batch_size :][:batch_size]
        padded = np.concatenate([mine, np.zeros(batch_size - mine.size, np.int64)])
        tokens, targets = _windows(text, (padded * block_size).tolist(), block_size)
        targets[mine.size :] = IGNORED
        yield tokens, targets


def _windows(text: np.ndarray, starts: Sequence[int], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.stack([text[start : start + block_size + 1] for start in starts]).astype(np.int64)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


@lru_cache(2)
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
    return content


def _standard_library() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [name for name in names if _is_library_code(name)]
    if not kept:
        raise ValueError(
            f"data: no sources of Python's library in {root}; give text files with --data FILE ..."
        )
    return [(root / name).read_bytes() for name in kept]


def _is_library_code(name: str) -> bool:
    *folders, file = name.split("/")
    made_by_installer = file.startswith("_sysconfigdata") or file == "sitecustomize.py"
    return not made_by_installer and not any(f in _LEFT_OUT or f.startswith("config-") for f in folders)
