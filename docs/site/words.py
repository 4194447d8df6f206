"""Counts the words of the pages, by section, and how long their sentences are.

    python docs/site/words.py              # the table; exit code 1 where a limit is exceeded
    python docs/site/words.py --long 20    # and the 20 longest sentences

Words are what a reader reads: prose, headings, list items, table cells, code between backticks. Code blocks,
front matter, comments, pictures and the targets of links are none. A sentence is what a full stop, question
mark or exclamation mark ends in a paragraph or a list item, or a colon at its end; headings, cells and
fragments are none.
The changelog is counted apart, and what the build generates is not here.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
MOST_IN_A_PAGE, MOST_IN_ALL, MEAN_BELOW = 2_600, 40_000, 18.0
LONG = 25  # words of a sentence that is called long
CHANGELOG = "CHANGELOG.md"

FENCE = re.compile(r" *(`{3,}|~{3,})")
ITEM = re.compile(r" *(?:[-*+]|\d+[.)]) +")
RULE = re.compile(r"\|?[\s:|-]*-[\s:|-]*\|?")  # between a table's head and its rows; a line across the page
DEFINITION = re.compile(r" {0,3}\[[^\]]+\]: +\S+.*")
# What a full stop does not end. A digit's is part of a number unless a blank follows.
SHORT = re.compile(r"\b(e\.g|i\.e|vs|etc|cf|approx|no|fig)\.(?=\s)", re.IGNORECASE)
END = re.compile(r"""(?<=[.?!])["')\]*_]*\s+(?=["'(\[*_`]*[^\s])""")
WORD = re.compile(r"\w")


@dataclass(frozen=True)
class Block:
    """A paragraph, list item, heading or table row without its markup. prose: whether it has sentences."""

    text: str
    prose: bool


@dataclass(frozen=True)
class Page:
    """A page's words, and its sentences."""

    name: str
    words: int
    sentences: tuple[str, ...]


def words_of(text: str) -> list[str]:
    """Its words: what stands between blanks and has a letter or digit."""
    return [word for word in text.split() if WORD.search(word)]


def blocks_of(markdown: str) -> list[Block]:
    """What a reader reads of a page, without code blocks."""
    blocks: list[Block] = []
    lines: list[str] = []  # of the block that is not complete

    def end(*, prose: bool = True) -> None:
        if lines:
            blocks.append(Block(plain(" ".join(lines)), prose))
            lines.clear()

    for line in _without_code(markdown):
        stripped = line.strip()
        if not stripped or DEFINITION.fullmatch(line):
            end()
        elif stripped.startswith("#"):
            end()
            lines.append(stripped.lstrip("# "))
            end(prose=False)
        elif stripped.startswith("|") or RULE.fullmatch(stripped):
            end()
            if not RULE.fullmatch(stripped):
                lines.append(stripped.replace("|", " "))
            end(prose=False)
        else:
            if marker := ITEM.match(line):
                end()
                stripped = line[marker.end() :].strip()
            lines.append(stripped.removeprefix("> "))
    end()
    return [block for block in blocks if block.text]


def _without_code(markdown: str) -> Iterator[str]:
    """The lines of a page, each code block, comment and front matter replaced by an empty line."""
    markdown = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    fence, in_list, before = "", False, ""
    for line in _without_comments(markdown).splitlines():
        if fence:
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            before = ""
            yield ""
            continue
        if opened := FENCE.match(line):
            fence = opened[1]
            yield ""
            continue
        indent = len(line) - len(line.lstrip())
        if ITEM.match(line) and indent < 4:
            in_list = True
        elif line.strip() and not indent and not before:
            in_list = False
        # Four blanks after an empty line begin code; in a list they go on with an item, and eight do.
        if line.strip() and indent >= (8 if in_list else 4) and not before:
            yield ""
            continue  # `before` stays empty: the next line may be code, too
        before = line.strip()
        yield line


def _without_comments(markdown: str) -> str:
    """Without <!-- comments -->, which may stand in code blocks, too."""
    return re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)


