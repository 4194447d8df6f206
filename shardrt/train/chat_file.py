"""Files of examples that are tokenised already: the first rank that needs one makes it, in runs/.tokens.

A safetensors file with "tokens" (uint32), "answers" (uint8, 1 for a token of an answer) and "begins" (int64:
where each example begins, and the end). Metadata: source, what made it, the largest token, XXH3-128 of all.
Training reads the tokens of a window when it needs them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardrt.train.chat import ChatFolder, Examples, read_examples
from shardrt.train.filearray import FileArray
from shardrt.train.prepare import once
from shardrt.train.records import record_files
from shardrt.train.tokens import BadTokens
from shardrt.untrusted import open_regular

__all__ = ["examples_of"]

SUFFIX = ".chat"
_FORMAT = "shardrt chat 1"
_TYPES = {"tokens": ("U32", np.uint32), "answers": ("U8", np.uint8), "begins": ("I64", np.int64)}
_CHUNK = 1 << 22  # elements that are looked at together


def examples_of(paths: Sequence[Path], folder: ChatFolder, split: str = "train") -> Examples:
    """The examples of records, or of one file that `write` has made with the same folder.

    Of records such a file is made, once for all ranks and runs, until a source or the folder changes.
    split: of folders of records that have several.

    Raises:
        BadTokens, BadRecords: naming the file and what is wrong.
        OSError: if a file can't be read.
    """
    prepared = [path for path in paths if path.suffix == SUFFIX]
    if not prepared:
        return open_examples(_made(paths, folder, split))
    if len(paths) > 1:
        raise BadTokens(f"data: a {SUFFIX} file must be the only file; pass {prepared[0]} alone")
    found = open_examples(prepared[0])
    if found.made_by != folder.name:
        raise BadTokens(f"{prepared[0]}: made by {found.made_by}, but {folder.folder} has {folder.name}")
    return found


def _made(paths: Sequence[Path], folder: ChatFolder, split: str) -> Path:
    """The file of records in runs/.tokens."""
    from xxhash import xxh3_128_hexdigest

    files = [(str(file.resolve()), file.stat()) for path in paths for file in record_files(path, split)]
    sources = [(name, found.st_size, found.st_mtime_ns) for name, found in files]
    key = xxh3_128_hexdigest(json.dumps([_FORMAT, sources, folder.name]).encode())
    name = f"{paths[0].name.split('.')[0]}-{key[:16]}{SUFFIX}"
    return once(name, lambda out: write(out, read_examples(paths, folder, split)))


def write(path: Path, examples: Examples) -> None:
    """Make a file of examples; it appears at `path` when it is whole. Raises FileExistsError, OSError."""
    from safetensors.numpy import save_file

    if path.exists():
        raise FileExistsError(17, "exists already", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    facts = {"format": _FORMAT, "source": examples.source, "made_by": examples.made_by}
    facts |= {"digest": examples.digest, "largest": str(examples.largest)}
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777  # the library would let its owner alone read it
        save_file({name: getattr(examples, name) for name in _TYPES}, temporary, facts)
        with open(temporary, "rb") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def open_examples(path: Path) -> Examples:
    """Open such a file. Raises BadTokens that names its fault; OSError if it can't be read."""
    from safetensors import SafetensorError, safe_open

    open_regular(path).close()
    try:
        with safe_open(path, "numpy") as opened:  # which checks that the tensors are all of the file
            facts = opened.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise BadTokens(f"{path}: not a file of examples ({error}); see `shardrt data chat`") from None
    if facts.get("format") != _FORMAT:
        raise BadTokens(f"{path}: not a file of format {_FORMAT!r}; make it by `shardrt data chat`")
    try:
        arrays = _arrays(path)
        words = [facts[name] for name in ("source", "digest")]
        made_by, largest = facts["made_by"], int(facts["largest"][:18])
    except (KeyError, ValueError) as error:
        raise BadTokens(f"{path}: missing or invalid header entry {error}") from None
    begins = np.asarray(arrays["begins"])
    size = arrays["tokens"].size
    fits = begins.size > 1 and begins[0] == 0 and begins[-1] == size and (np.diff(begins) >= 0).all()
    if not fits or arrays["answers"].size != size:
        raise BadTokens(f"{path}: the examples are not those of its {size} tokens; make the file again")
    return Examples(*words, arrays["tokens"], arrays["answers"], begins, largest, made_by)


def verify(path: Path) -> Examples:
    """Read all of a file. Raises BadTokens unless it is as it was made."""
    from xxhash import xxh3_128

    found, hasher, largest = open_examples(path), xxh3_128(), 0
    for array in (found.tokens, found.answers, found.begins):
        for start in range(0, array.size, _CHUNK):
            piece = np.ascontiguousarray(array[start : start + _CHUNK])
            hasher.update(piece)
            largest = max(largest, int(piece.max())) if array is found.tokens else largest
    if f"xxh3 {hasher.hexdigest()}" != found.digest or largest != found.largest:
        raise BadTokens(f"{path}: wrong checksum: the content has changed; make the file again")
    return found


def described(path: Path, found: Examples) -> str:
    """A line for the reader."""
    size, places = found.tokens.size, range(0, found.tokens.size, _CHUNK)
    answers = sum(int(np.asarray(found.answers[at : at + _CHUNK]).sum()) for at in places)
    return (
        f"{path}: {found.begins.size - 1} examples, {size} tokens, {answers / size:.1%} of them answers, "
        f"by {found.made_by}"
    )


def _arrays(path: Path) -> dict[str, FileArray]:
    """The tensors of a file whose header safetensors has checked. KeyError, ValueError for other ones."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, (kind, dtype) in _TYPES.items():
        entry = header[name]
        if entry["dtype"] != kind or len(entry["shape"]) != 1:
            raise ValueError(f"the type of its {name}: {entry['dtype']}")
        found[name] = FileArray(path, dtype, 8 + length + entry["data_offsets"][0], entry["shape"][0])
    return found
