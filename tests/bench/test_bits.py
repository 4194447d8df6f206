"""bench.bits: a hash tells one bit from another, not one strategy from another; what differs is printed."""

import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest

from bench import bits
from bench.bits_cases import (
    BACKWARDS,
    FLAT,
    HYBRID,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTATIONS,
    Case,
    cases,
    digest,
    train,
)
from shardrt.comm import thread


def test_a_hash_is_of_the_numbers_and_not_of_the_way():
    known = thread.run(2, train, Case(2, "FULL_SHARD", backward="two"))
    assert digest(known) == digest(thread.run(2, train, Case(2, "NO_SHARD", backward="two")))
    kinds = {(kind, name) for rank in known for kind, name, _, _ in rank}
    assert {("weight", "embed.weight"), ("exp_avg", "embed.weight"), ("step", "norm.bias")} <= kinds
    for kind in ("figures", "weight", "exp_avg_sq", "step"):
        before = digest(known)
        array = next(array for row_kind, _, _, array in known[0] if row_kind == kind)
        flat = array.reshape(-1).view(np.uint8)
        flat[0] ^= 1
        assert digest(known) != before, kind


def test_pieces_of_a_whole_have_its_hash():
    whole = np.arange(6, dtype=np.float32)
    cut = [[("exp_avg", "w", 4, whole[4:])], [("exp_avg", "w", 0, whole[:4])]]
    assert digest(cut) == digest([[("exp_avg", "w", 0, whole)], []]) != digest(cut[:1])


def test_any_two_features_meet_in_a_case():
    kinds = {"precision": tuple(PRECISIONS), "offload": OFFLOADS}
    kinds |= {"recomputation": RECOMPUTATIONS, "backward": BACKWARDS}
    for ranks in (1, 2, 3, 4):
        strategies = FLAT if ranks % 2 else FLAT + HYBRID
        found = [case for case in cases().values() if case.ranks == ranks]
        for names in combinations([*kinds, "strategy"], 2):
            met = {tuple(getattr(case, name) for name in names) for case in found}
            for values in product(*((kinds | {"strategy": strategies})[name] for name in names)):
                case = Case(ranks, **({"strategy": "FULL_SHARD"} | dict(zip(names, values, strict=True))))
                assert values in met or not case.fits, case.name


def test_cases_that_differ_are_printed_and_the_other_tree_is_removed(monkeypatch, capsys):
    if subprocess.run(["git", "-C", str(bits.ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("not a checkout of git")
    trees = set()

    def hashes(tree, chosen):
        trees.add(tree)
        assert (tree / "shardrt" / "__init__.py").exists()
        differs = tree != bits.ROOT
        return [f"{c.name} {'b' if differs and c.ranks == 3 else 'a'}" for c in chosen]

    monkeypatch.setattr(bits, "hashes", hashes)
    monkeypatch.setattr(sys, "argv", ["bits", "--against", "HEAD", "--only", "NO_SHARD/sgd"])
    with pytest.raises(SystemExit) as stopped:
        bits.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["1 of 4 cases differ from HEAD", "  3/NO_SHARD/sgd"]
    assert len(trees) == 2 and not any(tree.exists() for tree in trees - {bits.ROOT})


@pytest.mark.mpi
def test_ranks_of_mpirun_have_the_hash_of_threads():
    case = Case(2, "HYBRID_SHARD", "bf16", net="gpt", launch="mpirun")
    assert case == cases()[case.name]
    (line,) = bits.hashes(bits.ROOT, [case])
    threads = Case(2, "HYBRID_SHARD", "bf16", net="gpt")
    assert line.split() == [case.name, digest(thread.run(2, train, threads))]
