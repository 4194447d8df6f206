"""What mkdocs asks for beside the pages: sources that they link to, the API, the options, the command line.

All of it is generated while the site is built, below `source/` and `reference/`; nothing is committed. A page
links to a file outside docs/ by its relative path, as a forge shows it, and `on_page_markdown` sends the link
to a page of the site with that file's text.
"""

import argparse
import importlib
import inspect
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from shardrt import __main__ as command_line
from shardrt.train import options as train_options

os.environ["COLUMNS"] = "90"  # of argparse's help

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = "source"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(#[^)\s]*)?(?=\))")
LARGEST = 200_000  # bytes of a file that is shown in full
QUIET = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n\n"
BEHIND = (
    "---\nsearch: {boost: 0.5}\n---\n"  # what a search finds here comes after the pages that people wrote
)
LANGUAGES = {
    ".py": "python",
    ".md": "markdown",
    ".toml": "toml",
    ".json": "json",
    ".cu": "cuda",
    ".cuh": "cuda",
}

API = "reference/api/README.md"  # lists the packages that have a page
LISTED = re.compile(r"^\| \[(shardrt[\w.]*)\]\(([^)]+)\)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page for each package behind the page of the API."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    pages = next(section["API"] for section in reference if "API" in section)
    pages += [{package: api_page(package)} for package in packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the API, and those of all files that some page links to."""
    for package in packages():
        files.append(File.generated(config, api_page(package), content=api(package)))
    wanted = {target for page in DOCS.rglob("*.md") for target in outside(page)}
    shown: set[Path] = set()
    while wanted:
        target = wanted.pop()
        shown.add(target)
        if target.suffix == ".md":
            wanted |= set(outside(target)) - shown
    for target in sorted(shown):
        add = {"content": QUIET + text_of(target), "inclusion": InclusionLevel.NOT_IN_NAV}
        files.append(File.generated(config, source_page(target), **add))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fill a page with what is generated; send its links to files outside docs/ to pages of the site."""
    here = page.file.src_path
    if here.startswith(f"{SOURCE}/"):
        return markdown  # text_of has done it
    if here == API:
        markdown = LISTED.sub(r"| [\1](\1.md)", markdown)
    for mark, made in GENERATED.items():
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", made())
    return linked(markdown, DOCS / here, here)


def on_page_content(html: str, **_: object) -> str:
    """Keep the code that the API shows out of the search: it would stand before what pages say."""
    return html.replace(
        '<details class="mkdocstrings-source">', '<details class="mkdocstrings-source" data-search-exclude>'
    )


# -- sources that pages link to


def outside(page: Path) -> Iterator[Path]:
    """The files and folders outside docs/ that a page links to."""
    for target, _ in LINK.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / target))
        if is_source(path):
            yield path


def is_source(path: Path) -> bool:
    """Whether it is in the repository, but no page or picture of the site."""
    inside = DOCS in path.parents and path.suffix not in (".py", ".yml")
    return ROOT in path.parents and not inside and path.exists()


def source_page(target: Path) -> str:
    """The page of the site for a file or folder outside docs/."""
    name = target.relative_to(ROOT).as_posix()
    return f"{SOURCE}/{name.removesuffix('.md')}.md"


def linked(markdown: str, page: Path, here: str) -> str:
    """A page's text with its links to files outside docs/ changed. here: its place in the site."""

    def new(found: re.Match) -> str:
        path, anchor = Path(os.path.normpath(page.parent / found[1])), found[2] or ""
        if is_source(path):
            target = source_page(path)
            anchor = re.sub(r"^#L(\d+)$", r"#L-0-\1", anchor)
        elif DOCS in path.parents:
            target = path.relative_to(DOCS).as_posix()
        else:
            return found[0]
        return posixpath.relpath(target, posixpath.dirname(here)) + anchor

    return LINK.sub(new, markdown)


def text_of(target: Path) -> str:
    """A file outside docs/ as a page: Markdown as it is, else its text with numbered lines."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        lines = [
            f"- `{path.name}`" for path in sorted(target.iterdir()) if not path.name.startswith(("_", "."))
        ]
        return f"# {name}/\n\n" + "\n".join(lines)
    text = target.read_text(errors="replace")
    if target.suffix == ".md":
        return linked(text, target, source_page(target))
    if len(text) > LARGEST:
        text = text[:LARGEST].rpartition("\n")[0] + "\n..."
    fence = "~" * 20
    language = LANGUAGES.get(target.suffix, "text")
    return f"# {name}\n\n{fence}{{.{language} linenums=1}}\n{text.rstrip()}\n{fence}\n"


# -- the API


def packages() -> list[str]:
    """The packages with a page."""
    return [name for name, _ in LISTED.findall((DOCS / API).read_text())]


def api_page(package: str) -> str:
    """The page of a package."""
    return f"reference/api/{package}.md"


def api(package: str) -> str:
    """A page that mkdocstrings fills: the package's own docstring, and each public name."""
    module = importlib.import_module(package)
    lines = [BEHIND, f"# {package}", "", (module.__doc__ or "").strip(), ""]
    return "\n".join([*lines, *(f"::: {place_of(module, name)}\n" for name in public(module))])


def place_of(module: ModuleType, name: str) -> str:
    """A public name where mkdocstrings finds it: shardrt/kernels and shardrt/models are links."""
    own = getattr(getattr(module, name), "__module__", module.__name__)
    place = own if own.startswith(("shardrt.kernels", "shardrt.models")) else module.__name__
    return f"{re.sub('^shardrt.(?=kernels|models)', '', place)}.{name}"


def public(module: ModuleType) -> list[str]:
    """The names in `__all__`, or the functions and classes that the module itself defines; no packages."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return [
        name
        for name in getattr(module, "__all__", own)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]


# -- the options of the training command, and the command line


def options() -> str:
    """Each section of settings once, with the architectures that have it if not all do."""
    recipes = importlib.import_module("shardrt.models.train").RECIPES
    tables: dict[str, dict[str, list[str]]] = {}  # section -> its table -> the architectures that have it
    for name, recipe in recipes.items():
        for section, found in train_options.sections(recipe):
            tables.setdefault(section.rstrip("."), {}).setdefault(table_of(found), []).append(name)
    lines: list[str] = []
    for section, alike in tables.items():
        for table, names in alike.items():
            which = "" if len(names) == len(recipes) else f" ({', '.join(names)})"
            lines += [f"## {section or 'run'}{which}", "", table, ""]
    return "\n".join(lines)


def table_of(found: list[train_options.Option]) -> str:
    """Options as a table."""
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for option in found:
        value = option.metavar.replace("|", "\\|")
        value = (
            ", ".join(f"`{choice}`" for choice in value[1:-1].split(","))
            if value[:1] == "{"
            else f"`{value}`"
        )
        default = f"`{option.default_words}`" if option.default_words else ""
        help_text = option.help.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        rows.append(f"| `{option.flag}` | {value} | {default} | {help_text} |")
    return "\n".join(rows)


def commands() -> str:
    """The help of each command, and of the commands of these."""
    lines: list[str] = []
    for group, members in command_line.COMMANDS.items():
        lines += ["", f"## {group}"]
        for command in members:
            lines += ["", f"### shardrt {command.name}", ""]
            module = importlib.import_module(command.module)
            if hasattr(module, "BENCHMARKS"):
                lines += [block(module.page())]
            elif hasattr(module, "main"):
                lines += [f"{command.help[:1].upper()}{command.help[1:]}: [its options](options.md)."]
            else:
                lines += [block(parser.format_help()) for parser in parsers(command_line.parser_of(command))]
    return "\n".join(lines)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the commands below a parser, depth first."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield inner
                yield from parsers(inner)


def block(text: str) -> str:
    """Text as a terminal shows it."""
    return f"```text\n{text.strip()}\n```\n"


GENERATED = {"options": options, "commands": commands, "page": lambda: block(command_line.page())}
