"""docs/learn: excerpts are the source, pictures are current, the programs of the ladder agree."""

import ast
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.ranks import ROOT
from tests.test_examples import MICRO

LEARN = ROOT / "docs" / "learn"
FIGURES = ROOT / "docs" / "figures"


# --- excerpts -----------------------------------------------------------------------------------------------


def without_docstrings(source: str) -> str:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [None] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line for line in lines if line is not None) + "\n"


def excerpts(page) -> list[tuple[str, str]]:
    """(the Python file that the page linked last, code) of each block that is marked `py`."""
    found, file = [], None
    for link, code in re.findall(r"\]\(([^)#\s]+\.py)\)|^```py\n(.*?)^```", page.read_text(), re.M | re.S):
        if link:
            file = (page.parent / link).resolve()
        else:
            found.append((file, code))
    return found


EXCERPTS = [(page, *one) for page in sorted(LEARN.glob("*.md")) for one in excerpts(page)]


@pytest.mark.parametrize(
    ("page", "file", "code"),
    EXCERPTS,
    ids=[f"{page.stem}-{number}-{file.stem}" for number, (page, file, _) in enumerate(EXCERPTS)],
)
def test_an_excerpt_is_in_the_file_that_the_page_names_before_it(page, file, code):
    """Docstrings are left out. A line of three dots stands for lines that are left out."""
    source = without_docstrings(file.read_text())
    parts = re.split(r"^ *\.\.\.\n", textwrap.dedent(code), flags=re.M)
    assert any(
        all(textwrap.indent(part, " " * indent) in source for part in parts) for indent in (0, 4, 8, 12)
    ), f"{page.name} quotes what is not in {file.name}:\n{code}"


def test_the_walk_has_an_excerpt_in_every_stage():
    stages = re.split(r"^## \d+\. ", (LEARN / "one_step.md").read_text(), flags=re.M)[1:]
    assert len(stages) >= 12 and all("```py\n" in stage for stage in stages)


def test_the_walk_shows_what_its_program_prints(capsys):
    page = (LEARN / "one_step.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)), {})
    assert capsys.readouterr().out == re.search(r"^```text\n(.*?)^```", page, re.M | re.S)[1]


# --- pictures -----------------------------------------------------------------------------------------------

# Not schedule.py, whose picture is of measured times, nor scale.py, which tests/simulate covers.
AXES = ("tensor", "sequence", "pipeline", "context", "experts")
PICTURES = [
    (name, [f"{name}.py"])
    for name in ("loop", "collectives", "flat", "zero", "memory", "slots", "states", "options")
]
PICTURES += [(axis, ["axes.py", axis]) for axis in AXES]


@pytest.mark.parametrize(("name", "script"), PICTURES, ids=[name for name, _ in PICTURES])
def test_a_picture_is_what_its_script_draws(name, script, tmp_path):
    command = [sys.executable, FIGURES / script[0], *script[1:], tmp_path / "new.svg"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new.svg").read_text() == (FIGURES / f"{name}.svg").read_text(), (
        f"python docs/figures/{' '.join(script)} docs/figures/{name}.svg"
    )


# --- the ladder ---------------------------------------------------------------------------------------------


class Matmul:
    """A layer of the forty lines as microfsdp wants it: no bias, and a ReLU after the first."""

    def __init__(self, shape, relu):
        self.shapes, self.relu = (shape,), relu

    def forward(self, parameters, x):
        y = x @ parameters[0]
        return (np.maximum(y, 0) if self.relu else y), (x, y)

    def backward(self, parameters, saved, dy):
        x, y = saved
        dy = dy * (y > 0) if self.relu else dy
        return dy @ parameters[0].T, (x.T @ dy,)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_forty_lines_train_as_microfsdp_does(ranks):
    blocks = re.findall(r"^```python\n(.*?)^```", (LEARN / "from_scratch.md").read_text(), re.M | re.S)
    page: dict = {}
    exec("\n".join(block for block in blocks if "shardrt" not in block), page)
    layers = [Matmul(shape, relu) for shape, relu in zip(page["SHAPES"], (True, False), strict=True)]
    initial = [[array] for array in page["initial"]()]
    models = [
        MICRO.FSDP(layers, initial, "FULL_SHARD", each) for each in MICRO.process_groups("FULL_SHARD", ranks)
    ]

    def train(rank, group):
        x, target = page["batch"](rank, ranks)
        for _ in range(5):
            error = models[rank].forward(x) - target
            models[rank].backward(error * np.float32(2 / error.size))
            models[rank].step(page["RATE"])
        return models[rank].parameters()

    of_page = page["on_ranks"](ranks, page["sharded"], steps=5)
    for expected, found in zip(of_page, page["on_ranks"](ranks, train), strict=True):
        for ours, (theirs,) in zip(expected, found, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4)


def test_the_page_shows_the_losses_that_microfsdp_prints():
    shown = re.findall(r"^step +(\d+)  loss ([\d.]+)$", (LEARN / "from_scratch.md").read_text(), re.M)
    losses = {}
    MICRO.run("FULL_SHARD", 2, report=lambda step, loss: losses.update({step: loss}))
    assert len(shown) == 3
    np.testing.assert_allclose(
        [losses[int(step)] for step, _ in shown], [float(loss) for _, loss in shown], atol=2e-3
    )


def test_the_forty_lines_are_forty():
    page = (LEARN / "from_scratch.md").read_text()
    part = page[page.index("## FSDP in forty lines") : page.index("Four things are new")]
    lines = "".join(re.findall(r"^```python\n(.*?)^```", part, re.M | re.S)).splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 45
