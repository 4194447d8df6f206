"""Memory that moves between those who need it: no array that is in use changes, and nothing else is held."""

import gc

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.device import cpu, memory, pages
from shardrt.device.memory import Pool
from shardrt.fsdp import fully_shard, units

BYTES = np.dtype(np.uint8)
HUGE = pages.HUGE


def lent_in(array):
    return [place for place in pages._whole(array.ctypes.data, array.nbytes) if place in pages._lent]


@pytest.fixture(scope="module", autouse=True)
def without_garbage():
    """Of other files' tests, which would be lent when it is collected."""
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_else_is_lent():
    """What other tests have left is theirs."""
    others = pages._lent.copy()
    pages._lent.clear()
    yield
    pages._lent.update(others)


def test_a_buffer_is_zeros_at_whole_pages():
    buffer = cpu.CPUDevice().buffer(HUGE + 5, np.uint8)
    assert buffer.ctypes.data % HUGE == 0 and buffer.shape == (HUGE + 5,) and not buffer.any()


def test_who_takes_has_the_memory_that_was_lent():
    pool, device = Pool(), cpu.CPUDevice()
    gradient = device.buffer(3 * HUGE, np.uint8)
    activation = pool.empty(3 * HUGE, BYTES)
    activation[:] = 7
    del activation
    device.take_pages(gradient)
    assert (gradient == 7).all(), "nothing was moved"
    gradient[:] = 8
    device.lend_pages(gradient)
    activation = pool.empty(3 * HUGE, BYTES)
    assert (activation == 8).all() and not lent_in(gradient)
    activation[:] = 9
    device.take_pages(gradient)
    assert not gradient.any(), "nobody lends anything: these are new pages"


def test_a_part_gets_no_more_than_lies_inside():
    device = cpu.CPUDevice()
    gradient, other = device.buffer(3 * HUGE, np.uint8), device.buffer(4 * HUGE, np.uint8)
    gradient[:], other[:] = 1, 2
    device.lend_pages(other)
    device.take_pages(gradient[5 : 2 * HUGE + 5])
    assert (
        (gradient[:HUGE] == 1).all()
        and (gradient[HUGE : 2 * HUGE] == 2).all()
        and (gradient[2 * HUGE :] == 1).all()
    )


def test_what_is_written_in_parts_is_lent_in_none():
    pool, device = Pool(), cpu.CPUDevice()
    gradient = device.buffer(4 * HUGE, np.uint8)
    device.lend_pages(gradient)
    for start, stop in ((0, HUGE + 5), (HUGE + 5, 3 * HUGE + 7), (3 * HUGE + 7, 4 * HUGE)):
        device.take_pages(gradient[start:stop])
        gradient[start:stop] = 6
        pool.empty(5 * HUGE, BYTES)[:] = 1
    assert not lent_in(gradient) and (gradient == 6).all()


def test_short_arrays_lend_together_what_they_fill():
    pool, device = Pool(), cpu.CPUDevice()
    gradient = device.buffer(3 * HUGE, np.uint8)
    arrays = [pool.empty(3 * HUGE // 4, BYTES) for _ in range(4)]
    for number, array in enumerate(arrays, 1):
        array[:] = number
    del arrays[1], array
    assert not pages._lent, "each page has a neighbour that is needed"
    del arrays[0]
    assert len(pages._lent) == 1
    device.take_pages(gradient)
    assert set(np.unique(gradient)) == {0, 1, 2} and [array[0] for array in arrays] == [3, 4]
    assert [array.mean() for array in arrays] == [3, 4]


def test_short_memory_goes_back_to_the_system():
    pool = Pool()
    array = pool.empty(HUGE, BYTES)
    array[:] = 5
    segment, address = pool._segment, array.ctypes.data
    del array
    pool._unmap()
    place = address - segment.mapping.start
    assert segment.mapping.region[place : place + HUGE].count(0) == HUGE


def test_what_is_freed_is_not_given_to_anybody():
    device = cpu.CPUDevice()
    gradient = device.buffer(2 * HUGE, np.uint8)
    device.lend_pages(gradient)
    gradient[:] = 3
    place = gradient.ctypes.data
    other = device.buffer(2 * HUGE, np.uint8)
    del gradient
    device.take_pages(other)
    assert not other.any() and place != other.ctypes.data


def test_no_array_in_use_changes():
    random, pool, device = np.random.default_rng(0), Pool(), cpu.CPUDevice()
    buffers = [device.buffer(int(random.integers(HUGE, 4 * HUGE)), np.uint8) for _ in range(4)]
    values, held = [None] * len(buffers), []
    for step in range(300):
        which, kind = int(random.integers(len(buffers))), random.integers(4)
        if kind == 0:
            device.lend_pages(buffers[which])
            values[which] = None
        elif kind == 1 and values[which] is None:
            device.take_pages(buffers[which])
            buffers[which][:] = values[which] = step % 251
        elif kind == 2 and len(held) < 6:
            array = pool.empty(int(random.integers(HUGE // 8, 5 * HUGE)), BYTES)
            array[:] = step % 251
            held.append((array, step % 251))
        elif held:
            held.pop(int(random.integers(len(held))))
        for array, value in (*zip(buffers, values, strict=True), *held):
            assert value is None or (array[::1021] == value).all()


def trained():
    """This rank's parameters after some steps: of units of 4 MiB, half of which each of two ranks has."""
    shardrt.manual_seed(0)
    mesh = init_device_mesh("auto")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    x = np.random.default_rng(mesh.rank).standard_normal((600, 1024)).astype(np.float32)
    for _ in range(3):
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.shard.copy() for parameter in model.parameters()]


def test_what_is_reduced_in_pieces_is_taken_as_a_whole(monkeypatch):
    """A page that two pieces have parts of is in neither: the system gave a new one in each step."""
    taken, real = [], cpu.CPUDevice.take_pages

    def counted(device, array):
        taken.append(array.nbytes)
        real(device, array)

    monkeypatch.setattr(cpu.CPUDevice, "take_pages", counted)
    monkeypatch.setattr("shardrt.fsdp.options.chunks.IN_CHUNKS", 0)
    monkeypatch.setattr("shardrt.fsdp.options.chunks.SHORTEST", 0)
    thread.run(2, trained_with_a_long_root)
    inner, root = 1024 * 256 * 2, 512 * 1024 * 2  # bytes of a rank's half
    assert sorted(taken) == 2 * 2 * [inner] + 2 * 2 * [root]  # ranks, steps


def trained_with_a_long_root():
    """Two steps of a unit in a unit of twice its size, whose gradients are made in pieces."""
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Sequential(nn.Linear(1024, 256, bias=False)))
    mesh = init_device_mesh("auto")
    for module in (model[1], model):
        fully_shard(module, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        (model(np.ones((32, 512), np.float32)) ** 2).mean().backward()
        assert units(model)[0].groups[0].gradient_path is not None
        optimizer.step()
        optimizer.zero_grad()


def test_training_has_the_same_bits_where_gradients_lend_their_memory(monkeypatch):
    moved, real = [], pages._remap
    monkeypatch.setattr(pages, "_remap", lambda *places: moved.append(places) or real(*places))
    lent = thread.run(2, trained)
    assert moved
    monkeypatch.setattr(memory, "LENDS", False)
    for own, other in zip(lent, thread.run(2, trained), strict=True):
        for one, same in zip(own, other, strict=True):
            np.testing.assert_array_equal(one, same)
