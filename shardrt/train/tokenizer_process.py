"""The process in which the package tokenizers runs; tokenizer.py starts it, and asks it one thing at a time.

A tokenizer.json can make that library panic, abort, or take all memory and time. Here that ends this process
alone, within limits that it sets itself before it loads anything. Imports nothing of shardrt, which takes
longer to import than a tokenizer.
"""

import json
import os
import resource
import signal
import sys
from array import array
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

_PRINTED = 1 << 20  # bytes of complaints
_MEMORY, _FOR_A_BYTE = 2 << 30, 400  # bytes it may have, and more for each byte of what it works on
_SECONDS, _IN_A_SECOND = 60.0, 20_000  # of processor time, and bytes that it does in a further one at least


def seconds(size: int) -> float:
    """Of processor time that it may take for so many bytes."""
    return _SECONDS + size / _IN_A_SECOND


def main() -> None:
    """Answer what comes on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    _limit(resource.RLIMIT_FSIZE, _PRINTED)
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tokenizer = None
    while (request := receive(sys.stdin.buffer)) is not None:
        wanted = json.loads(request)
        _limit(resource.RLIMIT_DATA, _MEMORY + _FOR_A_BYTE * wanted["size"])
        signal.setitimer(signal.ITIMER_PROF, seconds(wanted["size"]))  # then SIGPROF, the end
        try:
            if wanted["do"] == "load":
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_str(wanted["with"])
                # What such files say of batches for one model would cut or fill documents.
                tokenizer.no_truncation()
                tokenizer.no_padding()
            answer, more = _answer(tokenizer, wanted["do"], wanted["with"])
        except BaseException as error:  # a panic of Rust is no Exception, and nothing more exact is said
            answer, more = {"error": str(error) or type(error).__name__}, b""
        send(answers, json.dumps(answer).encode())
        send(answers, more)
        answers.flush()


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(tokenizer: Any, do: str, given: Any) -> tuple[dict[str, Any], bytes]:
    """A message as JSON, and numbers."""
    if do == "load":  # ids may have holes: the bound of all ids is not their count
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        return {"is": 1 + max(ids, default=-1)}, b""
    if do == "token":
        return {"is": tokenizer.token_to_id(given)}, b""
    if do == "decode":
        return {"is": tokenizer.decode(given)}, b""
    if do == "chat":
        return _chat_template().answer(tokenizer, given)
    found = [encoded.ids for encoded in tokenizer.encode_batch(given, add_special_tokens=False)]
    ids = array("I")
    for own in found:
        ids.extend(own)
    return {"is": [len(own) for own in found]}, ids.tobytes()


def _chat_template() -> ModuleType:
    """The module next to this file, which has no package here. It imports jinja2."""
    name = "chat_template"
    if name not in sys.modules:
        found = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def send(file: BinaryIO, data: bytes) -> None:
    """Write the bytes behind their number."""
    file.write(len(data).to_bytes(8, "little"))
    file.write(data)


def receive(file: BinaryIO) -> bytes | None:
    """The message; None at the end, also in the middle of a message."""
    head = file.read(8)
    size = int.from_bytes(head, "little")
    data = file.read(size) if len(head) == 8 else b""
    return data if len(head) == 8 and len(data) == size else None


if __name__ == "__main__":
    main()
