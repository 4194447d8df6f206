"""Collectives in 8 and 4 bits between hosts: values, bytes, errors. A host here is some of the threads."""

import numpy as np
import pytest

import shardrt
from shardrt.fsdp import MixedPrecisionPolicy, full_parameters, set_world_invariant
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.kernels import cpu as K
from shardrt.kernels.packed import packed_bytes
from tests import lab

BLOCK = 32


def policy(param="float32", **options):
    return MixedPrecisionPolicy(param, "float32", quantised=Quantisation(block=BLOCK, **options))


def dequantised(group, bits):
    """What every rank must have gathered, from the shards of all."""
    shard, how = group.shard, (bits, BLOCK)
    packed = np.zeros((1, packed_bytes(shard.size, *how)), np.uint8)
    own, full = np.empty_like(shard), np.zeros(group.layout.total, np.float32)
    K.quantise.pack(shard, packed[0], *how)
    K.quantise.unpack(packed, own, *how)
    full[slice(*group.layout.shard_range(group.ranks.rank))] = own
    group.communicator.all_reduce(full, op="sum", stream=shardrt.device.current().current_stream)
    return full


@lab.on_ranks(2, 4)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_forward_sees_quantised_weights_and_the_shards_stay_exact(bits, param):
    exact, _ = lab.build()
    model, _ = lab.build(mp_policy=policy(param, gather_bits=bits, host_size=1))
    seen, block = {}, model.blocks[1]
    forward = block.forward

    def watched(x):
        (group,) = (group for group in lab.groups_of(model) if group.unit.modules[0] is block)
        expected = dequantised(group, bits)
        if param == "bfloat16":
            K.cast.round_to(expected, expected, param)
        seen["right"] = np.array_equal(
            block.up.weight.data.ravel(), part_of(group, block.up.weight, expected)
        )
        return forward(x)

    block.forward = watched
    with shardrt.no_grad():
        model(lab.batches(1)[0][0])
    assert seen["right"]
    with full_parameters(model), full_parameters(exact):
        for one, other in zip(model.parameters(), exact.parameters(), strict=True):
            np.testing.assert_array_equal(one.data, other.data)


def part_of(group, parameter, full):
    position = [id(each) for each in group.parameters].index(id(parameter))
    entry = group.layout.entries[position]
    return full[entry.offset : entry.stop]


@lab.on_ranks(4)
@pytest.mark.parametrize(("host_size", "everywhere"), [(1, False), (2, False), (2, True)])
def test_bytes_are_those_of_the_formula(host_size, everywhere):
    """Of each forward and backward a gather, then a sum in a host, then 8 bits between hosts."""
    counts, hosts = lab.Counts(), 4 // host_size
    how = {"host_size": host_size, "within_hosts": everywhere, "error_feedback": True}
    how = policy(gather_bits=4, reduce_bits=8, **how)
    model, mesh = lab.build(wrap=counts, mp_policy=how, reshard_after_forward=True)
    counts.reset()
    lab.backward(model, mesh)
    shardrt.device.current().wait_here()
    sizes = [group.layout.shard_size for group in lab.groups_of(model)]
    gathers = 2 * 3 * sum(packed_bytes(size, 4, BLOCK) for size in sizes)
    quantised, exact = sum(packed_bytes(size, 8, BLOCK) for size in sizes), 4 * sum(sizes)
    within = hosts * (host_size - 1)
    expected = [gathers, (hosts - 1 + within) * quantised, 0]
    if not everywhere:
        expected[1:] = [(hosts - 1) * quantised, within * exact]
    assert counts.bytes("all_gather", "all_to_all", "reduce_scatter") == expected
    assert lab.bytes_held(model) == lab.bytes_planned(model)


def gradients_of(how):
    model, mesh = lab.build(mp_policy=how)
    lab.backward(model, mesh)
    return lab.gradients(model)


