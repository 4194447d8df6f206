"""Communication runs beside compute, and every wait that makes that safe is needed."""

import time

import numpy as np
import pytest

import shardrt
from shardrt import nn
from shardrt.comm import DelayedCommunicator, init_device_mesh, thread
from shardrt.comm.interceptors import Interceptor
from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp import fully_shard, units
from tests.fsdp.nets import Block, Net, batches, loss_of, shard, train_on
from tests.fsdp.slow import COMPUTE, SlowNet

BLOCKS = 6
MESSAGE = 0.02  # seconds that a collective takes longer


def step_seconds(prefetch, serial):
    """Time of a step whose gathers and reductions each take MESSAGE seconds; the least of several."""
    shardrt.manual_seed(3)
    model = SlowNet(BLOCKS)
    mesh = init_device_mesh("auto", wrap=lambda communicator: DelayedCommunicator(communicator, MESSAGE))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, prefetch=prefetch)
    x = shardrt.Tensor(np.ones((4, 7), np.float32))
    schedule = units(model)[0].schedule
    if serial:  # one stream for everything: what the step costs without overlap
        schedule.streams.gather = schedule.streams.reduce = schedule.streams.upload = schedule.streams.compute
    times = []
    for _ in range(4):
        start = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.fixture(scope="module")
def overlapped():
    """Seconds of a step as it is by default."""
    return max(thread.run(2, step_seconds, 1, False))


@pytest.mark.serial
def test_a_step_with_overlap_takes_less_than_seven_tenths_of_the_serial_step(overlapped):
    serial = max(thread.run(2, step_seconds, 1, True))
    assert serial > BLOCKS * (2 * COMPUTE + 3 * MESSAGE)
    assert overlapped < 0.7 * serial, f"{overlapped:.3f} s against {serial:.3f} s"


@pytest.mark.serial
def test_without_prefetch_the_gathers_are_exposed(overlapped):
    behind = max(thread.run(2, step_seconds, 0, False))
    assert behind > overlapped + BLOCKS * MESSAGE


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
            self.log.setdefault((name, call.what), []).append((start, time.perf_counter()))

        return timed


class Timed(shardrt.autograd.Function):
    """The identity, COMPUTE seconds long in either direction, which it notes."""

    def forward(self, x, name, log):
        self.saved = (name, log)
        self._work("forward", name, log)
        return x

    def backward(self, dy):
        self._work("backward", *self.saved)
        return dy, None, None

    def _work(self, phase, name, log):
        start = time.perf_counter()
        time.sleep(COMPUTE)
        log.setdefault((phase, name), []).append((start, time.perf_counter()))


def logged_step():
    """(what, unit) -> (start, stop) of each time in one step, on this rank."""
    shardrt.manual_seed(3)
    log = {}

    class TimedBlock(Block):
        def forward(self, x):
            return Timed.apply(super().forward(x), self.name, log)

    model = SlowNet(BLOCKS)
    model.blocks = nn.ModuleList(TimedBlock() for _ in range(BLOCKS))
    mesh = init_device_mesh("auto", wrap=lambda communicator: Logged(communicator, log))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = shardrt.Tensor(np.ones((4, 7), np.float32))
    for _ in range(2):
        log.clear()
        model(x).sum().backward()
    return log


@pytest.mark.serial
def test_each_kind_of_communication_runs_beside_the_compute_of_a_neighbour():
    for log in thread.run(2, logged_step):

        def beside(communication, time_of, compute, other, log=log):
            """Seconds that one of the communications of a unit and a compute have in common."""
            start, stop = log[communication][time_of]
            ((first, last),) = log[compute, f"blocks.{other}"]
            return min(stop, last) - max(start, first)

        for k in range(1, BLOCKS):
            gathered = ("gather", f"blocks.{k}")
            assert beside(gathered, 0, "forward", k - 1) > COMPUTE / 2, f"forward gather of {k}"
        for k in range(BLOCKS - 1):
            gathered = ("gather", f"blocks.{k}")
            assert beside(gathered, 1, "backward", k + 1) > COMPUTE / 2, f"backward gather of {k}"
        for k in range(1, BLOCKS):
            assert beside(("reduce", f"blocks.{k}"), 0, "backward", k - 1) > COMPUTE / 2, f"reduction of {k}"


def losses_with_late_gathers(forget_to_wait):
    """Losses of three steps where gathers come late and released slots are poisoned."""
    shardrt.manual_seed(3)
    model = Net()
    mesh = init_device_mesh("auto", wrap=lambda communicator: DelayedCommunicator(communicator, 0.005))
    shard(model, mesh)
    for unit in units(model):
        unit.groups[0].arenas["gathered"].poison = True
    if forget_to_wait:
        streams = units(model)[0].schedule.streams
        streams.compute = _Hasty(streams.compute)
    return [float(loss_of(model, tokens, targets).item()) for tokens, targets in batches(3, size=4)]


class _Hasty:
    """A compute stream that waits for nothing."""

    def __init__(self, stream):
        self._stream = stream
        self.name = stream.name

    def wait(self, event):
        pass

    def record(self, event):
        self._stream.record(event)

    def submit(self, function, *args, label=""):
        self._stream.submit(function, *args, label=label)


def test_late_gathers_and_poisoned_slots_change_nothing():
    losses = thread.run(2, losses_with_late_gathers, False)[0]
    assert np.isfinite(losses).all()


def test_a_missing_wait_is_found():
    losses = thread.run(2, losses_with_late_gathers, True)[0]
    assert not np.isfinite(losses).all()


@pytest.mark.parametrize("late", ["gather", "reduce"])
def test_slow_communication_gives_the_same_weights(late, monkeypatch):
    expected = train_on(3, Net)[1]
    original = DeviceMesh.communicator

    def slowed(self, role, dim=None):
        made = original(self, role, dim)
        if role == late and not made.interceptors:
            DelayedCommunicator(made, 0.004)
        return made

    monkeypatch.setattr(DeviceMesh, "communicator", slowed)
    found = train_on(3, Net)[1]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
