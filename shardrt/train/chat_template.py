"""Chat templates of Hugging Face: jinja2 in its sandbox, with the environment that transformers gives them.

A template may be anybody's program. It runs in the process of tokenizer_process.py, within that process's
limits and a limit of time and text for each record. Imports nothing of shardrt, and that process loads it by
its path. chat.py asks.
"""

import json
import os
import re
import signal
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST = 1 << 24  # characters that a template makes of a record
# Around what {% generation %} marks. The number is another in each process, so no record can hold these.
_OPEN, _CLOSE = (f"\ue000{os.urandom(8).hex()}{end}" for end in "+-")
_REASONING = ("reasoning_content", "thinking", "reasoning")

Spans = list[tuple[int, int]]  # characters of a text, as slices


class Unusable(Exception):
    """A record that the template makes no example of."""


class _Late(BaseException):  # no `except Exception` on its way may hold it up
    pass


def answer(tokenizer: Any, given: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Tokens of records, and which of them are answers.

    Args:
        given: "template": its text, or None; "special": names of special tokens -> texts; "records", as
            chat.conversation makes them; "prompt": they are prompts, behind which the model goes on;
            "seconds": of processor time for each.

    Returns:
        ({"sizes": tokens of each record, "special": ids of special tokens, "refused": None, or the number of
        the first record that can't be used and why; -1: the template}, ids as uint32 and then a byte for
        each token, 1 for an answer).
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {number: str(token.content) for number, token in added.items() if token.special}
    texts, spans, refused, number = [], [], None, -1
    try:
        template = None
        if given["template"] is not None:
            with _limited(given["seconds"]):
                template = Template(given["template"], given["special"])
        for record in given["records"]:
            number += 1
            with _limited(given["seconds"]):
                if "messages" not in record:
                    text, own = _plain(tokenizer, record, given["special"])
                elif given.get("prompt"):
                    text, own = template.rendered(record["messages"], True, record.get("tools"))[0], []
                else:
                    text, own = template.example(record, tuple(special.values()))
                text.encode()  # half a surrogate is no text
            texts.append(text)
            spans.append(own)
    except BaseException as error:  # of any kind: the template is a program
        refused = [number, _described(error)]
    ids, answers, sizes = array("I"), bytearray(), []
    for found, own in zip(tokenizer.encode_batch(texts, add_special_tokens=False), spans, strict=True):
        sizes.append(len(found.ids))
        ids.extend(found.ids)
        answers += _overlapping(found.offsets, own)
    return {"is": {"sizes": sizes, "special": list(special), "refused": refused}}, ids.tobytes() + bytes(
        answers
    )


class Template:
    """A compiled chat template, and the texts of special tokens that it may name."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self._template, self._special = _compiled(source), special
        self._parts: bool | None = None  # not known yet
        self.marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    def rendered(self, messages: list[dict], more: bool, tools: Any = None) -> tuple[str, Spans]:
        """(the text of messages, what is marked in it). more: with the beginning of an answer behind it."""
        pieces, size = [], 0
        shown = [_message(each) for each in messages]
        if any(isinstance(each.get("content"), list) for each in shown) and not self._reads_parts():
            shown = [_joined(each) for each in shown]
        given = {**self._special, "messages": shown}
        given |= {"tools": tools, "documents": None, "add_generation_prompt": more}
        for piece in self._template.generate(**given):
            size += len(piece)
            if size > LONGEST:
                raise Unusable(f"the template makes more than {LONGEST} characters of it")
            pieces.append(piece)
        return _unmarked("".join(pieces))

    def _reads_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts, and not the list."""
        if self._parts is None:
            probe = {"role": "user", "content": [{"type": "text", "text": "shardrt"}]}
            given = {**self._special, "messages": [probe], "tools": None, "documents": None}
            try:
                text = "".join(self._template.generate(**given, add_generation_prompt=False))
            except Exception:  # of any kind: the template is a program
                text = ""
            self._parts = "shardrt" in text and re.search(r"""text['"]\s*:""", text) is None
        return self._parts

    def example(self, record: dict[str, Any], ends: tuple[str, ...]) -> tuple[str, Spans]:
        """(the text of a conversation, its answers). ends: texts of special tokens."""
        messages, tools = record["messages"], record.get("tools")
        text, marked = self.rendered(messages, False, tools)
        turns = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
        wanted = record["answers"]
        if self.marks:
            if wanted == turns:
                return text, marked
            if len(marked) != len(turns):
                raise Unusable("the template does not mark each answer once, so none can be left out")
            return text, [span for span, turn in zip(marked, turns, strict=True) if turn in wanted]
        return text, [_without_tail(text, self._turn(text, messages, turn, tools), ends) for turn in wanted]

    def _turn(self, text: str, messages: list[dict], turn: int, tools: Any) -> tuple[int, int]:
        """Where a turn is: behind what is rendered before it, which must be how the whole text begins."""
        before = self.rendered(messages[:turn], True, tools)[0]
        through = self.rendered(messages[: turn + 1], False, tools)[0]
        if not (text.startswith(through) and through.startswith(before)):
            raise Unusable(
                f"message {turn + 1}: the template writes earlier messages otherwise when later ones follow, "
                "so the answer can't be found in the text; mark answers with {% generation %} in the template"
            )
        return len(before), len(through)


def _plain(tokenizer: Any, record: dict[str, str], special: dict[str, str]) -> tuple[str, Spans]:
    """A prompt and its completion, without a template: between the tokenizer's own first and last token."""
    begin, end = special.get("bos_token", ""), special.get("eos_token", "")
    if not end:
        raise Unusable("a completion needs an end: tokenizer_config.json has no eos_token")
    if not begin or tokenizer.encode("").ids[:1] != [tokenizer.token_to_id(begin)]:
        begin = ""
    before = begin + record["prompt"]
    text = before + record["completion"] + end
    return text, [(len(before), len(text))]


def _without_tail(text: str, span: tuple[int, int], ends: tuple[str, ...]) -> tuple[int, int]:
    """A turn without the white space behind the token that ends it, which no model has to say."""
    first, last = span
    turn = text[first:last].rstrip()
    return (first, first + len(turn)) if ends and turn.endswith(ends) else span


def _overlapping(offsets: list[tuple[int, int]], spans: Spans) -> bytearray:
    """A byte for each token: 1 where it has a character of a span."""
    found, place = bytearray(len(offsets)), 0
    for number, (first, last) in enumerate(offsets):
        while place < len(spans) and first >= spans[place][1]:
            place += 1
        if place == len(spans):
            break
        found[number] = last > spans[place][0]
    return found


def _unmarked(text: str) -> tuple[str, Spans]:
    """The text without marks, and where they were."""
    head, *rest = text.split(_OPEN)
    pieces, size, spans = [head], len(head), []
    for part in rest:
        inside, closed, outside = part.partition(_CLOSE)
        if not closed:
            raise Unusable("the template's {% generation %} blocks lie in one another")
        spans.append((size, size + len(inside)))
        pieces += [inside, outside]
        size += len(inside) + len(outside)
    return "".join(pieces), spans


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As transformers passes a message: no key is None, and reasoning has the names that templates read."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text, for templates that know no parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: around what the model has said."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Namespace(Namespace):
    """jinja2's, without names that are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *more = args
        for name in dict(*more, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *more, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The type dict, of which a template gets these two functions alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace can't have the name {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's escapes of HTML."""
    how = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, **how)


@lru_cache(8)
def _compiled(source: str) -> Any:
    given = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [_Generation, loopcontrols]}
    environment = ImmutableSandboxedEnvironment(**given)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """A block that gets this much processor time, in whatever function of Python it spends it."""
    signal.signal(signal.SIGVTALRM, _late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _late(*_: Any) -> None:
    raise _Late


def _described(error: BaseException) -> str:
    if isinstance(error, _Late):
        return "the template takes too much time"
    if isinstance(error, MemoryError | RecursionError):
        return "the template takes too much memory"
    text = str(error) or type(error).__name__
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno} of the template: {text}"
    return text if isinstance(error, TemplateError | Unusable) else f"{type(error).__name__}: {text}"
