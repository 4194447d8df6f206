"""Work captured in a CUDA graph, on the GPU emulator: what is replayed, what not."""

import numpy as np
import pytest

from shardrt.device.arena import Arena
from shardrt.kernels.cuda import elementwise, philox

cupy = pytest.importorskip("cupy")


@pytest.fixture
def here(gpu):
    return gpu


def arrays(here, *values):
    """There before anything else is asked for, in whatever stream."""
    made = [here.asarray(np.full(5, value, np.float32)) for value in values]
    here.wait_here()
    return made


def values(here, array):
    return here.to_numpy(array).tolist()


def test_nothing_runs_before_a_replay_and_all_of_it_in_each(here):
    x, y = arrays(here, 3, 0)

    def work():
        here.copy(y, x)
        elementwise.scale_(y, 2.0)
        return y

    graph = here.capture(work)
    assert values(here, y) == [0] * 5
    assert graph.result is y
    for value in (3, 4):
        x.fill(value)
        graph.replay()
        assert values(here, y) == [2 * value] * 5


def test_side_streams_fork_and_join_without_being_asked_to(here):
    side, other = here.new_stream("gather"), here.new_stream("reduce")
    x, y, z = arrays(here, 3, 0, 0)
    ready = here.new_event()

    def work():
        side.submit(here.copy, y, x)  # not ordered after anything of the compute stream
        side.record(ready)
        other.wait(ready)
        other.submit(here.copy, z, y)  # and nobody waits for it

    graph = here.capture(work)
    assert values(here, z) == [0] * 5
    graph.replay()
    assert values(here, z) == [3] * 5
    side.submit(here.copy, x, z)  # the streams are as they were
    assert not side.handle.is_capturing()


def test_events_of_before_and_after_a_graph_can_be_waited_for(here):
    side = here.new_stream("gather")
    x, y = arrays(here, 3, 0)
    arena = Arena(here, lambda: here.zeros((5,), np.float32), 1)

    def step():
        slot = arena.acquire()
        side.wait(slot.free)  # recorded by the step before
        side.submit(here.copy, slot.array, x)
        side.record(slot.ready)
        here.current_stream.wait(slot.ready)
        here.copy(y, slot.array)
        here.current_stream.record(slot.free)
        arena.release(slot)

    step()
    graphs = [here.capture(step), here.capture(step)]
    for value, run in ((5, graphs[0].replay), (6, graphs[1].replay), (7, step), (8, graphs[0].replay)):
        x.fill(value)
        run()
        assert values(here, y) == [value] * 5
    free = arena.slots[0].free
    assert free.done()
    free.synchronize()


def test_an_event_of_a_graph_is_reached_when_its_replay_is(here):
    side, other, point = here.new_stream("gather"), here.new_stream("reduce"), here.new_event()
    x, y, z = arrays(here, 3, 0, 0)

    def work():
        side.submit(here.copy, y, x)
        side.record(point)

    graph = here.capture(work)
    assert point.done()  # of no replay
    graph.replay()
    assert not point.done()
    other.wait(point)
    other.submit(here.copy, z, y)
    other.synchronize()
    assert point.done() and values(here, z) == [3] * 5


def test_memory_of_a_graph_comes_from_a_pool_of_its_own(here):
    allocators = [cupy.cuda.get_allocator()]
    graph = here.capture(lambda: allocators.append(cupy.cuda.get_allocator()))
    assert allocators[1].__self__ is graph._pool
    assert cupy.cuda.get_allocator() == allocators[0] != allocators[1]


def test_a_replay_keeps_alive_what_the_work_reads(here):
    y = arrays(here, 0)[0]

    def capture():
        x = arrays(here, 4)[0]
        return here.capture(lambda: here.copy(y, x))

    capture().replay()
    assert values(here, y) == [4] * 5


def test_numbers_of_the_host_are_asked_for_before_each_replay_in_order(here):
    (y,) = arrays(here, 0)
    asked = []

    def number(value):
        asked.append(value)
        return np.full(5, len(asked), np.float32)

    def work():
        here.copy(y, here.numbers(lambda: number("first")))
        here.capturing.before_replay(lambda: asked.append("between"))
        elementwise.add(y, here.numbers(lambda: number("second")), y)

    graph = here.capture(work)
    assert here.capturing is None
    asked.clear()
    for _ in range(2):
        graph.replay()
    assert asked == ["first", "between", "second"] * 2
    assert values(here, y) == [4 + 6] * 5


def test_what_a_capture_has_counted_is_undone_when_it_ends_also_by_an_error(here):
    undone = []

    def work(fails):
        here.capturing.after_capture(lambda: undone.append(fails))
        if fails:
            here.wait_here()

    here.capture(lambda: work(False)).replay()
    with pytest.raises(RuntimeError, match="can't capture"):
        here.capture(lambda: work(True))
    assert undone == [False, True]


X, EVENT = np.ones(5, np.float32), []
REFUSED = {
    "an array can't be read by the host": lambda here, x: here.to_numpy(x),
    "D2H transfers are disallowed": lambda here, x: float(x[0]),
    "H2D transfers are disallowed": lambda here, x: x[[0, 1]],
    "a stream can't be waited for": lambda here, x: here.wait_here(),
    "the host can't wait for stream 'compute'": lambda here, x: here.current_stream.synchronize(),
    "a buffer can't be made": lambda here, x: here.buffer(3, np.float32),
    "stream 'late' can't be made": lambda here, x: here.new_stream("late"),
    "values of the host can't be copied": lambda here, x: here.asarray(X),
    "another capture is active": lambda here, x: here.capture(lambda: None),
    "the host can't wait for an event": lambda here, x: wait_on_the_host(here),
}


def wait_on_the_host(here):
    event = here.new_event()
    here.current_stream.record(event)
    event.synchronize()


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_host_would_have_to_wait_for_is_refused_and_leaves_streams_as_they_were(here, why):
    side = here.new_stream("gather")
    x, y = arrays(here, 3, 0)
    with pytest.raises(
        RuntimeError, match=f"capture: the function does something that a CUDA graph can't capture: .*{why}"
    ):
        here.capture(lambda: REFUSED[why](here, x))
    side.submit(here.copy, y, x)
    side.synchronize()
    assert values(here, y) == [3] * 5
    here.capture(lambda: here.copy(y, x)).replay()


def test_capture_and_replay_want_the_compute_stream(here):
    side = here.new_stream("gather")
    graph = here.capture(lambda: None)
    for call in (lambda: here.capture(lambda: None), graph.replay):
        with pytest.raises(
            RuntimeError, match="the current stream must be|call it in the thread that captured"
        ):
            side.submit(call)
    with pytest.raises(RuntimeError, match="nothing runs while a CUDA graph is captured"):
        here.capture(graph.replay)


def test_random_numbers_that_would_be_the_same_in_every_replay_are_refused(here):
    (x,) = arrays(here, 1)
    with pytest.raises(RuntimeError, match="would repeat in every replay"):
        here.capture(lambda: philox.uniform(x, 1, 2, 3))
