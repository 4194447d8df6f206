"""Features and their pairs on the GPU emulator: a part of `python -m tests.softgpu.pairs --all`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softgpu.available import missing

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(900)
def test_all_of_these_go_together_on_a_gpu():
    """As on the CPU, with the same bits in two orders of streams; what is refused there is refused here."""
    if missing():
        pytest.skip(missing())
    job = [sys.executable, "-m", "tests.softgpu.pairs"]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=900)
    found = json.loads(done.stdout or "{}")
    assert len(found) > 35, done.stderr
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
