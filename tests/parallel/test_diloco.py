"""DiLoCo is the paper's outer SGD on what hosts learn apart, to the bit, however a host shards the model."""

import numpy as np
import pytest

from shardrt import optim
from shardrt.checkpoint import CheckpointManager, full_state_dict
from shardrt.checkpoint.pieces import pieces_of
from shardrt.comm import init_device_mesh, thread
from shardrt.parallel.diloco import DiLoCo, strided_fragments
from shardrt.parallel.outer_deltas import BLOCK, encoded_bytes
from tests import lab
from tests.lab import Block

BATCHES = lab.batches(16, size=8)


class Run:
    """One rank's model on `hosts` x `each` ranks, and its outer optimizer."""

    def __init__(self, hosts=2, each=2, fragments=1, wrap=None, **settings):
        self.mesh = init_device_mesh("cpu", (hosts, each), mesh_dim_names=("diloco", "dp_shard"), wrap=wrap)
        self.host = self.mesh.rank_of("diloco")
        self.model = lab.shard(lab.seeded(), self.mesh["dp_shard"])
        self.blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        self.inner = optim.AdamW(self.model.parameters(), lr=1e-2)
        parts = strided_fragments(self.blocks, fragments) if fragments > 1 else None
        self.outer = DiLoCo(self.inner, self.mesh["diloco"], parts, **settings)

    def inner_step(self, step):
        """On this rank's rows of the batch: other rows on each rank of all hosts."""
        lab.backward(self.model, self.mesh, BATCHES[step])
        lab.update(self.inner)

    def train(self, first, last):
        for step in range(first, last):
            self.inner_step(step)
            self.outer.step(step + 1)

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
    "delay": {"sync_every": 4, "fragments": 2, "delay": 1},
    "alpha": {"sync_every": 4, "fragments": 2, "delay": 1, "fragment_update_alpha": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_outer_steps_are_those_of_a_reference_in_numpy(case):
    settings, steps = CASES[case], 8
    results = thread.run(4, watched, steps, **settings)
    parts, hosts = results[0][1], [results[0][2], results[2][2]]
    interval = settings["sync_every"] // settings.get("fragments", 1)
    delay, alpha = settings.get("delay", 0), settings.get("fragment_update_alpha", 0)
    how = [settings.get("lr", 0.7), settings.get("momentum", 0.9), settings.get("nesterov", True)]
    outer = {name: values.copy() for name, values in hosts[0][0].items()}
    velocity = {name: np.zeros_like(values) for name, values in outer.items()}
    gradient = {}
    taken = set()
    for done in range(1, steps + 1):
        before, after = zip(*(host[done] for host in hosts), strict=True)
        expected = [{name: values.copy() for name, values in each.items()} for each in before]
        if (done + delay) % interval == 0:
            for name in parts[((done + delay) // interval - 1) % len(parts)]:
                gradient[name] = ((outer[name] - before[0][name]) + (outer[name] - before[1][name])) / 2
        if done % interval == 0:
            for name in parts[(done // interval - 1) % len(parts)]:
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


SAVED = {
    "whole": {"sync_every": 4},
    "exchange under way": {
        "sync_every": 6,
        "fragments": 2,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.5,
    },
}


def interrupted(root, last, *, each=2, resumes=False, save=None, **settings):
    """The weights, moments and outer state of this rank after step `last`, in pieces."""
    run = Run(each=each, **settings)
    checkpoints, first = run.checkpoints(root), 0
    if resumes:
        first, _ = checkpoints.restore()
        run.outer.resume(first)
    run.train(first, save or last)
    if save:
        checkpoints.save(save)
        run.train(save, last)
    found = {}
    for piece in pieces_of(run.model, run.outer, saving=False):
        found.setdefault((piece.kind, piece.parameter), []).append((piece.extents, np.array(piece.array)))
    return run.host, first, found, run.weights()


@pytest.mark.parametrize("case", SAVED)
@pytest.mark.parametrize("step", [4, 5])
def test_a_killed_run_goes_on_to_the_bit(tmp_path, case, step):
    whole = thread.run(4, interrupted, tmp_path, 10, save=step, **SAVED[case])
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


@pytest.mark.parametrize("each", [1, 3])
def test_outer_state_is_restored_on_other_meshes(tmp_path, each):
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
    received = run.mesh["diloco"].communicator("outer").bytes
    return sum(received.values()), sum(piece.storage.shard.size for piece in run.inner.slices)


@pytest.mark.parametrize("every", [2, 4, 12])
def test_hosts_exchange_one_in_sync_every_of_the_bytes(every):
    for received, size in thread.run(4, bytes_between_hosts, sync_every=every):
        assert received == 12 // every * 4 * (size + 1)  # an all-reduce between 2: 2 * 1/2 of the buffer


def test_codes_take_an_eighth():
    for received, size in thread.run(4, bytes_between_hosts, sync_every=4, should_quantize=True):
        assert received == 3 * encoded_bytes(size)
    assert encoded_bytes(BLOCK * 1000) == BLOCK * 1000 / 2 * (1 + 8 / BLOCK) + 4
