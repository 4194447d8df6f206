"""Classes of processors: which a machine has, which is imitated, and with what."""

import subprocess
import sys

import pytest

from tests.processors import PROCESSORS, below
from tests.ranks import ROOT

AVX512 = "sse4_2 popcnt avx2 fma f16c bmi2 avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "name"),
    [(f"{AVX512} avx512_bf16", "avx2"), (AVX512, "avx2"), ("sse4_2 popcnt avx2 fma f16c bmi2", "sse4")],
)
def test_the_slice_runs_in_the_class_with_the_next_shorter_vectors(flags, name):
    assert below(set(flags.split())).name == name


def test_nothing_is_below_the_lowest_class_and_another_architecture():
    assert below({"sse4_2", "popcnt"}) is None and below(set()) is None


def test_a_class_has_no_features_of_later_ones():
    found = {each.name: each.environment() for each in PROCESSORS}
    for name, lacks in (("sse4", ("avx", "fma")), ("avx2", ("avx512",)), ("avx512", ("avx512bf16", "amx"))):
        on = [word[1:] for word in found[name]["NUMBA_CPU_FEATURES"].split(",") if word.startswith("+")]
        assert on and not [feature for feature in on if feature.startswith(lacks)]


@pytest.mark.parametrize("option", ["--only", "--environment"])
def test_a_name_that_is_no_class_is_refused(option):
    command = [sys.executable, "-m", "tests.processors", option, "axv2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "axv2: the classes are sse4, " in done.stderr
