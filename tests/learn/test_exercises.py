"""Exercises: each reference answer passes, each wrong answer gets the hint for its mistake."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from shardrt.__main__ import main
from shardrt.learn import EXERCISES, checking, grading, hybrid
from shardrt.learn.judge import judge
from tests.learn.wrong import WRONG

ANSWERS = Path(__file__).parent / "answers"
NUMBERS = range(1, len(EXERCISES) + 1)


def reference(name):
    return (ANSWERS / f"{name}.py").read_text()


@pytest.fixture
def answer(tmp_path):
    """Writes a text to a file."""

    def write(text):
        path = tmp_path / "answer.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_passes(name):
    passed, text = judge(name, ANSWERS / f"{name}.py")
    assert passed, text


@pytest.mark.parametrize("number", NUMBERS)
def test_the_starting_file_is_refused_with_a_hint_and_its_text_links_pages_that_exist(number, answer):
    start = checking.start(EXERCISES[number - 1])
    passed, hint = judge(EXERCISES[number - 1], answer(start))
    assert not passed and hint
    text = ast.get_docstring(ast.parse(start))
    assert text.startswith(f"Exercise {number}: ")
    pages = [word.rstrip(".") for word in text.split() if word.startswith("docs/")]
    assert all((ANSWERS.parents[2] / page).is_file() for page in pages)


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{each.name}: {each.hint}" for each in WRONG])
def test_a_wrong_answer_gets_its_hint(wrong, answer):
    text = reference(wrong.name)
    assert wrong.old in text
    passed, hint = judge(wrong.name, answer(text.replace(wrong.old, wrong.new, 1)))
    assert not passed
    assert wrong.hint in hint


def test_each_exercise_has_five_wrong_answers():
    assert all(Counter(wrong.name for wrong in WRONG)[name] >= 5 for name in EXERCISES)


CRASHES = {
    "def f(:": "cannot read line 1",
    "\0": "cannot read line 1",
    "1 / 0": "Line 1 raises ZeroDivisionError",
    "raise SystemExit": "Line 1 raises SystemExit",
    "def all_gather(*given): return 'much'": "must return a finite number",
    "all_gather = 1": "defines no function all_gather",
    "def all_gather(*given): return float('nan')": "must return a finite number",
}


@pytest.mark.parametrize("text", CRASHES)
def test_an_answer_that_raises_gets_a_hint(text, answer):
    passed, hint = judge("traffic", answer(text))
    assert not passed and CRASHES[text] in hint


def test_the_command_grades_in_a_process_and_shows_what_the_answer_prints(answer, capsys):
    path = answer(reference("memory") + "\nprint('here', 42)\n")
    assert main(["learn", "2", str(path)]) == 0
    shown = capsys.readouterr().out
    for line in (
        "here 42",
        "exercise 2, The memory of a strategy: passed",
        "takeaway: ",
        "next: shardrt learn 3",
    ):
        assert line in shown


def test_the_command_lists_shows_and_keeps_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["learn"]) == 0
    listed = capsys.readouterr().out
    assert all(f"exercise_{number:02}.py" in listed for number in NUMBERS)
    assert main(["learn", "3"]) == 0
    assert "a barrier" in capsys.readouterr().out
    path = Path("exercise_03.py")
    path.write_text("mine")
    assert main(["learn", "3"]) == 0
    assert path.read_text() == "mine"
    assert main(["learn", "13"]) == 2
    assert main(["learn", "1", "none.py"]) == 65


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, hint",
    [
        ("while True: print('much ' * 1000)", grading.LOOPS),
        ("import threading\nthreading.Event().wait()", grading.HANGS),
        ("import os\nos._exit(7)", grading.DIED.format(7)),
        ("import os\nos.kill(os.getpid(), 11)", grading.DIED.format(-11)),
        ("import sys\nsys.stdout = None\nraise ValueError('loud')", "Line 3 raises ValueError: loud"),
    ],
)
def test_no_answer_stops_the_grader(text, hint, answer):
    verdict = grading.grade("memory", answer(text))
    assert not verdict.passed and verdict.text == hint
    assert len(verdict.output) <= grading.KEPT


@pytest.mark.slow
def test_one_mesh_is_fast_and_one_is_frugal():
    steps = {shape: hybrid.simulate(shape) for shape in hybrid.MESHES}
    fast = [shape for shape, step in steps.items() if step.ms <= hybrid.MS and step.gb <= hybrid.GB]
    assert fast == [(8, 64)]
    affordable = [shape for shape, step in steps.items() if step.gb <= hybrid.FRUGAL_GB]
    assert min(affordable, key=lambda shape: steps[shape].between_nodes) == hybrid.LEAST
