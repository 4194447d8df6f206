"""Where two features meet: every pair of them trains as it should, or is refused by an error that says why.

A feature is a few options of `train` (paired.py). Pairs meet in sets of up to twelve features, so that there
are few trainings: whoever looks into one that fails leaves features out of its set. Those that only move
things (strategies, offload, recomputation, ...) must not change a bit: a set gives what is left when they are
taken away, on FULL_SHARD, and nearly the same losses on one rank with the whole batch. Tensor and sequence
parallelism, on an axis of two more ranks, sum in another order: a set with one of them gives its own bits
whatever moves, and nearly the losses and weights of the set without it.
So does one with DiLoCo, of two hosts with the same rows; with a pipeline, of two stages that have a weight in
common; with context parallelism, beside the same net with whole sequences; and with expert parallelism,
beside it with all experts on each rank. Beside "tensor-invariant" tensor parallelism changes no bit, and
beside "world-invariant" expert parallelism.
"""

import warnings
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from shardrt.comm import thread
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.kernels.cpu._vectors import compiled_for
from tests import lab
from tests.fsdp import paired

STRATEGIES = ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")

MOVES = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "prefetch 0": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "offload parameters": {"offload": {"gradients": False, "optimizer_state": False}},
    "offload gradients": {"offload": {"parameters": False, "optimizer_state": False}},
    "offload optimizer": {"offload": {"parameters": False, "gradients": False}},
    "offload all": {"offload": {}},
    "step on host": {"offload": {"step": "host"}},
    "files": {"offload": {"directory": "spill"}},
    "recompute": {"recompute": "full"},
    "recompute but matmul": {"recompute": "matmul"},
    "recompute every second": {"recompute": "every second"},
    "offload activations": {"offload_activations": True},
    "in backward": {"in_backward": True},
    "late": {"late": True},
    "unit of two": {"unit_of_two": True},
    "forward method": {"forward_method": True},
    "save and load": {"save_and_load": True},
    "world-invariant": {"invariant": True},
}
NUMBERS = {
    "bf16": {"param_dtype": "bfloat16"},
    "fp16, scaled": {"param_dtype": "float16", "scaler": True},
    "fp32 reduce": {"reduce_dtype": "float32"},
    "bf16 output": {"output_dtype": "bfloat16"},
    "accumulate": {"micro_batches": ("reduce",)},
    "no_sync": {"micro_batches": ("no_sync",)},
    "clip norm": {"clip_norm": 0.1},
    "clip value": {"clip_value": 0.01},
    "SGD": {"optimizer": "SGD"},
    "frozen": {"frozen": True},
    "ignored": {"ignored": True},
    "unused units": {"unused": True},
    "dropout": {"dropout": 0.3},
    "tensor parallel": {"parallel": "tensor"},
    "sequence parallel": {"parallel": "sequence"},
    "pipeline": {"pipeline": True},
    "tensor-invariant": {"tensor_invariant": True},
    "context parallel": {"attention": True, "context": True},
    "experts": {"experts": "whole"},
    "expert parallel": {"experts": "spread"},
    "Muon": {"optimizer": "Muon"},
    "8-bit states": {"optimizer": "8-bit"},
    "bf16 states": {"optimizer": "bf16"},
    "quantised": {"quantised": Quantisation(8, 8, block=32, host_size=1)},
    "DiLoCo": {"diloco": True},
}
OPTIMIZERS = {"SGD", "Muon", "8-bit states", "bf16 states"}  # a run has one
FEATURES = MOVES | NUMBERS
PLACES = {name: place for place, name in enumerate(FEATURES)}
KNOWN = FEATURES | {"attention": {"attention": True}}
BY_RANK = {"unused units", "dropout"}  # what happens depends on the rank, so one rank is no reference
MASKS = {
    "world-invariant",
    "dropout",
}  # a micro-batch, which two hosts may have, has its own masks on any rank
LOW = {"bf16", "fp16, scaled", "bf16 output"}
ROUGH = LOW | {"8-bit states", "bf16 states", "quantised"}
# What the numbers depend on beside these: how units are cut into shards, and which parameters they have.
CUTS = {"quantised": {*STRATEGIES, "unit of two"}, "bf16 states": {"unit of two"}}
CUT = {"tensor parallel", "sequence parallel"}
UNCUT = {name: () for name in (*CUT, "pipeline", "DiLoCo")}  # what is left where nothing is cut in this way
UNCUT |= {"context parallel": ("attention",), "expert parallel": ("experts",)}

