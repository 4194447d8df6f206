"""`python -m shardrt data`: make and check token files.

Each record of JSON lines, Parquet, Arrow or a folder of them is a document; any other file is one document.
"""

import argparse
from pathlib import Path
from typing import Any

from shardrt.train import chat_file
from shardrt.train.chat import ChatFolder
from shardrt.train.prepare import Preparation, make_tokens
from shardrt.train.tokens import SUFFIX, BadTokens, TokenFile, open_tokens, verify
from shardrt.untrusted import say


def add_to(commands: Any) -> None:
    """Add `data` and its own commands to argparse's subparsers."""
    group = commands.add_parser("data", help="token files", description=__doc__.split("\n")[0])
    actions = group.add_subparsers(title="commands", required=True)
    made = actions.add_parser("make", help="tokenise text", description=__doc__.split("\n")[-2])
    made.set_defaults(run=make)
    made.add_argument("file", metavar=f"OUT{SUFFIX}", type=Path, help="a name that does not exist yet")
    made.add_argument("texts", metavar="TEXT", type=Path, nargs="+")
    made.add_argument("--tokenizer", metavar="tokenizer.json", type=Path, help="bytes if not given")
    made.add_argument("--end", metavar="TOKEN", help="put behind each document, as <|endoftext|>")
    made.add_argument("--column", "--field", default="text", help="of records: what is a document (text)")
    made.add_argument("--split", default="train", help="of folders that have several (train)")
    talks = actions.add_parser("chat", help="tokenise conversations", description=chat.__doc__)
    talks.set_defaults(run=chat)
    talks.add_argument(
        "file", metavar=f"OUT{chat_file.SUFFIX}", type=Path, help="a name that does not exist yet"
    )
    talks.add_argument("records", metavar="RECORDS", type=Path, nargs="+", help="JSON lines, Parquet, ...")
    talks.add_argument("--split", default="train", help="of folders that have several (train)")
    talks.add_argument("--init-from", metavar="FOLDER", type=Path, required=True, help="with the template")
    talks.add_argument("--chat-template", metavar="FILE", type=Path, help="in place of the folder's own")
    checked = actions.add_parser("check", help="read every token, and say what is in the file")
    checked.set_defaults(run=check)
    checked.add_argument("file", metavar=f"FILE{SUFFIX}", type=Path, help=f"or FILE{chat_file.SUFFIX}")
    checked.add_argument("--vocabulary", type=int, metavar="N", help="of a model: every token must be below")


def make(options: argparse.Namespace) -> int:
    """Write a token file."""
    if options.file.suffix != SUFFIX:
        raise BadTokens(f"{options.file}: the name must end in {SUFFIX}")
    how = Preparation(options.tokenizer, options.end or "", options.column, options.split)
    file = make_tokens(options.file, options.texts, how)
    say(_reported(file))
    return 0


def chat(options: argparse.Namespace) -> int:
    """Write a file of conversations, tokenised by the chat template of a folder, for text.chat."""
    if options.file.suffix != chat_file.SUFFIX:
        raise BadTokens(f"{options.file}: the name must end in {chat_file.SUFFIX}")
    folder = ChatFolder(options.init_from, template=options.chat_template)
    made = chat_file.make(options.file, options.records, folder, options.split)
    say(chat_file.described(options.file, made))
    return 0


def check(options: argparse.Namespace) -> int:
    """Verify a token file, or one of conversations."""
    if options.file.suffix == chat_file.SUFFIX:
        say(f"{chat_file.described(options.file, chat_file.verify(options.file))}, whole")
        return 0
    file = open_tokens(options.file)
    verify(file)
    if options.vocabulary is not None:
        file.check_vocabulary(options.vocabulary)
    say(f"{_reported(file)}, whole")
    return 0


def _reported(file: TokenFile) -> str:
    return (
        f"{file.path}: {file.tokens.size} tokens of {file.tokens.dtype} in {file.documents.size} documents, "
        f"{file.bytes} bytes of text ({file.bytes / file.tokens.size:.2f} a token), "
        f"vocabulary {file.vocabulary} ({file.tokenizer}), largest {file.largest}"
    )