@lab.on_ranks(2, 4)
@pytest.mark.parametrize(("host_size", "everywhere"), [(1, False), (2, False), (2, True)])
def test_a_reduction_is_off_by_half_a_step_of_each_host_at_most_and_repeats(host_size, everywhere):
    exact, how = (
        gradients_of(MixedPrecisionPolicy()),
        policy(reduce_bits=8, host_size=host_size, within_hosts=everywhere),
    )
    found, again = gradients_of(how), gradients_of(how)
    lab.assert_equal(found, again)
    largest = max(np.abs(gradient).max() for gradient in exact.values())
    differs = False
    for name, gradient in exact.items():
        # The mean of hosts' sums: no host's sum is larger than 12 times the largest mean here.
        assert np.abs(found[name] - gradient).max() <= 12 * largest / 127 / 2
        differs |= not np.array_equal(found[name], gradient)
    hosts = lab.groups_of(lab.build()[0])[0].ranks.size // host_size
    assert differs == (hosts > 1)  # on one host nothing is quantised


@lab.on_ranks(2)
def test_training_follows_that_in_float32():
    losses = {}
    for name, how in {
        "float32": MixedPrecisionPolicy(),
        "8 bits": policy(gather_bits=8, reduce_bits=8, host_size=1),
        "4 bits": policy(gather_bits=4, reduce_bits=8, host_size=1, error_feedback=True),
    }.items():
        model, mesh = lab.build(mp_policy=how)
        batch = lab.batches(1)[0]
        losses[name] = lab.train(model, mesh, [batch] * 12).losses
    assert losses["float32"][-1] < 0.98 * losses["float32"][0]
    np.testing.assert_allclose(losses["8 bits"], losses["float32"], rtol=0.01)
    np.testing.assert_allclose(losses["4 bits"], losses["float32"], rtol=0.1)
    assert losses["8 bits"] != losses["float32"]


@lab.on_ranks(2)
def test_error_feedback_lets_errors_of_equal_gradients_cancel():
    """Over 16 steps with one gradient the sum is off by one rounding, not by sixteen."""
    exact, errors, steps = gradients_of(MixedPrecisionPolicy()), {}, 16
    for feedback in (False, True):
        how = policy(reduce_bits=8, host_size=1, error_feedback=feedback)
        model, mesh = lab.build(mp_policy=how)
        total = {name: 0.0 for name in exact}
        for _ in range(steps):
            lab.backward(model, mesh)
            for name, gradient in lab.gradients(model).items():
                total[name] = total[name] + gradient.astype(np.float64)
            model.zero_grad()
        errors[feedback] = sum(np.abs(total[name] - steps * exact[name]).sum() for name in exact)
    assert 0 < errors[True] < errors[False] / 4


@lab.on_ranks(4)
@pytest.mark.parametrize("host_size", [1, 2])
def test_a_secondary_copy_keeps_later_gathers_within_the_host_and_changes_no_bit(host_size):
    results, received = [], []
    for secondary in (False, True):
        counts = lab.Counts()
        how = policy(gather_bits=8, host_size=host_size, secondary=secondary)
        model, mesh = lab.build(wrap=counts, mp_policy=how, reshard_after_forward=True)
        results.append(lab.train(model, mesh, 3))
        counts.reset()
        lab.backward(model, mesh)
        shardrt.device.current().wait_here()
        received.append(counts.bytes("all_gather")[0])
    lab.assert_equal(results[1], results[0])
    size = sum(packed_bytes(group.layout.shard_size, 8, BLOCK) for group in lab.groups_of(model))
    hosts = 4 // host_size
    assert received == [2 * 3 * size, (3 + hosts * (host_size - 1)) * size]
    assert lab.bytes_held(model) == lab.bytes_planned(model)


@lab.on_ranks(2)
def test_sums_that_do_not_depend_on_the_ranks_are_refused():
    model, mesh = lab.build(mp_policy=policy(reduce_bits=8, host_size=1))
    set_world_invariant(model, 2)
    with pytest.raises(ValueError, match="has quantised collectives, whose blocks depend on the number"):
        lab.backward(model, mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather_bits": 2}, "gather_bits must be 8, 4 or None, got 2"),
        ({"reduce_bits": 4}, "reduce_bits must be 8 or None, got 4"),
        ({"block": 33}, "block must be a multiple of 32, got 33"),
        ({"host_size": 0}, "host_size must be 1 or more, got 0"),
        ({"secondary": True}, "secondary needs gather_bits=8 or 4"),
        ({"error_feedback": True}, "error_feedback needs reduce_bits=8"),
    ],
)
def test_other_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Quantisation(**options)
