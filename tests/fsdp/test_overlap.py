"""Communication runs beside compute, and every wait that makes that safe is needed."""

import time

import numpy as np
import pytest

from shardrt.comm import CollectiveDelay, init_device_mesh
from shardrt.comm.interceptors import Interceptor
from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp import units
from tests import lab
from tests.fsdp.slow import COMPUTE, Hasty, sharded, step

BLOCKS = 6
MESSAGE = 0.02  # seconds that a collective takes longer


def delayed(seconds):
    return lambda inner: CollectiveDelay(inner, seconds)


class Logged(Interceptor):
    """Notes when each gather and reduction of a unit ran, MESSAGE seconds longer, in its stream."""

    def __init__(self, communicator, log):
        super().__init__(communicator)
        self.log = log

    def intercept(self, call, run):
        if call.name not in ("all_gather", "reduce_scatter"):
            return run

        def timed(*args):
            start = time.perf_counter()
            time.sleep(MESSAGE)
            run(*args)
            name = "gather" if call.name == "all_gather" else "reduce"
            self.log.setdefault((name, call.tag), []).append((start, time.perf_counter()))

        return timed


@pytest.mark.serial
@lab.on_ranks(2)
def test_each_kind_of_communication_runs_beside_the_compute_of_a_neighbour():
    log = {}  # (what, unit) -> (start, stop) of each time in one step, on this rank
    model = sharded(BLOCKS, init_device_mesh("auto", wrap=lambda inner: Logged(inner, log)))
    for block in model.blocks:
        block.log = log
    for _ in range(2):
        log.clear()
        step(model)

    def beside(communication, k, time_of, compute, other):
        """Seconds that one of the communications of a unit and a compute have in common."""
        start, stop = log[communication, f"blocks.{k}"][time_of]
        ((first, last),) = log[compute, f"blocks.{other}"]
        return min(stop, last) - max(start, first)

    for k in range(1, BLOCKS):
        assert beside("gather", k, 0, "forward", k - 1) > COMPUTE / 2, f"forward gather of {k}"
        assert beside("gather", k - 1, 1, "backward", k) > COMPUTE / 2, f"backward gather of {k - 1}"
        assert beside("reduce", k, 0, "backward", k - 1) > COMPUTE / 2, f"reduction of {k}"


@lab.on_ranks(2)
@pytest.mark.parametrize("forget_to_wait", [False, True])
def test_a_missing_wait_is_found_where_gathers_are_late_and_slots_poisoned(forget_to_wait):
    model, _ = lab.build(wrap=delayed(0.005))
    for arena in lab.arenas_of(model, "gathered"):
        arena.poison = True
    if forget_to_wait:
        streams = units(model)[0].schedule.streams
        streams.compute = Hasty(streams.compute)
    losses = [float(lab.loss_of(model, *batch).item()) for batch in lab.batches(3, size=4)]
    assert np.isfinite(losses).all() != forget_to_wait


@pytest.mark.parametrize("late", ["gather", "reduce"])
def test_slow_communication_gives_the_same_weights(late, monkeypatch):
    expected = lab.train_on(3)
    original = DeviceMesh.communicator

    def slowed(self, role, dim=None):
        made = original(self, role, dim)
        if role == late and not made.interceptors:
            CollectiveDelay(made, 0.004)
        return made

    monkeypatch.setattr(DeviceMesh, "communicator", slowed)
    lab.assert_equal(lab.train_on(3, steps=3), expected)
