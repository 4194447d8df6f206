"""Training on the installed CuPy, over the GPU in software: the numbers of the CPU, in any order of streams.

What a wait that is missing would do there, tests/softgpu/mutations.py shows.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import fake_cupy
from tests.softgpu import rules

ROOT = Path(__file__).parent.parent.parent
# The kernels of each side stream; besides there are copies.
SIDE = {
    "gather": {"pack"},
    "reduce": {"pack", "sum_parts", "set"},  # set: what is trained of a unit, picked out
    "optimizer": {"adamw"},
    **dict.fromkeys(("upload", "download", "offload", "fetch"), set()),
    **dict.fromkeys(("optimizer upload", "optimizer download"), set()),
}


@pytest.fixture(scope="module")
def found():
    """What a process with the software GPU has found."""
    if importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("no CuPy")
    if shutil.which("cc") is None or shutil.which("g++") is None:
        pytest.skip("no C or C++ compiler")
    job = [sys.executable, "-m", "tests.softgpu.job"]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_stand_in_for_cupy_does_and_refuses_what_cupy_does(found):
    assert rules.outcomes(fake_cupy.module()) == found["outcomes"]


def test_the_stand_in_has_the_current_streams_of_cupy(found):
    assert rules.current_streams(fake_cupy.module()) == found["streams"]


def test_the_compute_stream_stays_current(found):
    """Whatever makes another one current for a while, CuPy itself included."""
    assert set(found["after"].values()) == {"compute"}, found["after"]


def test_each_kernel_is_in_its_stream_and_nothing_in_the_null_stream(found):
    known = found["trained"]["recomputation, 1, auto"][1]["compute"]  # its products have been measured before
    assert "gelu_backward" not in known, "it is in a product, where measured times are equal"
    for variant, (_, streams) in found["trained"].items():
        compute = set(streams.pop("compute"))
        assert {"forward", "backward", "add"} < compute, variant
        assert not compute & {"pack", "sum_parts", *streams.get("optimizer", ())} - {"copy"}, variant
        for name, kernels in streams.items():
            assert name in SIDE and set(kernels) <= SIDE[name] | {"copy"}, (variant, name)
    assert "pack" in found["trained"]["bfloat16 on the wire, 2, staged"][1]["gather"]
    assert found["trained"]["accumulation, 1, auto"][1]["reduce"] == ["sum_parts"]


def test_however_late_streams_are_numbers_are_near_the_cpus_and_have_the_same_bits(found):
    assert len(found["trained"]) > 16
    for job, (modes, _) in found["trained"].items():
        assert len(modes) == 3
        for mode, told in modes.items():
            assert told == [None, None], (job, mode, told)


def test_replays_of_a_captured_step_train_as_steps_that_are_not(found):
    for modes in found["captured"]:
        for mode, told in modes.items():
            assert set(told) == {None}, (mode, told)
