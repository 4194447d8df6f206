"""simulate/plan.py and space.py: what is dropped deserves it, and the best are the best of all."""

from contextlib import redirect_stderr
from io import StringIO

import pytest

from models import train
from shardrt import device
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.simulate.machine import Machine
from shardrt.simulate.plan import COMPUTING, MEMORY, Plan, planned, search
from shardrt.simulate.space import AXES, candidates
from shardrt.simulate.step import simulated

RANKS = 16
TINY = [
    *("--architecture", "gpt", "--model.n-head", "4", "--model.vocab-size", "256"),
    *("--batch-size", "64", "--model.n-layer", "4", "--model.n-embd", "256", "--model.block-size", "64"),
    *("--steps", "2", "--data", "text.txt", "--sample.length", "0", "--parallel.cp", "1"),
]
QUICK = {
    "fsdp.strategy": ["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"],
    "fsdp.prefetch": ["1", "2"],
    "memory.recompute": ["none", "full"],
}
PARTS = {
    "fsdp.strategy": ["FULL_SHARD", "HYBRID_SHARD", "SHARD_OPT", "NO_SHARD"],
    "fsdp.blocks": ["1", "2"],
    "micro_batches": ["1", "2", "4"],
    "memory.recompute": ["none", "full"],
}
SAVED = {
    "memory.recompute": ["none", "matmul", "full"],
    "memory.recompute_every": ["1", "2"],
    "memory.offload_activations": ["False", "True"],
    "memory.offload_optimizer": ["False", "True"],
    "memory.offload_parameters": ["False", "True"],
}
SPACES = [QUICK, pytest.param(PARTS, marks=pytest.mark.rest), pytest.param(SAVED, marks=pytest.mark.slow)]
MACHINE = Machine.load("h100-8")


class Tried:
    """Simulates each candidate once, however often it is asked for."""

    def __init__(self, varied):
        self.all = candidates(train.parse(TINY), given=set(), ranks=RANKS, node=8, vary=varied, only=True)
        self.of = {}

    def __call__(self, candidate):
        if candidate not in self.of:
            self.of[candidate] = simulated(["models.train", *TINY, *candidate.words], RANKS, MACHINE)
        return self.of[candidate]

    def plans(self):
        return [planned(each, self(each)) for each in self.all]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text.txt").write_text("to be, or not to be, that is the question. " * 500)
    before = device.current()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()):
        patch.chdir(folder)
        yield folder
    device.set_current(before)


@pytest.fixture(scope="module")
def quick(folder):
    return Tried(QUICK)


@pytest.fixture(scope="module", params=SPACES, ids=["quick", "parts", "saved"])
def tried(request, quick):
    found = quick if request.param is QUICK else Tried(request.param)
    found.plans()
    return found


