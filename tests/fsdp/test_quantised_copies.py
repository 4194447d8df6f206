"""Gradients of HYBRID_SHARD in 8 bits between hosts; settings of Quantisation that are refused or said."""

import warnings

import numpy as np
import pytest

import shardrt
from shardrt import optim
from shardrt.fsdp import MixedPrecisionPolicy
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.replicas import check_replicas
from shardrt.kernels.packed import packed_bytes
from tests import lab

BLOCK = 32


def policy(host_size, **options):
    how = Quantisation(**{"reduce_bits": 8, "block": BLOCK, "host_size": host_size, **options})
    return MixedPrecisionPolicy("float32", "float32", quantised=how)


def hybrid(copies, shards, how, **more):
    return lab.build(strategy="HYBRID_SHARD", shape=(copies, shards), mp_policy=how, **more)


@lab.on_ranks(4)
@pytest.mark.parametrize(("copies", "shards"), [(2, 2), (4, 1)])
def test_bytes_are_those_of_the_formula(copies, shards):
    """Between hosts two exchanges in 8 bits, in place of a float32 reduce-scatter and all-gather."""
    found = []
    for how in (MixedPrecisionPolicy(), policy(shards, error_feedback=True)):
        counts = lab.Counts()
        model, mesh = hybrid(copies, shards, how, wrap=counts)
        counts.reset()
        lab.backward(model, mesh)
        shardrt.device.current().wait_here()
        found.append(counts.bytes("all_to_all", "reduce_scatter", "all_gather"))
        assert lab.bytes_held(model) == lab.bytes_planned(model)
    parts = [group.layout.shard_size // copies for group in lab.groups_of(model)]
    quantised = (copies - 1) * sum(packed_bytes(part, 8, BLOCK) for part in parts)
    exact = (copies - 1) * 4 * sum(parts)
    (_, summed, gathered), less = found
    assert less == [quantised, summed - exact, gathered - exact + quantised]


@lab.on_ranks(4)
@pytest.mark.parametrize(("copies", "shards"), [(2, 2), (4, 1)])
def test_sums_are_off_by_two_roundings_and_repeat_and_copies_stay_alike(copies, shards):
    found = []
    for how in (MixedPrecisionPolicy(), policy(shards), policy(shards)):
        model, mesh = hybrid(copies, shards, how)
        optimizer = lab.adamw(model.parameters())
        lab.backward(model, mesh)
        found.append(lab.gradients(model) if shards > 1 else shards_of(model))
        lab.update(optimizer)
        check_replicas(model, optimizer)
    exact, first, again = found
    lab.assert_equal(first, again)
    largest = max(np.abs(gradient).max() for gradient in exact.values())
    for name, gradient in exact.items():  # a sum and its parts are no larger than 12 times the largest mean
        assert np.abs(first[name] - gradient).max() <= 12 * largest / 127
    assert any((first[name] != exact[name]).any() for name in exact)


def shards_of(model):
    return {name: np.array(parameter.grad) for name, parameter in model.named_parameters()}


@lab.on_ranks(4)
def test_errors_of_equal_gradients_cancel_in_both_roundings():
    errors, steps = {}, 16
    model, mesh = hybrid(2, 2, MixedPrecisionPolicy())
    lab.backward(model, mesh)
    exact = lab.gradients(model)
    for feedback in (False, True):
        model, mesh = hybrid(2, 2, policy(2, error_feedback=feedback))
        total = {name: 0.0 for name in exact}
        for _ in range(steps):
            lab.backward(model, mesh)
            for name, gradient in lab.gradients(model).items():
                total[name] = total[name] + gradient.astype(np.float64)
            model.zero_grad()
        errors[feedback] = sum(np.abs(total[name] - steps * exact[name]).sum() for name in exact)
    assert 0 < errors[True] < errors[False] / 4


@lab.on_ranks(4)
def test_accumulated_gradients_add_up():
    found = []
    for times in (1, 2):
        model, mesh = hybrid(2, 2, policy(2))
        for _ in range(times):
            lab.backward(model, mesh)
        found.append(lab.gradients(model))
    for name, gradient in found[0].items():
        np.testing.assert_array_equal(found[1][name], 2 * gradient)


@pytest.mark.parametrize(
    ("strategy", "shape", "host_size", "message"),
    [
        ("NO_SHARD", None, 2, "NO_SHARD keeps whole parameters on each rank; use FULL_SHARD"),
        ("HYBRID_SHARD", (2, 2), 1, r"mesh \(2, 2\) has not one copy of all shards on each host of 1 ranks"),
        ("HYBRID_SHARD", (4, 1), 2, r"use a mesh \(2, 2\), or FULL_SHARD"),
        ("FULL_SHARD", None, 3, "its hosts have 3, 1 ranks; each must have as many"),
    ],
)
@lab.on_ranks(4)
def test_settings_that_do_not_fit_are_refused(strategy, shape, host_size, message):
    with pytest.raises(ValueError, match=message):
        lab.build(strategy=strategy, shape=shape, mp_policy=policy(host_size))


def said(ranks, **settings):
    """What rank 0 says; the others say nothing."""

    def rank():
        lab.build(**settings)

    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("default")
        shardrt.comm.thread.run(ranks, rank)
    return [str(each.message) for each in messages if "quantised" in str(each.message)]


def test_what_has_no_effect_is_said_once():
    (one_host,) = said(2, mp_policy=policy(2))
    assert "all ranks share one host's memory" in one_host
    both = policy(2, gather_bits=8)
    (copies,) = said(4, strategy="HYBRID_SHARD", shape=(2, 2), mp_policy=both)
    assert "parameters are not quantised, because HYBRID_SHARD gathers them within each host" in copies
    assert said(4, mp_policy=both) == []


def test_an_optimizer_follows_float32():
    def rank(how):
        model, mesh = hybrid(2, 2, how)
        return lab.train(model, mesh, 6, optimizer=optim.AdamW).losses

    (exact, *_), (found, *_) = (
        shardrt.comm.thread.run(4, rank, how) for how in (MixedPrecisionPolicy(), policy(2))
    )
    np.testing.assert_allclose(found, exact, rtol=0.01)
    assert found != exact