PARAMETERS_AWAY = ("offload parameters", "offload all", "step on host", "files")
OFFLOADS = (*PARAMETERS_AWAY, "offload gradients", "offload optimizer")

APPLIED = "the optimizer has in_backward=True and has applied these gradients already"
REFUSED = {
    # These gradients are used up, unit by unit, before all of them are there.
    ("in backward", "clip norm"): (RuntimeError, f"clip_grad_norm_: {APPLIED}"),
    ("in backward", "clip value"): (RuntimeError, f"clip_grad_value_: {APPLIED}"),
    ("in backward", "fp16, scaled"): (RuntimeError, f"GradScaler.unscale_: {APPLIED}"),
    ("in backward", "accumulate"): (RuntimeError, "a second backward .* accumulate with no_sync"),
    # These contradict each other.
    ("NO_SHARD", "reshard"): (ValueError, "reshard_after_forward=True does not fit NO_SHARD"),
    ("SHARD_OPT", "reshard"): (ValueError, "reshard_after_forward=True does not fit SHARD_OPT"),
    ("prefetch 0", "prefetch 2"): (ValueError, "unit .* has prefetch=., the outermost unit has ."),
    # Gradients of ignored parameters are each rank's own.
    ("clip norm", "ignored"): (ValueError, "clip_grad_norm_: parameter .* is not sharded"),
    ("world-invariant", "ignored"): (ValueError, "set_world_invariant: parameter 'norm.weight' is ignored"),
    # Each micro-batch has its place in a tree of sums on the device.
    ("world-invariant", "no_sync"): (RuntimeError, "no_sync: with set_world_invariant each backward reduces"),
    **{
        (name, "world-invariant"): (ValueError, "set_world_invariant: unit .* has its gradients on the host")
        for name in ("offload gradients", "offload all", "step on host", "files")
    },
    ("late", "world-invariant"): (RuntimeError, "with set_world_invariant the gradient of each micro-batch"),
    **{
        ("world-invariant", name, "expert parallel"): (ValueError, "added before they are rounded to 16 bits")
        for name in ("bf16", "fp16, scaled")
    },
    # Gradients of norms are summed over the parts of the time, which the tree does not know.
    ("world-invariant", "sequence parallel"): (ValueError, "is summed over .* too, not by the tree"),
    # The head is tied to the embedding, and what two stages use is added up when both have all of it.
    ("world-invariant", "pipeline"): (ValueError, "set_world_invariant: 'embed.weight' is on two stages"),
    ("in backward", "pipeline"): (RuntimeError, f"sum_tied: {APPLIED}"),
    # Of tokens that lie along "tp" nobody makes sums in parts, or by the tree.
    **{
        (cut, "tensor-invariant", name): (ValueError, "the style TokenParallel of .* does not support it")
        for cut in ("tensor parallel", "sequence parallel")
        for name in ("experts", "expert parallel")
    },
    **{
        ("world-invariant", "tensor parallel", name): (ValueError, "leave TokenParallel out")
        for name in ("experts", "expert parallel")
    },
    ("in backward", "Muon"): (TypeError, "unexpected keyword argument 'in_backward'"),
    **{(name, "DiLoCo"): (ValueError, "DiLoCo: parameter .* is offloaded") for name in OFFLOADS},
    **{
        (name, "quantised"): (ValueError, "quantised .* the parameters are offloaded")
        for name in PARAMETERS_AWAY
    },
    # Between hosts whole parameters do not move; nor do copies that lie on several hosts each.
    ("NO_SHARD", "quantised"): (ValueError, "NO_SHARD keeps whole parameters on each rank"),
    **{
        (name, "quantised"): (ValueError, f"{name} on a mesh .* has not one copy of all shards on each host")
        for name in ("HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")
    },
    ("world-invariant", "quantised"): (ValueError, "set_world_invariant: .* quantised collectives"),
    # A pipeline calls forward.
    ("forward method", "pipeline"): (ValueError, "register_forward_method: Net has stages"),
}


