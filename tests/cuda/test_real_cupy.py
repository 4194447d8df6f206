"""Streams and captures on the installed CuPy, with a stand-in for CUDA below it (tests/cuda/real_cupy).

Kernels do nothing there. What they compute is tested in the emulator, beside a stand-in for CuPy, which is
held here to what CuPy does.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import fake_cupy
from tests.cuda.real_cupy import rules

ROOT = Path(__file__).parent.parent.parent
# The kernels of each side stream; besides there are copies.
SIDE = {
    "gather": {"pack"},
    "reduce": {"pack", "sum_parts", "set"},  # set: what is trained of a unit, picked out
    "optimizer": {"adamw"},
    **dict.fromkeys(("upload", "download", "offload", "optimizer upload", "optimizer download"), set()),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process with the real CuPy has found."""
    if importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("no CuPy")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    job = [sys.executable, "-m", "tests.cuda.real_cupy.job", str(tmp_path_factory.mktemp("cuda"))]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_stand_in_for_cupy_does_and_refuses_what_cupy_does(found):
    assert rules.outcomes(fake_cupy.module()) == found["outcomes"]


def test_the_stand_in_has_the_current_streams_of_cupy(found):
    assert rules.current_streams(fake_cupy.module()) == found["streams"]


def test_the_compute_stream_stays_current(found):
    """Whatever makes another one current for a while, CuPy itself included."""
    assert set(found["after"].values()) == {"compute"}, found["after"]


def test_training_issues_each_kernel_in_its_stream_and_nothing_in_the_null_stream(found):
    for variant, streams in found["kernels"].items():
        assert isinstance(streams, dict), (variant, streams)
        compute = set(streams.pop("compute"))
        assert {"forward", "backward", "gelu_backward"} < compute, variant
        assert not compute & {"pack", "sum_parts", *streams.get("optimizer", ())} - {"copy"}, variant
        for name, kernels in streams.items():
            assert name in SIDE and set(kernels) <= SIDE[name] | {"copy"}, (variant, name)
    assert found["kernels"]["bfloat16 on the wire, 1 ranks"]["gather"] == ["pack"]
    assert found["kernels"]["float32, 1 ranks"]["reduce"] == ["sum_parts"]


def test_a_step_with_clipping_can_be_captured_and_replayed(found):
    """With 12 layers too: there are more pieces of gradients than CuPy joins without an upload."""
    assert set(found["captured"].values()) == {"done"}, found["captured"]
