"""Files of examples that are tokenised already: the first rank that needs one makes it, in runs/.tokens.

A safetensors file with "tokens" (uint32), "answers" (uint8, 1 for a token of an answer) and "begins" (int64:
where each example begins, and the end). Metadata: source, what made it, the largest token, XXH3-128 of all.
Training reads the tokens of a window when it needs them.
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from shardrt.train.chat import ChatFolder, Examples, tokenised
from shardrt.train.filearray import FileArray
from shardrt.train.prepare import once
from shardrt.train.reading import Progress, made_from
from shardrt.train.screen import Screen
from shardrt.train.tokens import BadTokens
from shardrt.train.unfinished import Unfinished
from shardrt.untrusted import open_regular

__all__ = ["examples_of"]

SUFFIX = ".chat"
_FORMAT = "shardrt chat 1"
_TYPES = {"tokens": ("U32", np.uint32), "answers": ("U8", np.uint8), "begins": ("I64", np.int64)}
_CHUNK = 1 << 22  # elements that are looked at together


def examples_of(paths: Sequence[Path], folder: ChatFolder, split: str = "train") -> Examples:
    """The examples of records, or of one file that `make` has made with the same folder.

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
    key = made_from(paths, split, _FORMAT, folder.name)
    name = f"{paths[0].name.split('.')[0]}-{key[:16]}{SUFFIX}"
    return once(name, lambda out: make(out, paths, folder, split))


def make(out: Path, paths: Sequence[Path], folder: ChatFolder, split: str = "train") -> Examples:
    """Make a file of examples; it appears at `out` when it is whole. A killed process's work goes on.

    split: of folders of records that have several.

    Raises:
        FileExistsError: for an `out` that exists.
        BadTokens, BadRecords: naming the file, the line and what is wrong.
        Refused: if another process is making the file.
        OSError: if the file system fails; called again, it goes on.
    """
    source = made_from(paths, split, _FORMAT, folder.name, version("tokenizers"), version("jinja2"))
    file = Unfinished(out, source, {name: dtype for name, (_, dtype) in _TYPES.items()})
    facts, screen = dict(file.facts), Screen()
    try:
        with screen.moving():
            progress = Progress(screen, paths, max(0, file.size("begins") - 1))
            if not file.size("begins"):
                file.append("begins", np.zeros(1, np.int64))
            for batch, tokens, answers in tokenised(paths, folder, split, facts.get("place", ())):
                ends = file.size("tokens") + np.cumsum([own.size for own in tokens])
                file.append("begins", ends)
                file.append("tokens", np.concatenate(tokens))
                file.append("answers", np.concatenate(answers))
                said = facts.get("answers", 0) + sum(int(own.sum()) for own in answers)
                largest = max(facts.get("largest", 0), *(int(own.max(initial=0)) for own in tokens))
                facts = {"answers": said, "largest": largest, "place": batch[-1].place}
                file.keep(facts)
                progress.show(batch)
        names = ", ".join(map(str, paths))
        if not file.size("tokens"):
            raise BadTokens(f"{names}: no records with a text")
        if not facts["answers"]:
            raise BadTokens(f"{names}: {folder.path}: no record has a token of an answer")
        known = {"format": _FORMAT, "source": _shortened(names), "made_by": folder.name}
        known |= {"largest": str(facts["largest"])}
        file.finish(lambda digest: known | {"digest": f"xxh3 {digest}"})
    except ValueError:
        file.remove()
        raise
    except BaseException:
        file.close()
        raise
    finally:
        folder.tokenizer.close()
    return open_examples(out)


def _shortened(names: str) -> str:
    return names if len(names) < 1000 else f"{names[:1000]}..."


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
