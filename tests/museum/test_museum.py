"""Each bug of the museum: its program has nothing wrong without it, and the check that it names finds it."""

import re

import numpy as np
import pytest

from tests.museum.checks import said_with, said_without
from tests.museum.exhibits import EXHIBITS, MORE
from tests.museum.page import ANSWERS, PAGE, renewed
from tests.ranks import ROOT, run_ranks

FOUND = [bug for bug in EXHIBITS if bug.check]
EXPLAINED = [bug for bug in EXHIBITS if not bug.check]


def name_of(bug):
    return bug.name


def test_there_are_twenty_and_at_most_two_are_explained():
    assert len(EXHIBITS) == len({bug.reference for bug in EXHIBITS}) == 20
    assert len(EXPLAINED) <= 2


@pytest.mark.parametrize("bug", [*FOUND, *MORE], ids=name_of)
def test_a_bug_is_found_by_its_check_at_its_first_operation(bug):
    right, wrong = said_without(bug), said_with(bug)
    assert right.wrong == [], str(right)
    assert bug.check in wrong.wrong, str(wrong)
    shown = "\n".join(wrong.lines[bug.check])
    assert re.match(bug.first, shown), shown
    assert all(name in shown for name in re.findall("`(.*?)`", bug.operation)), shown


@pytest.mark.parametrize("bug", EXPLAINED, ids=name_of)
def test_a_bug_that_no_check_finds_makes_numbers_wrong(bug, monkeypatch):
    assert said_without(bug).wrong == said_with(bug).wrong == []
    numbers = run_ranks(2, bug.run)[0]
    for change in bug.changes:
        change.apply(monkeypatch)
    assert not np.array_equal(run_ranks(2, bug.run)[0], numbers)
    assert bug.why and (ROOT / bug.noticed_by).exists()


def test_a_bug_changes_each_function_once():
    for bug in (*EXHIBITS, *MORE):
        assert len({change.changed for change in bug.changes}) == len(bug.changes) > 0, bug.name


def masked(text):
    """Without addresses and line numbers, which any change of a file moves."""
    return re.sub(r"0x[0-9a-f]+|(?<=\.py:)\d+", "", text)


def test_the_page_shows_what_the_checks_say():
    page = PAGE.read_text()
    assert masked(page) == masked(renewed(page)), "python -m tests.museum --page renews it"


def test_the_answers_show_the_changes_that_made_the_bugs():
    answers = re.split(r"^## .*: ", ANSWERS.read_text(), flags=re.MULTILINE)[1:]
    named = {bug.name: bug for bug in EXHIBITS}
    assert len(answers) == 3
    for answer in answers:
        (change,) = named[answer.split()[0]].changes
        assert "".join(f"    {line}\n" for line in str(change).splitlines()) in answer