def plain(text: str) -> str:
    """Text of a block without targets of links, pictures, tags and emphasis."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<(https?://[^>]*|/?[a-zA-Z][^>]*)>(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", " ", text)
    text = re.sub(r"\{[.:#][^}]*\}", " ", text)
    return " ".join(text.replace("**", "").split())


def sentences_of(block: Block) -> list[str]:
    """Its sentences; what no mark ends is none."""
    if not block.prose:
        return []
    text = SHORT.sub(lambda found: found[0].replace(".", "\u2024"), block.text)
    parts = [part.replace("\u2024", ".") for part in END.split(text)]
    return [part for part in parts if re.search(r"[.?!:][\"')\]*_`]*$", part) and words_of(part)]


def read(path: Path, root: Path = DOCS) -> Page:
    """Count a page."""
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    sentences = tuple(sentence for block in blocks for sentence in sentences_of(block))
    return Page(
        path.relative_to(root).as_posix(), sum(len(words_of(block.text)) for block in blocks), sentences
    )


def section_of(page: Page) -> str:
    """The section of the site that a page is in."""
    folder, slash, _ = page.name.partition("/")
    if not slash:
        return {"README.md": "home", CHANGELOG: "changelog", "CONTRIBUTING.md": "contribute"}.get(
            folder, folder
        )
    return folder


def mean_of(pages: Sequence[Page]) -> float:
    """Words of a sentence, on average."""
    sentences = [len(words_of(sentence)) for page in pages for sentence in page.sentences]
    return sum(sentences) / max(1, len(sentences))


def faults(pages: Sequence[Page]) -> list[str]:
    """The limits that the pages exceed. The changelog has none."""
    counted = [page for page in pages if page.name != CHANGELOG]
    found = [
        f"{page.name} has {page.words:,} words, {MOST_IN_A_PAGE:,} at most"
        for page in counted
        if page.words > MOST_IN_A_PAGE
    ]
    total, mean = sum(page.words for page in counted), mean_of(counted)
    if total > MOST_IN_ALL:
        found.append(f"all pages have {total:,} words, {MOST_IN_ALL:,} at most")
    if mean >= MEAN_BELOW:
        found.append(f"the mean sentence has {mean:.1f} words, it must have fewer than {MEAN_BELOW:g}")
    return found


def table(pages: Sequence[Page]) -> str:
    """A line for each section, and one for all."""
    order = ["home", "learn", "howto", "explanation", "reference", "contribute"]
    sections: dict[str, list[Page]] = {name: [] for name in order}
    for page in pages:
        sections.setdefault(section_of(page), []).append(page)
    apart = sections.pop("changelog", [])
    counted = [page for inside in sections.values() for page in inside]
    head = f"{'section':12} {'pages':>5} {'words':>7} {'words a sentence':>17}  longest page"
    lines = [head, *(_row(name, inside) for name, inside in sections.items() if inside)]
    lines += [_row("all", counted)] if counted else []
    return "\n".join([*lines, *([_row("changelog", apart)] if apart else [])])


def _row(name: str, pages: Sequence[Page]) -> str:
    longest = max(pages, key=lambda page: page.words)
    words = sum(page.words for page in pages)
    return (
        f"{name:12} {len(pages):5} {words:7,} {mean_of(pages):17.1f}  {longest.name}, {longest.words:,} words"
    )


def long_sentences(pages: Sequence[Page], number: int) -> list[str]:
    """The longest sentences, each with its page and words."""
    found = [(len(words_of(text)), page.name, text) for page in pages for text in page.sentences]
    found.sort(key=lambda each: -each[0])
    return [f"{words:3} {name}: {text}" for words, name, text in found[:number]]


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 where the pages exceed a limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="these alone (all of docs/)")
    parser.add_argument("--long", type=int, default=0, metavar="N", help="print the N longest sentences, too")
    options = parser.parse_args(arguments)
    paths = [path.resolve() for path in options.pages] or sorted(DOCS.rglob("*.md"))
    pages = [read(path, DOCS if path.is_relative_to(DOCS) else path.parent) for path in paths]
    long = sum(len(words_of(text)) > LONG for page in pages for text in page.sentences)
    print(table(pages))
    print(f"{long:,} of {sum(len(page.sentences) for page in pages):,} sentences have more than {LONG} words")
    print(*long_sentences(pages, options.long), sep="\n", end="\n" if options.long else "")
    wrong = faults(pages)
    for line in wrong:
        print(f"too long: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
