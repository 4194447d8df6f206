"""The site of the pages: its limits of words, its navigation, and the build (docs/site, `make docs`)."""

import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.ranks import ROOT, python

DOCS = ROOT / "docs"
SITE = DOCS / "site"
WORDS = SimpleNamespace(**runpy.run_path(str(SITE / "words.py")))
PAGE = """---
title: Not counted
---
# Three words here

One two three, `four five` and [six seven](https://example.org/not/a/word "not"). A second
sentence - with a dash! Is this one, i.e. the third? Version 2.13 is *one*:

```python
print("not counted")
```

- an item without a full stop
- An item of two sentences. Here is the other.

    It goes on, which is no code.

    ```text
    not counted
    ```

1. First

        not counted

| head | of table |
|---|---:|
| a cell | 3 |

![not counted](picture.svg)
<!-- not
counted -->

    not counted

    not counted
~~~
not counted
~~~
The <b>last</b> paragraph[^1] has no full stop
"""


def page_of(tmp_path, text, name="page.md"):
    (tmp_path / name).write_text(text)
    return WORDS.read(tmp_path / name, tmp_path)


def test_words_are_what_a_reader_reads(tmp_path):
    blocks = [block.text for block in WORDS.blocks_of(PAGE)]
    assert blocks == [
        "Three words here",
        "One two three, `four five` and six seven. A second sentence - with a dash! Is this one, i.e. the "
        "third? Version 2.13 is *one*:",
        "an item without a full stop",
        "An item of two sentences. Here is the other.",
        "It goes on, which is no code.",
        "First",
        "head of table",
        "a cell 3",
        "The last paragraph[^1] has no full stop",
    ]
    assert page_of(tmp_path, PAGE).words == 3 + 8 + 6 + 6 + 4 + 6 + 9 + 7 + 1 + 3 + 3 + 7


def test_sentences_end_with_a_mark_and_are_neither_headings_nor_cells_nor_fragments(tmp_path):
    assert page_of(tmp_path, PAGE).sentences == (
        "One two three, `four five` and six seven.",
        "A second sentence - with a dash!",
        "Is this one, i.e. the third?",
        "Version 2.13 is *one*:",
        "An item of two sentences.",
        "Here is the other.",
        "It goes on, which is no code.",
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("a [b `c` d](e.md) f", 5),
        ("[![badge](a.svg)](b.md) c", 1),
        ("[a]: https://example.org\n\nb [c][a]", 2),
        ("> a quotation\n> goes on", 4),
        ("text\n    that goes on, indented", 5),
        ("- item\n\n    - inner item\n\nafter\n\n    code", 4),
        ("````text\n```\ncode\n```\n````\nafter", 1),
        ("a --- b | c", 3),
        ("", 0),
    ],
)
def test_words_of_a_piece_of_markdown(tmp_path, text, words):
    assert page_of(tmp_path, text).words == words


def test_a_page_the_whole_and_the_mean_sentence_have_limits_and_the_changelog_has_none(tmp_path):
    assert not WORDS.faults([page_of(tmp_path, "word " * 2_600)])
    (long,) = WORDS.faults([page_of(tmp_path, "word " * 2_601)])
    assert long == "page.md has 2,601 words, 2,600 at most"
    assert not WORDS.faults([page_of(tmp_path, "word " * 50_000, "CHANGELOG.md")])
    many = [page_of(tmp_path, "word " * 2_500, f"{number}.md") for number in range(17)]
    assert WORDS.faults(many) == ["all pages have 42,500 words, 40,000 at most"]
    sentence = "word " * 17 + "word."
    (mean,) = WORDS.faults([page_of(tmp_path, f"{sentence} {sentence}")])
    assert mean == "the mean sentence has 18.0 words, it must have fewer than 18"


def test_the_table_has_a_line_for_each_section_and_one_for_all(tmp_path):
    (tmp_path / "learn").mkdir()
    texts = {"README.md": "one two", "learn/a.md": "one", "learn/b.md": "Two words.", "CHANGELOG.md": "one"}
    table = WORDS.table([page_of(tmp_path, text, name) for name, text in texts.items()]).splitlines()
    assert [line.split()[:3] for line in table[1:]] == [
        ["home", "1", "2"],
        ["learn", "2", "3"],
        ["all", "3", "5"],
        ["changelog", "1", "1"],
    ]
    assert table[2].endswith("2.0  learn/b.md, 2 words")


def test_the_counter_needs_no_package_and_its_exit_code_tells_whether_a_page_is_too_long(tmp_path):
    (tmp_path / "page.md").write_text("Word. " * 2_601)
    command = [sys.executable, "-I", "-S", SITE / "words.py", "page.md", "--long", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "too long: page.md has 2,601 words, 2,600 at most\n"
    assert done.stdout.splitlines()[-1] == "  1 page.md: Word."


def test_the_pages_are_within_the_limits():
    pages = [WORDS.read(path) for path in sorted(DOCS.rglob("*.md"))]
    assert not WORDS.faults(pages)


# --- navigation and build -----------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_and_nothing_else():
    text = (SITE / "mkdocs.yml").read_text()
    nav = re.findall(r"^ *- (?:[^:#]+: )?(\S+\.md)$", re.search(r"^nav:\n((?: .*\n)+)", text, re.M)[1], re.M)
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    build = ("-m", "mkdocs", "build", "--strict", "-f", SITE / "mkdocs.yml", "-d", folder)
    done = python(*build, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def links_of(file):
    """(target, anchor) of each link and source of a built page."""
    found = re.findall(r'(?:href|src)="?([^" >]+)', file.read_text())
    return [target.partition("#")[::2] for target in found if not target.startswith(("data:", "mailto:"))]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_every_link_of_it_leads_to_a_file(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        if page.name == "404.html":
            continue
        for target, _ in links_of(page):
            if "://" not in target and target:
                path = (page.parent / target).resolve()
                assert path.exists() and site in path.parents, f"{page.relative_to(site)}: {target}"


@pytest.mark.slow
def test_no_page_loads_anything_from_a_server(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="?([^" >]+)', page.read_text())
        assert not [url for url in loaded if "://" in url], page


@pytest.mark.slow
def test_api_options_commands_and_sources_are_generated(site):
    read = {
        name: (site / "reference" / f"{name}.html").read_text()
        for name in ("api/shardrt.fsdp", "options", "commands")
    }
    assert 'id="shardrt.fsdp.fully_shard"' in read["api/shardrt.fsdp"]
    assert "--optimizer.min-lr" in read["options"] and "--images.size" in read["options"]
    assert "shardrt ckpt export" in read["commands"] and "shardrt simulate" in read["commands"]
    assert str(ROOT) not in "".join(read.values())
    source = (site / "source" / "shardrt" / "fsdp" / "unit.py.html").read_text()
    assert 'id="L-0-20"' in source and "ParameterGroup" in source
    index = (site / "search" / "search_index.js").read_text()
    assert "fully_shard" in index and "source/shardrt" not in index
    assert not list(site.rglob("*.py")) and os.path.isfile(site / "site" / "iframe-worker.js")
