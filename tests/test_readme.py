"""The program in the README runs as it stands under mpirun, and learns (on one rank: tests/test_wheel.py)."""

import re
from pathlib import Path

import pytest

from tests.ranks import mpirun

ROOT = Path(__file__).parent.parent


def program():
    """The README's one block of Python."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block


def test_the_loop_is_about_25_lines():
    lines = [line for line in program().splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("import", "from"))]) <= 25


@pytest.mark.mpi
def test_the_program_runs_as_it_stands_and_learns(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(program())
    output = mpirun(2, [str(file)])
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output.stdout)]
    assert len(losses) == 30, output.stderr
    assert losses[-1] < 0.6 * losses[0]


def test_every_file_that_the_documents_name_is_there():
    for document in [ROOT / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