def options_of(names):
    """Option -> its values, one for each of the features that have it."""
    options = {}
    for name in names:
        for key, value in KNOWN[name].items():
            options.setdefault(key, []).append(value)
    return options


def train_on(ranks, names, directory=None, device="cpu"):
    """(losses by rank, weights) of a net with the features `names`."""
    options = options_of(names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # unused units do
        warnings.filterwarnings("ignore", "fully_shard: collectives are not quantised")  # on one rank
        results = thread.run(ranks, paired.train, options, directory, device)
    return [losses for losses, _ in results], results[0][1]


@cache
def reference(ranks, names):
    """Without anything that only moves things."""
    return train_on(ranks, names)


def nearly_the_same(cut, uncut, names):
    """Ranks with the same rows have the same losses, the mean of their parts of the time.

    They are nearly those of one rank that has the modules and the time whole. So are the weights; where
    gradients have 16 bits AdamW may turn a few that are nearly 0.
    """
    of_losses, of_weights, most = 1e-5, 1e-5, 0
    if ROUGH & set(names):
        of_losses, of_weights, most = rough(names), 1e-3, 0.05 if "quantised" in names else 0.01
    hosts, stages, parts, cuts = twos(names)
    losses = np.reshape(cut[0], (hosts * stages, -1, parts, cuts, len(cut[0][0])))
    assert np.array_equal(losses, np.broadcast_to(losses[:1, :, :, :1], losses.shape))
    assert np.allclose(losses[0, :, :, 0].mean(1), uncut[0], rtol=0, atol=of_losses)
    assert cut[1].keys() == uncut[1].keys()
    apart = {name: np.abs(cut[1][name] - values) for name, values in uncut[1].items()}
    far = np.concatenate([each.ravel() for each in apart.values()]) > of_weights
    assert far.mean() <= most, {name: each.max() for name, each in apart.items()}


def rough(names):
    """By how much losses may differ; in 8 bits a token may go to another expert."""
    return 0.1 if "quantised" in names else 3e-2


def readable(names):
    return " + ".join(names)


def share_an_option(names):
    first, second = names
    return bool(FEATURES[first].keys() & FEATURES[second].keys())


FEW = 6  # features beside 16 bits: each rounds what the others have rounded


def sets_of(pairs, most=12):
    """Sets of features that are not refused, all of whose pairs are among `pairs`; each is in one; greedy."""
    sets, allowed, missing = [], set(pairs), dict.fromkeys(pairs)
    while missing:
        found = list(next(iter(missing)))
        while len(found) < most:
            new = {
                name: sum(pair in missing for pair in with_each(name, found))
                for name in FEATURES
                if name not in found
                and (len(found) < FEW or not LOW.intersection([name, *found]))
                and allowed.issuperset(with_each(name, found))
                and fit([name, *found])
                and ranks_for([name, *found]) <= 8
            }
            if not any(new.values()):
                break
            found.append(max(new, key=new.get))
        sets.append(in_order(found))
        for pair in combinations(sets[-1], 2):
            missing.pop(pair, None)
    return sets


def side_by_side(pairs, most=6):
    """Pairs that share an option, those of other options together in sets that are not refused."""
    sets = []
    for pair in pairs:
        for place, others in enumerate(sets):
            met = {met for name in pair for met in with_each(name, others)}
            if len(others) < most and APART.issuperset(met) and fit([*others, *pair]):
                sets[place] = in_order([*others, *pair])
                break
        else:
            sets.append(pair)
    return sets


def in_order(names):
    return tuple(name for name in FEATURES if name in names)


def fit(names):
    names = set(names)
    return not any(names.issuperset(refused) for refused in REFUSED)


def with_each(name, others):
    """Pairs, in the order of FEATURES."""
    place = PLACES[name]
    return [(name, other) if place < PLACES[other] else (other, name) for other in others]


def twos(names):
    """Ranks along the axes that have the same rows: of hosts, stages, parts of the time, cut modules."""
    return [2 if kinds & set(names) else 1 for kinds in ({"DiLoCo"}, {"pipeline"}, {"context parallel"}, CUT)]


def ranks_for(names, data=2):
    """`data` ranks, four of hybrids and of experts; twice as many for each axis of the same rows."""
    others = twos(names)
    spread = "expert parallel" in names and max(others[2:]) == 1  # experts go along these axes too
    return (4 if spread or any(name.startswith("HYBRID") for name in names) else data) * np.prod(others)


PAIRS = [pair for pair in combinations(FEATURES, 2) if not OPTIMIZERS.issuperset(pair)]
TRAINED = [pair for pair in PAIRS if pair not in REFUSED]
APART = {pair for pair in TRAINED if not share_an_option(pair)}
TOGETHER = sets_of([pair for pair in TRAINED if pair in APART])
IN_TURNS = side_by_side([pair for pair in TRAINED if pair not in APART])  # units have one value or the other


def test_every_pair_is_among_the_sets():
    refused = [names for names in REFUSED if len(names) == 2]
    met = {pair for names in [*TOGETHER, *IN_TURNS, *refused] for pair in combinations(names, 2)}
    assert met == set(PAIRS)


@pytest.mark.parametrize("names", REFUSED, ids=readable)
def test_what_does_not_go_together_is_refused(names, tmp_path):
    kind, message = REFUSED[names]
    with pytest.raises(kind, match=message):
        train_on(ranks_for(names), names, tmp_path)


@pytest.mark.parametrize("names", [*IN_TURNS, *TOGETHER], ids=readable)
def test_all_of_these_go_together(names, tmp_path):
    ranks = ranks_for(names)
    found = train_on(ranks, names, tmp_path)
    masks = MASKS.issubset(names) and not {"accumulate", "DiLoCo"}.isdisjoint(names)
    change = tuple(name for name in names if name in NUMBERS or masks and name in MASKS)
    if {"world-invariant", "expert parallel"}.issubset(names):  # then wherever experts are changes no bit
        if "8-bit states" in names:  # but of states in blocks of what a rank has
            change = (*change, "world-invariant")
        else:
            change = tuple("experts" if name == "expert parallel" else name for name in change)
    cuts = {cut for name in names for cut in CUTS.get(name, ())}
    lab.assert_equal(found, reference(ranks, in_order({*change, *cuts.intersection(names)})))
    uncut = tuple(dict.fromkeys(left for name in change for left in UNCUT.get(name, (name,))))
    tolerance = rough(names) if ROUGH & set(names) else 1e-4
    if not BY_RANK & set(names):
        whole = reference(1, uncut)[0][0]
        assert np.allclose(np.mean(found[0], axis=0), whole, rtol=0, atol=tolerance)
    if uncut != change and not {"DiLoCo", "dropout"}.issubset(names):  # each host has its own masks
        expected = reference(ranks // np.prod(twos(names)), uncut)
        nearly_the_same(found, expected, names)
        if UNCUT.keys() & set(names) == {"tensor parallel"} and "tensor-invariant" in names:
            lab.assert_equal(found[1], expected[1])


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_said_to_change_numbers_does(name):
    if name == "pipeline" and not compiled_for("fma"):
        pytest.skip("its sums differ by what fused multiply-adds do not round")
    # Reducing in fp32, or by hand, is nothing new where all is fp32.
    among = ("bf16",) if name in ("fp32 reduce", "ignored") else ()
    _, plain = reference(2, (*among, *UNCUT.get(name, ())))
    _, changed = reference(2, (*among, name))
    assert any(not np.array_equal(plain[key], changed[key]) for key in plain.keys() & changed.keys())
