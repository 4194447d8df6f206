"""Each bug of the museum: its program has nothing wrong without it, and the check that it names finds it."""

import re

import numpy as np
import pytest

from tests.museum.checks import said_of
from tests.museum.exhibits import EXHIBITS, MORE
from tests.ranks import ROOT, run_ranks

FOUND = [bug for bug in EXHIBITS if bug.check]
EXPLAINED = [bug for bug in EXHIBITS if not bug.check]
NOT_YET = [pytest.param(bug, marks=pytest.mark.xfail(strict=False, reason="not yet")) for bug in MORE]


def name_of(bug):
    return bug.name


def test_there_are_twenty_and_at_most_two_are_explained():
    assert len(EXHIBITS) == len({bug.reference for bug in EXHIBITS}) == 20
    assert len(EXPLAINED) <= 2


@pytest.mark.parametrize("bug", [*FOUND, *NOT_YET], ids=name_of)
def test_a_bug_is_found_by_its_check_at_its_first_operation(bug):
    right = said_of(bug)
    assert right.wrong == [], str(right)
    wrong = said_of(bug, right)
    assert bug.check in wrong.wrong, str(wrong)
    shown = "\n".join(wrong.lines[bug.check])
    assert re.match(bug.first, shown), shown


@pytest.mark.parametrize("bug", EXPLAINED, ids=name_of)
def test_a_bug_that_no_check_finds_makes_numbers_wrong(bug, monkeypatch):
    right = said_of(bug)
    assert right.wrong == said_of(bug, right).wrong == []
    numbers = run_ranks(2, bug.run)[0]
    for change in bug.changes:
        change.apply(monkeypatch)
    assert not np.array_equal(run_ranks(2, bug.run)[0], numbers)
    assert bug.why and (ROOT / bug.noticed_by).exists()


@pytest.mark.parametrize("bug", [*EXHIBITS, *MORE], ids=name_of)
def test_a_bug_changes_each_function_once(bug):
    assert len({change.changed for change in bug.changes}) == len(bug.changes) > 0
