"""Conversations to fine-tune on: records become examples, of which the answers alone are targets.

A record is {"messages": [{"role", "content"}, ...]} as OpenAI and TRL have it, {"conversations": [{"from",
"value"}, ...]} as ShareGPT has it, or {"prompt", "completion"}: two texts, or two lists of messages. The
tokenizer and the chat template are those of a folder of Hugging Face.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.train.filearray import FileArray
from shardrt.train.reading import Row, batches, rows, size_of
from shardrt.train.tokenizer import Tokenizer
from shardrt.train.tokens import BadTokens
from shardrt.train.workers import in_order
from shardrt.untrusted import read_regular, strict_json

__all__ = ["TEMPLATE", "ChatFolder", "Examples", "TooLong", "fitted", "tokenised"]

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE, CONFIG, SPECIAL = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHAREGPT = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_SHAREGPT |= {"observation": "tool"}
_SHAREGPT_KEYS = {"from": "role", "value": "content"}
_LARGEST = {TEMPLATE: 1 << 20, CONFIG: 64 << 20}  # bytes
SECONDS = 5.0  # of processor time for what the template makes of a record
_BATCH = 1 << 19  # characters of records that go to the tokenizer together
_MOST = 8  # processes that render and tokenise, if there are cores for them
_TOGETHER = 1 << 14  # examples that are looked at together

Record = dict[str, Any]


class TooLong(Enum):
    """What to do about an example that is longer than a window."""

    truncate = "truncate"
    skip = "skip"


class ChatFolder:
    """The tokenizer and the chat template of a folder of Hugging Face.

    `name`: the tokenizer's, with the hashes of both.

    Raises:
        BadTokens: naming the file, for what can't be used.
        OSError: for what can't be read.
    """

    def __init__(self, folder: Path, *, tokenizer: Path | None = None, template: Path | None = None) -> None:
        """tokenizer, template: other files than the folder's."""
        if find_spec("jinja2") is None:
            raise BadTokens("chat templates need the package jinja2: pip install 'shardrt[chat]'")
        self.folder = folder
        self.tokenizer = Tokenizer(tokenizer or folder / "tokenizer.json")
        config = self._settings(CONFIG)
        self._special = _special_tokens(self._settings(SPECIAL) | config)
        self.path, self._templates = self._found(template, config)
        given = json.dumps([self._special, self._templates], sort_keys=True).encode()
        self.name = f"{self.tokenizer.name}, template sha256 {hashlib.sha256(given).hexdigest()[:16]}"

    def another(self) -> "ChatFolder":
        """The same, with a process of its own."""
        found = copy(self)
        found.tokenizer = Tokenizer(self.tokenizer.path)
        return found

    def _settings(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.exists():
            return {}
        try:
            found = strict_json(read_regular(path, _LARGEST[CONFIG]), any_number=True)
        except ValueError as error:
            raise BadTokens(f"{path}: not JSON as it should be ({error})") from None
        if not isinstance(found, dict):
            raise BadTokens(f"{path}: expected a JSON object, got a {type(found).__name__}")
        return found

    def _found(self, given: Path | None, config: dict[str, Any]) -> tuple[Path, dict[str, str]]:
        """(the file of the template, name -> text), {} if there is none."""
        path = given or self.folder / TEMPLATE
        if given or path.exists():
            try:
                return path, {"default": read_regular(path, _LARGEST[TEMPLATE]).decode()}
            except UnicodeDecodeError as error:
                raise BadTokens(f"{path}: not a chat template ({error})") from None
        path, found = self.folder / CONFIG, config.get("chat_template")
        if found is None:
            return path, {}
        try:
            named = (
                {"default": found} if isinstance(found, str) else {t["name"]: t["template"] for t in found}
            )
        except (TypeError, KeyError):
            named = {}
        if not named or not all(isinstance(each, str) for pair in named.items() for each in pair):
            raise BadTokens(
                f"{path}: chat_template must be a text, or a list of objects with name and template"
            )
        return path, named

    def encode(
        self, records: Sequence[Record], places: Sequence[str], *, prompt: bool = False
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
        """Tokens of records, and which of them are answers.

        Args:
            records: as `conversation` gives them.
            places: their names, for messages.
            prompt: they are prompts, behind which the model goes on.

        Returns:
            (ids of each record, uint32; of each a uint8 that is 1 for each token of an answer; the ids of
            special tokens).
        """
        size = sum(size_of(record) for record in records)
        what = f"{places[0]} to {places[-1]}: {self.path}: the template or the tokenizer crashed"
        given = {"records": list(records), "special": self._special, "prompt": prompt}
        given["seconds"] = SECONDS
        given["template"] = self._template(records, places)
        facts, ids, answers = self.tokenizer.chat(given, size, what)
        if facts["refused"]:
            number, why = facts["refused"]
            raise BadTokens(f"{places[number]}: {self.path}: {why}" if number >= 0 else f"{self.path}: {why}")
        borders = np.cumsum(facts["sizes"])[:-1]
        return np.split(ids, borders), np.split(answers, borders), facts["special"]

    def _template(self, records: Sequence[Record], places: Sequence[str]) -> str | None:
        """The text of the template; None where no record needs it."""
        needs = next(
            (place for record, place in zip(records, places, strict=True) if "messages" in record), ""
        )
        if not needs:
            return None
        tools = any("tools" in record for record in records)
        chosen = "tool_use" if tools and "tool_use" in self._templates else "default"
        if chosen not in self._templates:
            raise BadTokens(
                f"{needs}: messages need a chat template, and {self.folder} has none in {TEMPLATE} or "
                f"{CONFIG}; pass --text.chat-template FILE"
            )
        return self._templates[chosen]

    def prompt(self, messages: Sequence[dict[str, str]]) -> np.ndarray:
        """The tokens of messages and the beginning of an answer, uint32."""
        (ids,), _, _ = self.encode([{"messages": list(messages)}], ["the prompt"], prompt=True)
        return ids

    def end_of_turn(self) -> list[int]:
        """The special token that ends an answer, as the template writes it; [] if it writes none."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            (ids,), (answers,), special = self.encode(
                [{"messages": talk, "answers": [1]}], ["a conversation"]
            )
        except BadTokens:  # one that needs other messages
            return []
        said = ids[answers == 1].tolist()
        return said[-1:] if said and said[-1] in special else []


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens that templates may name."""
    found = {name: config.get(name) for name in _NAMES}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def conversation(record: Record, place: str) -> Record:
    """A record in the form that chat_template.py takes. Raises BadTokens, naming its place, for what is none.

    {"messages", "answers": the numbers of those that are targets}, with "tools" where it has them; or
    {"prompt", "completion"}.
    """
    record = {name: value for name, value in record.items() if value is not None}  # tables have all columns
    if "chat_template_kwargs" in record:
        raise BadTokens(f"{place}: chat_template_kwargs are not read; write them into the template")
    if "messages" in record:
        messages, first = _messages(record["messages"], "messages", place), 0
    elif "conversations" in record:
        messages, first = _messages(record["conversations"], "conversations", place), 0
        if isinstance(record.get("system"), str) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": record["system"]}, *messages]
    elif "prompt" in record and "completion" in record:
        parts = {name: record[name] for name in ("prompt", "completion")}
        if all(isinstance(each, str) for each in parts.values()):
            return parts
        before, after = (_messages(each, name, place) for name, each in parts.items())
        messages, first = before + after, len(before)
    else:
        keys = ", ".join(repr(key[:40]) for key in list(record)[:5]) or "none"
        raise BadTokens(
            f"{place}: expected 'messages', 'conversations', or 'prompt' and 'completion'; got {keys}"
        )
    answers = [
        number
        for number, each in enumerate(messages)
        if number >= first and each["role"] == "assistant" and each.get("weight", 1) != 0
    ]
    if not answers:
        raise BadTokens(f"{place}: no message of the assistant to learn from")
    tools = _tools(record.get("tools"), place)
    return {"messages": messages, "answers": answers} | ({"tools": tools} if tools else {})


def _tools(found: Any, place: str) -> list[dict] | None:
    """A list of objects, or its JSON, as tables have it."""
    if isinstance(found, str) and found.strip():
        try:
            found = strict_json(found)
        except ValueError as error:
            raise BadTokens(f"{place}: tools must be a list or its JSON ({error})") from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadTokens(f"{place}: tools must be a list of objects, or its JSON")
    return found


def _messages(found: Any, name: str, place: str) -> list[dict]:
    if not isinstance(found, list) or not found:
        raise BadTokens(f"{place}: {name} must be a list of messages, not empty")
    return [_message(each, f"{place}: message {number}") for number, each in enumerate(found, start=1)]


def _message(message: Any, where: str) -> dict:
    """A message with role and content, whose texts are texts or lists of parts."""
    if not isinstance(message, dict):
        raise BadTokens(f"{where}: expected an object with role and content, got a {type(message).__name__}")
    message = {_SHAREGPT_KEYS.get(key, key): value for key, value in message.items() if value is not None}
    role = message.get("role")
    message["role"] = role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise BadTokens(f"{where}: role must be one of {', '.join(ROLES)}, got {str(role)[:40]!r}")
    if (weight := message.get("weight", 1)) not in (0, 1):
        raise BadTokens(f"{where}: weight must be 0 or 1, got {str(weight)[:40]!r}")
    calls, content = message.get("tool_calls"), message.get("content")
    if calls and (not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls)):
        raise BadTokens(f"{where}: tool_calls must be a list of objects")
    if isinstance(content, list) and content:
        message["content"] = [_part(part, where) for part in content]
    elif not isinstance(content, str) and not (content is None and calls):
        raise BadTokens(f"{where}: content must be a text, got a {type(content).__name__}")
    return message


def _part(part: Any, where: str) -> dict:
    """A text that is a part of a message's content."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise BadTokens(f"{where}: content has a part of type {str(kind)[:40]!r}; only texts are learnt")
    if not isinstance(part.get("text"), str):
        raise BadTokens(f"{where}: content has a part of type 'text' without a text")
    return {"type": "text", "text": part["text"]}


@dataclass(frozen=True, eq=False)
class Examples:
    """Tokens of conversations, one after the other."""

    source: str
    digest: str  # of all arrays
    tokens: np.ndarray | FileArray  # 1-D, uint32
    answers: np.ndarray | FileArray  # uint8 of that shape: 1 for a token of an answer
    begins: np.ndarray  # int64: where each example begins, and the end
    largest: int  # of the tokens
    made_by: str  # ChatFolder.name


def tokenised(
    paths: Sequence[Path], folder: ChatFolder, split: str = "train", place: Sequence[int] = ()
) -> Iterator[tuple[list[Row], list[np.ndarray], list[np.ndarray]]]:
    """Records in batches, with the tokens of each (uint32), and which of them are answers (uint8).

    Deterministic, unless the template asks for the date.

    Args:
        split: of folders of records that have several.
        place: of the Row at which an earlier reading ended.

    Raises:
        BadTokens, BadRecords: naming the file, the line and what is wrong.
        OSError: if a file can't be read.
    """

    def encode(worker: ChatFolder, batch: list[Row]) -> tuple:
        ids, answers, _ = worker.encode([row.value for row in batch], [row.where for row in batch])
        return batch, ids, answers

    read = rows(paths, None, split, place, texts=False)
    found = (replace(row, value=conversation(row.value, row.where)) for row in read)
    most = min(_MOST, len(os.sched_getaffinity(0)))
    yield from in_order(encode, batches(found, _BATCH), folder, folder.another, most)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Examples as windows of some room can take them. Arrays have a place for each that is left."""

    begins: np.ndarray  # int64: the first token
    sizes: np.ndarray  # int64: inputs, from the first token to the one before the last answer's
    answers: np.ndarray  # int64: how many targets
    truncated: int
    skipped: int  # too long, or without an answer


def fitted(examples: Examples, room: int, too_long: TooLong) -> Fitted:
    """Examples cut behind their last answer that a window of `room` inputs can hold.

    An example of n tokens has n - 1 inputs, whose targets are the tokens that follow.
    """
    parts, truncated = [], 0
    for at in range(0, examples.begins.size - 1, _TOGETHER):
        borders = examples.begins[at : at + _TOGETHER + 1]
        begins, ends, base = borders[:-1], borders[1:], borders[0]
        places = base + np.flatnonzero(np.asarray(examples.answers[base : borders[-1]]) == 1)
        places = places[~np.isin(places, begins)]  # what is predicted from nothing is no target
        whole = _last(places, begins, ends)
        long = whole - begins > room
        stops = _last(places, begins, np.minimum(ends, begins + room + 1))
        if too_long is TooLong.skip:
            stops = np.where(long, begins, stops)
        kept = stops > begins
        truncated += int((long & kept).sum())
        first, last = np.searchsorted(places, (begins, stops + 1))
        parts.append(np.stack([begins, stops - begins, last - first])[:, kept])
    found = np.concatenate(parts, axis=1)
    return Fitted(*found, truncated, examples.begins.size - 1 - found.shape[1])


def _last(places: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The last of ascending places in each [begin, end); the begin where there is none."""
    number = np.searchsorted(places, ends) - 1
    found = places[np.maximum(number, 0)] if places.size else begins
    return np.where((number >= 0) & (found > begins), found, begins)
