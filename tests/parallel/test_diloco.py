"""DiLoCo is the paper's outer SGD on what hosts learn apart, to the bit, however a host shards the model."""

import threading

import numpy as np
import pytest

from shardrt import optim
from shardrt.checkpoint import CheckpointError, CheckpointManager, full_state_dict
from shardrt.checkpoint.pieces import pieces_of
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, memory_plan
from shardrt.parallel.diloco import DiLoCo, outer_bytes, strided_fragments
from shardrt.parallel.outer_exchange import message_bytes
from tests import lab
from tests.lab import Block

BATCHES = lab.batches(16, size=8)


class Run:
    """One rank's model on `hosts` x `each` ranks, and its outer optimizer."""

    def __init__(self, hosts=2, each=2, fragments=1, wrap=None, sharded=None, address=None, **settings):
        self.mesh = init_device_mesh("cpu", (hosts, each), mesh_dim_names=("diloco", "dp_shard"), wrap=wrap)
        self.host = self.mesh.rank_of("diloco")
        self.model = lab.shard(lab.seeded(), self.mesh["dp_shard"], **(sharded or {}))
        self.blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        self.inner = optim.AdamW(self.model.parameters(), lr=1e-2)
        parts = strided_fragments(self.blocks, fragments) if fragments > 1 else None
        among = self.link(address) if address else self.mesh["diloco"]
        self.outer = DiLoCo(self.inner, among, parts, **settings)

    def inner_step(self, step):
        """On this rank's rows of the batch: other rows on each rank of all hosts."""
        lab.backward(self.model, self.mesh, BATCHES[step])
        lab.update(self.inner)

    def train(self, first, last, absent=None):
        """absent: a host that is left out of all exchanges that begin in these steps."""
        for step in range(first, last):
            self.inner_step(step)
            self.outer.step(step + 1, present=self.host != absent)

    def weights(self):
        """Whole, on the first rank of a host."""
        return {name: np.array(values) for name, values in (full_state_dict(self.model) or {}).items()}

    def checkpoints(self, root):
        """Of this host."""
        folder = root / f"host-{self.host}"
        return CheckpointManager(folder, self.model, self.outer, self.mesh["dp_shard"])


def outer_sgd(outer, velocity, gradient, lr, momentum, nesterov):
    """torch.optim.SGD's update, in NumPy."""
    velocity *= np.float32(momentum)
    velocity += gradient
    outer -= np.float32(lr) * (gradient + np.float32(momentum) * velocity if nesterov else velocity)


def watched(steps, *, each=2, fragments=1, delay=0, **settings):
    """The whole weights before and after `step` in each step, with each host's number."""
    run = Run(each=each, fragments=fragments, fragment_sync_delay=delay, **settings)
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    parts = [
        [names[id(parameter)] for piece in fragment.pieces for parameter, _ in piece.members]
        for fragment in run.outer.fragments
    ]
    seen = [run.weights()]
    for step in range(steps):
        run.inner_step(step)
        before = run.weights()
        run.outer.step(step + 1)
        seen.append((before, run.weights()))
    return run.mesh.rank, parts, seen


