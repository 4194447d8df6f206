"""Sums over ranks on the GPU in software, NCCL's own and by the tree: in numbers, calls, waits, memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softgpu.available import missing

ROOT = Path(__file__).parent.parent.parent
FLOAT = 2e-7  # what sums of a few float32 may be off, relative to their largest


@pytest.fixture(scope="module")
def found():
    """What a process with the software GPU has found."""
    if missing():
        pytest.skip(missing())
    job = [sys.executable, "-m", "tests.softgpu.collectives"]
    done = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("reduction", ["nccl", "tree"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_float64_and_no_nan_is_lost(found, reduction, ranks):
    """With scales, added to what is there, in place; all types and ops."""
    for what in ("scattered", "reduced"):
        error = found["sums"][f"{what}, {reduction}, {ranks}"]
        assert isinstance(error, float) and error <= FLOAT, (what, error)


@pytest.mark.parametrize("ranks", [2, 3])
def test_nccl_adds_16_bits_as_a_sum_that_is_rounded_at_each_rank_and_the_tree_does_not(found, ranks):
    for kind, (error, rounded) in found["sums"][f"in_16_bits, nccl, {ranks}"].items():
        assert 0 < error <= 2 * rounded, kind
    for kind, (error, rounded) in found["sums"][f"in_16_bits, tree, {ranks}"].items():
        assert error <= FLOAT < rounded, kind


def test_training_with_either_reduction_is_near_the_cpus_and_has_the_same_bits_however_late_streams_are(
    found,
):
    """Also where gradients are on the host, and the first to wait for anything is who takes their norm."""
    assert len(found["trained"]) == 9
    for job, (modes, from_cpu, _) in found["trained"].items():
        assert set(modes) == {None}, (job, modes)
        assert from_cpu < (6e-2 if "bfloat16" in job else 1e-5), (job, from_cpu)


def test_by_the_tree_all_strategies_train_to_the_same_bits(found):
    distances = {job: distance for job, (_, _, distance) in found["trained"].items()}
    assert distances["NO_SHARD, tree"] == distances["HYBRID_SHARD, tree"] == 0
    assert distances["HYBRID_SHARD, nccl"] > 0, "then the tests of both need not be told apart"


def test_one_rank_and_two_train_to_the_same_bits_by_the_tree_and_nccls_sums_are_refused(found):
    assert found["invariant"]["tree"] is None
    assert "reduction='tree'" in found["invariant"]["nccl"]


def test_a_step_takes_as_many_calls_of_nccl_on_4_ranks_as_on_2_and_by_the_tree_more(found):
    (_, two), (_, four) = found["counts"]["nccl, 2.0, FULL_SHARD"]
    # Two units: gathered in forward, one of them again in backward; reduced.
    assert two["nccl"] == four["nccl"] == 2 + 1 + 2
    assert four["launches"] <= two["launches"]
    (_, two), (_, four) = found["counts"]["tree, 2.0, FULL_SHARD"]
    assert two["nccl"] == 2 + 1 + 2 * 2 * 2 and four["nccl"] == 2 + 1 + 2 * 2 * 4


def test_the_host_waits_once_in_a_step_for_the_norm_whatever_is_sharded_how(found):
    for job, counts in found["counts"].items():
        for in_norm, in_step in counts:
            assert in_norm == in_step["waits"] == 1, job


def test_what_communicators_take_is_planned_to_the_byte(found):
    """In float32 and bfloat16, on the GPU and pinned on the host."""
    assert len(found["plans"]) == 7
    for job, ranks in found["plans"].items():
        assert not isinstance(ranks, str), (job, ranks)
        for plan, allocated, *categories in ranks:
            assert plan == allocated, (job, categories)
    scratch = {
        job: [categories.get("scratch of communicators", 0) for categories in ranks[0][2:]]
        for job, ranks in found["plans"].items()
    }
    assert scratch["nccl, nccl, HYBRID_SHARD, bfloat16"] == [0, 0]
    assert (
        scratch["nccl, tree, FULL_SHARD, float32"][0] > 0 < scratch["staged, tree, HYBRID_SHARD, float32"][1]
    )