def test_the_best_are_those_of_an_exhaustive_search_and_what_is_dropped_deserves_it(tried):
    plans = sorted(tried.plans(), key=lambda plan: plan.cost)
    sizes = sorted({plan.bytes() for plan in plans})
    dropped = 0
    for limit in [sizes[len(sizes) * part // 8] for part in range(8)] + [sizes[0] - 1, sizes[-1]]:
        fits = []
        for plan in plans:
            if plan.bytes() <= limit and not any(plan.alike(each) for each in fits):
                fits.append(plan)
        for best in (1, 3, 10):
            found = search(tried.all, tried, {"device": limit}, best=best, worth=0.0)
            costs = [plan.cost for plan in found.best[:best]]
            assert costs == [plan.cost for plan in fits[:best]]
            assert all(plan.bytes() > limit for plan in found.over)
            for each in found.too_large:
                assert planned(each, tried(each)).bytes() > limit, each.options
            for each in found.slower:
                assert planned(each, tried(each)).cost >= costs[-1], each.options
            assert found.tried + len(found.too_large) + len(found.slower) == len(tried.all)
            dropped += len(found.too_large)
    assert dropped


def test_no_other_order_of_memory_or_time_is_assumed_than_there_is(tried):
    """Of each two that are compared; memory may differ by what padding takes."""
    plans, compared = tried.plans(), 0
    for one in plans:
        for other in plans:
            ours, theirs = one.candidate, other.candidate
            if ours.kind == theirs.kind and all(
                a <= b for a, b in zip(ours.needs, theirs.needs, strict=True)
            ):
                assert one.bytes() <= 1.01 * other.bytes(), (ours.options, theirs.options)
                compared += one is not other
            if ours.computes == theirs.computes and all(
                a >= b for a, b in zip(ours.keeps, theirs.keeps, strict=True)
            ):
                assert 0.99 * one.least <= other.report.ms, (ours.options, theirs.options)
            if ours.beside == theirs.beside and all(
                a >= b for a, b in zip(ours.saves, theirs.saves, strict=True)
            ):
                assert 0.99 * one.report.ms <= other.report.ms, (ours.options, theirs.options)
    assert compared > len(plans)


def test_the_parts_of_a_step_add_up_and_say_what_binds_it(folder):
    tried = Tried({"memory.recompute": ["none", "full"]})
    none, full = tried.plans()
    for plan in (none, full):
        assert sum(plan.shares.values()) == pytest.approx(1)
        assert plan.binds == max(plan.shares, key=plan.shares.get)
    assert none.shares[MEMORY] == 0 < full.shares[MEMORY]
    again = full.shares[MEMORY] * full.report.ms
    assert again == pytest.approx(full.report.split["recomputed forward"])
    assert full.shares[COMPUTING] < none.shares[COMPUTING]


def test_a_search_that_is_interrupted_gives_what_it_found(quick):
    asked = []

    def simulate(candidate):
        asked.append(candidate)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return quick(candidate)

    found = search(quick.all, simulate, {"device": 1e12})
    assert (len(found.best), found.left) == (2, len(quick.all) - 3)
    some = search(quick.all, quick, {"device": 1e12}, tries=1)
    assert (some.tried, some.left, some.late) == (1, len(quick.all) - 1, False)


def test_a_search_ends_when_its_time_is_over_and_says_what_it_knows_of_the_rest(quick):
    none = search(quick.all, quick, {"device": 1e12}, seconds=0)
    assert (none.tried, none.left, none.late) == (0, len(quick.all), True)
    one = search(quick.all, quick, {"device": 1}, tries=1, seconds=100)  # too large, and so are others
    assert (one.tried, one.late) == (1, False)
    assert one.left + len(one.too_large) == len(quick.all) - 1 and one.too_large


def test_what_is_too_large_is_tried_with_a_little_less_before_other_meshes_are(folder):
    """Else a search that ends early knows no plan between none recomputed and all of it."""
    tried = Tried({"parallel.tp": ["1", "2", "4"], "memory.recompute": ["none", "matmul", "full"]})
    alone = [plan for plan in tried.plans() if plan.candidate.options["parallel.tp"] == "1"]
    _, matmul, full = sorted(alone, key=Plan.bytes, reverse=True)
    found = search(tried.all, tried, {"device": matmul.bytes()}, tries=3)
    assert [plan.candidate for plan in found.best] == [matmul.candidate, full.candidate]


def test_what_can_not_be_much_faster_is_left_out(quick):
    all_of = search(quick.all, quick, {"device": 1e12}, best=1, worth=0.0)
    some = search(quick.all, quick, {"device": 1e12}, best=1, worth=0.3)
    assert len(some.slower) > len(all_of.slower) and some.tried < all_of.tried
    assert some.best[0].cost <= all_of.best[0].cost / (1 - 0.3)


def test_states_that_are_too_large_alone_are_so_on_every_mesh_that_cuts_them_alike(folder):
    tried = Tried({"parallel.cp": ["1", "2"], "fsdp.strategy": ["FULL_SHARD", "NO_SHARD"]})
    whole = [each for each in tried.all if each.options["fsdp.strategy"] == "NO_SHARD"]
    assert len({each.states for each in tried.all}) == 2 and len({each.mesh for each in tried.all}) == 2
    limit = max(plan.bytes() for plan in tried.plans() if plan.candidate not in whole)
    found = search(tried.all, tried, {"device": limit})
    assert len(found.over) == len(found.too_large) == 1 and {
        found.over[0].candidate,
        *found.too_large,
    } == set(whole)


# --- what is tried


def space(*words, **how):
    recipe = train.parse([*TINY, *words])
    given = how.pop("given", {"batch_size"})
    return [each.options for each in candidates(recipe, given=given, ranks=64, node=8, **how)]


def test_by_default_all_that_is_free_is_varied_and_every_batch_is_the_same():
    found = space(given={"fsdp.prefetch", "fsdp.blocks", "memory.offload_activations"})
    seen = {name: {options[name] for options in found} for name in found[0]}
    assert seen["fsdp.strategy"] == set(ShardingStrategy.__members__)
    assert seen["fsdp.copies"] == {"1", "2", "4", "8"}  # of shards that span a node at least
    assert seen["parallel.tp"] == seen["parallel.pp"] == seen["parallel.cp"] == {"1", "2", "4", "8"}
    assert seen["memory.recompute"] == {"none", "matmul", "full"}
    assert seen["memory.update_on"] == {"device", "host"} and seen["parallel.ep"] == {"1"}
    assert len({tuple(options.items()) for options in found}) == len(found)
    for options in found:
        together = int(options["parallel.tp"]) * int(options["parallel.pp"]) * int(options["parallel.cp"])
        data, parts = 64 // together, int(options["micro_batches"])
        assert 64 % (data * parts) == 0 or options["parallel.pp"] != "1"
        assert ("HYBRID" in options["fsdp.strategy"]) == (options["fsdp.copies"] != "1")
        assert options["reduce_each"] == "False" or parts > 1


def test_what_is_given_stays_and_what_is_named_is_varied():
    fixed, few = {"fsdp.strategy", "fsdp.prefetch", *AXES}, {*AXES, "fsdp.prefetch", "memory.recompute"}
    found = space("--fsdp.prefetch", "3", given=fixed, vary={"fsdp.blocks": ["1", "4"], "seed": ["0", "1"]})
    seen = {name: {options[name] for options in found} for name in found[0]}
    assert seen["fsdp.strategy"] == {"FULL_SHARD"} and seen["fsdp.prefetch"] == {"3"}
    assert seen["parallel.tp"] == {"1"} and len(seen["memory.recompute"]) == 3
    assert seen["fsdp.blocks"] == {"1", "4"} and seen["seed"] == {"0", "1"}
    only = space(given=set(), vary={"memory.recompute": ["full", "none"]}, only=True)
    assert [options["memory.recompute"] for options in only] == ["full", "none"]
    heads = "--model.n-head", "4", "--model.n-kv-head", "4"
    experts = space("--architecture", "llama", "--model.experts", "4", *heads, given=few)
    assert {options["parallel.ep"] for options in experts} == {"1", "2", "4"}
    assert not [o for o in experts if o["parallel.ep"] != "1" and o["fsdp.copies"] != "1"]
    no_host = space(given=few, offload=False)
    assert {options["memory.offload_optimizer"] for options in no_host} == {"False"}


def test_an_option_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="--vary: unknown option fsdp.prefech"):
        space(vary={"fsdp.prefech": ["1"]})
    with pytest.raises(ValueError, match="--vary parallel.tp: must be an integer, got 'two'"):
        space(vary={"parallel.tp": ["two"]})