CASES = {
    "each step": {"sync_every": 1},
    "every 3 steps": {"sync_every": 3},
    "plain momentum": {"sync_every": 2, "nesterov": False, "lr": 0.5, "momentum": 0.5},
    "fragments": {"sync_every": 3, "fragments": 3},
    "warm-up": {"sync_every": 4, "fragments": 2, "warmup_steps": 4, "warmup_every": 2},
    "delay": {"sync_every": 4, "fragments": 2, "delay": 1},
    "alpha": {"sync_every": 4, "fragments": 2, "delay": 1, "fragment_update_alpha": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_outer_steps_are_those_of_a_reference_in_numpy(case):
    settings, steps = CASES[case], 8
    results = thread.run(4, watched, steps, **settings)
    parts, hosts = results[0][1], [results[0][2], results[2][2]]
    fragments = settings.get("fragments", 1)
    warmup, short = settings.get("warmup_steps", 0), settings.get("warmup_every", 10) // fragments
    interval = settings["sync_every"] // fragments
    due = [*range(short, warmup + 1, short), *range(warmup + interval, steps + interval, interval)]
    delay, alpha = settings.get("delay", 0), settings.get("fragment_update_alpha", 0)
    how = [settings.get("lr", 0.7), settings.get("momentum", 0.9), settings.get("nesterov", True)]
    outer = {name: values.copy() for name, values in hosts[0][0].items()}
    velocity = {name: np.zeros_like(values) for name, values in outer.items()}
    gradient = {}
    taken = set()
    for done in range(1, steps + 1):
        before, after = zip(*(host[done] for host in hosts), strict=True)
        expected = [{name: values.copy() for name, values in each.items()} for each in before]
        if done + delay in due:
            for name in parts[due.index(done + delay) % len(parts)]:
                gradient[name] = ((outer[name] - before[0][name]) + (outer[name] - before[1][name])) / 2
        if done in due:
            for name in parts[due.index(done) % len(parts)]:
                taken.add(name)
                outer_sgd(outer[name], velocity[name], gradient.pop(name), *how)
                for each in expected:
                    each[name] = alpha * each[name] + (1 - alpha) * outer[name] if alpha else outer[name]
        lab.assert_equal([dict(each) for each in after], expected)
    assert taken == outer.keys()


def test_an_outer_step_with_lr_1_and_no_momentum_averages_parameters():
    results = thread.run(4, watched, 2, sync_every=2, lr=1.0, momentum=0.0)
    (first, after), (second, other) = results[0][2][2], results[2][2][2]
    for name in after:
        assert not np.array_equal(first[name], second[name])
        np.testing.assert_allclose(after[name], (first[name] + second[name]) / 2, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(after[name], other[name])


def losses_behind_an_outer_step(**sharded):
    """The losses of all hosts on one batch, before and after they took the outer parameters."""
    run = Run(sync_every=2, sharded=sharded)
    run.train(0, 1)
    run.inner_step(1)
    losses = [lab.loss_of(run.model, *BATCHES[2]).item()]
    run.outer.step(2)
    return *losses, lab.loss_of(run.model, *BATCHES[2]).item()


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("NO_SHARD", "bfloat16"),
        ("SHARD_OPT", "float32"),
        ("SHARD_GRAD_OP", "bfloat16"),
        ("FULL_SHARD", "float32"),
    ],
)
def test_every_strategy_computes_with_the_outer_parameters(strategy, dtype):
    policy = MixedPrecisionPolicy(dtype, "float32")
    results = thread.run(4, losses_behind_an_outer_step, strategy=strategy, mp_policy=policy)
    before, after = zip(*results, strict=True)
    assert len(set(before)) > 1 and len(set(after)) == 1


def overlapped(computed):
    """Host 1 joins the exchange of step 1 after host 0 has computed step 2."""
    run = Run(each=1, sync_every=2, fragment_sync_delay=1)
    run.inner_step(0)
    if run.host == 1:
        assert computed.wait(50)
    run.outer.step(1)
    run.inner_step(1)
    if run.host == 0:
        computed.set()
    run.outer.step(2)
    return run.weights()


def test_hosts_compute_while_they_exchange():
    lab.assert_equal(*thread.run(2, overlapped, threading.Event()))


SAVED = {
    "whole": {"sync_every": 4},
    "exchange under way": {
        "sync_every": 6,
        "fragments": 2,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.5,
    },
}


def interrupted(root, last, *, each=2, resumes=False, save=None, absent=None, **settings):
    """The weights, moments and outer state of this rank after step `last`, in pieces."""
    run = Run(each=each, **settings)
    checkpoints, first = run.checkpoints(root), 0
    if resumes:
        first, extra = checkpoints.restore()
        run.outer.resume(first, **extra)
    run.train(first, save or last, absent=absent)
    if save:
        checkpoints.save(save, {"took_part": run.outer.took_part})
        run.train(save, last)
    found = {}
    for piece in pieces_of(run.model, run.outer, saving=False):
        found.setdefault((piece.kind, piece.parameter), []).append((piece.extents, np.array(piece.array)))
    return run.host, first, found, run.weights()


@pytest.mark.parametrize(
    ("case", "step", "absent"),
    [("whole", 5, None), ("exchange under way", 4, None), ("exchange under way", 5, 1)],
)
def test_a_killed_run_goes_on_to_the_bit(tmp_path, case, step, absent):
    whole = thread.run(4, interrupted, tmp_path, 10, save=step, absent=absent, **SAVED[case])
    again = thread.run(4, interrupted, tmp_path, 10, resumes=True, **SAVED[case])
    assert [each[1] for each in again] == [step] * 4
    kinds = {kind for kind, _ in again[0][2]}
    assert {"parameter", "m", "v", "outer_parameter", "outer_momentum"} <= kinds
    lab.assert_equal([each[2] for each in again], [each[2] for each in whole])


def outer_state(root, each, load):
    """(step, outer parameters and momentum by element) of this rank, saved or restored."""
    run = Run(each=each, sync_every=3)
    step = 0
    if load:
        step, _ = run.checkpoints(root).restore()
    else:
        run.train(0, 5)
        run.checkpoints(root).save(5)
    found = {}
    for piece in pieces_of(run.model, run.outer, saving=False):
        at = 0
        for extent in piece.extents:
            for first in range(extent.first, extent.first + extent.size):
                found[piece.kind, piece.parameter, first] = piece.array[at]
                at += 1
    return run.host, step, found


def test_outer_state_is_restored_on_other_meshes(tmp_path, each=3):
    before = thread.run(4, outer_state, tmp_path, 2, load=False)
    after = thread.run(2 * each, outer_state, tmp_path, each, load=True)
    for host in range(2):
        saved = {key: v for h, _, found in before if h == host for key, v in found.items()}
        restored = {key: v for h, _, found in after if h == host for key, v in found.items()}
        assert saved == restored
    assert {step for _, step, _ in after} == {5}


def bytes_between_hosts(**settings):
    """(bytes that this rank gets from the other host in 12 steps, elements of its shards)."""
    counts = lab.Counts()
    run = Run(wrap=counts, **settings)
    run.train(0, 12)
    outer = run.mesh["diloco"].communicator("outer")
    (received,) = (each.bytes for each in counts.communicators if each.communicator is outer)
    return sum(received.values()), sum(piece.storage.shard.size for piece in run.inner.slices)


@pytest.mark.parametrize("every", [2, 12])
def test_hosts_exchange_one_in_sync_every_of_the_bytes(every):
    for received, size in thread.run(4, bytes_between_hosts, sync_every=every):
        assert received == 12 // every * 4 * (size + 1)  # an all-reduce between 2: 2 * 1/2 of the buffer


def test_codes_have_5_bits_for_each_element():
    for received, size in thread.run(4, bytes_between_hosts, sync_every=4, should_quantize=True):
        assert received == 3 * message_bytes(size, quantize=True)
    assert message_bytes(32000, quantize=True) == 32000 * 5 / 8 + 4 + 12  # and the number of hosts, to 16


def quantized(steps):
    run = Run(sync_every=2, should_quantize=True, lr=1.0, momentum=0.0)
    for step in range(steps):
        run.inner_step(step)
        before = run.weights()
        run.outer.step(step + 1)
    return before, run.weights()


def test_outer_steps_in_4_bits_give_all_hosts_the_same_near_the_mean():
    results = thread.run(4, quantized, 2)
    (first, after), (second, other) = results[0], results[2]
    lab.assert_equal(after, other)
    start = thread.run(2, lambda: Run(hosts=1, sync_every=1).weights())[0]
    for name, values in after.items():
        deltas = [np.abs(each[name] - start[name]).max() for each in (first, second)]
        error = np.abs(values - (first[name] + second[name]) / 2)
        assert (error <= max(deltas) / 14 + 1e-6).all()  # half of a seventh of the largest in a block


def without_host(absent, steps=6):
    """Weights after each step; host `absent` is left out of the outer step after step 3."""
    run = Run(sync_every=3)
    seen = []
    for step in range(steps):
        run.inner_step(step)
        before = run.weights()
        run.outer.step(step + 1, present=step != 2 or run.host != absent)
        seen.append((before, run.weights()))
    return run.host, seen


def test_a_host_that_is_left_out_takes_the_outer_parameters_of_the_others():
    results = thread.run(4, without_host, 1)
    start = thread.run(2, lambda: Run(hosts=1, sync_every=1).weights())[0]
    (before, after), (_, other) = results[0][1][2], results[2][1][2]
    for name, outer in start.items():
        outer_sgd(outer, np.zeros_like(outer), outer - before[name], 0.7, 0.9, True)
        np.testing.assert_array_equal(after[name], outer)
    lab.assert_equal(after, other)
    lab.assert_equal(results[0][1][-1][1], results[2][1][-1][1])  # and takes part in the next


def behind(lost):
    """The weights after step 6; after step 4 host `lost` has lost its parameters and its outer state."""
    run = Run(sync_every=2)
    run.train(0, 4)
    if lost is not None:
        for piece in run.outer.slices if run.host == lost else ():
            for array in (piece.storage.shard, *piece.outer.values()):
                array[...] = 0
        run.outer.catch_up(root=1 - lost)
    run.train(4, 6)
    return run.weights()


def test_a_host_that_comes_back_catches_up(lost=1):
    lab.assert_equal(thread.run(4, behind, lost)[::2], thread.run(4, behind, None)[::2])


REFUSED = {
    "sync_every must be a positive multiple of the 2 fragments, got 3": {"sync_every": 3, "fragments": 2},
    "fragment_sync_delay must be from 0 .* 2, got 2": {"sync_every": 2, "fragment_sync_delay": 2},
    "warmup_every must be a multiple of the 2 fragments .* got 3 and 3": {
        "sync_every": 2,
        "fragments": 2,
        "warmup_steps": 3,
        "warmup_every": 3,
    },
    "fragment_sync_delay must be below warmup_every .* 1, got 1": {
        "sync_every": 2,
        "warmup_steps": 3,
        "warmup_every": 1,
        "fragment_sync_delay": 1,
    },
    "fragment_update_alpha must be in": {"sync_every": 1, "fragment_update_alpha": 1.0},
    "the outer lr must be positive": {"sync_every": 1, "lr": 0.0},
    "count must be from 1 to the 3 blocks, got 4": {"sync_every": 4, "fragments": 4},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message):
    with pytest.raises(ValueError, match=message):
        Run(hosts=1, each=1, **REFUSED[message])


def test_a_checkpoint_of_the_inner_optimizer_alone_is_refused(tmp_path):
    run = Run(hosts=1, each=1, sync_every=1)
    CheckpointManager(tmp_path / "host-0", run.model, run.inner, run.mesh["dp_shard"]).save(1)
    with pytest.raises(CheckpointError, match="no 'outer_momentum' of .*, DiLoCo keeps 'm', 'v', 'outer"):
        run.checkpoints(tmp_path).restore()


def test_refuses_a_unit_of_two_fragments():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("diloco", "dp_shard"))
    model = fully_shard(lab.seeded(), mesh=mesh["dp_shard"])
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    with pytest.raises(ValueError, match="'blocks.1.up.weight' is in one unit with parameters of another"):
        DiLoCo(optim.AdamW(model.parameters()), mesh["diloco"], strided_fragments(blocks, 2), sync_every=2)


def test_refuses_offloaded_parameters():
    with pytest.raises(ValueError, match="is offloaded; leave the offload_policy out"):
        Run(hosts=1, each=1, sync_every=1, sharded={"offload_policy": CPUOffloadPolicy(optimizer_state=True)})


def kept_and_planned(fragments, **settings):
    """(bytes of the outer arrays of this rank, those that are planned)."""
    run = Run(sync_every=fragments, fragments=fragments, **settings)
    kept = 0
    for fragment in run.outer.fragments:
        kept += sum(array.nbytes for piece in fragment.pieces for array in piece.outer.values())
        kept += fragment._buffer.nbytes + (0 if fragment._codes is None else fragment._codes.rows.nbytes)
    shard = memory_plan(run.model, optimizer_states=1).device["optimizer state"]
    return kept, outer_bytes(shard, 2, fragments, settings.get("should_quantize", False))


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("should_quantize", [False, True])
def test_memory_is_as_planned(fragments, should_quantize):
    for kept, planned in thread.run(4, kept_and_planned, fragments, should_quantize=should_quantize):
        most = 2 * message_bytes(1, quantize=True) + 4 * 33  # that a fragment's last block adds
        more = (fragments - 1) * most if should_quantize else 0
        assert planned - more <= kept <= planned and (fragments > 1 or kept == planned)
