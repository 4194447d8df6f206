"""Arrays without elements have NumPy's shapes, types, strides and views, and what computes is recorded.

No element is ever touched: at the addresses of these arrays there is nothing, a touch would end the process.
"""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from shardrt.device.addresses import ROWS, ranges_of
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Free, HostRead, HostWait, Range, Take, Work
from shardrt.device.simulated import SimulatedDevice

# What both kinds of array can do, as a function of (x (4, 6) float32, y (6,) float32, i (3,) int64).
SAME = {
    "add": lambda x, y, i: x + y,
    "number": lambda x, y, i: 2 * x - 1,
    "in place": lambda x, y, i: np.multiply(x, y, out=x),
    "divide": lambda x, y, i: i / 2,
    "compare": lambda x, y, i: (x > y) & (x != 0),
    "sum": lambda x, y, i: x.sum(),
    "sum of integers": lambda x, y, i: (i != 2).sum(),
    "sum over axes": lambda x, y, i: x.sum(axis=(0,), keepdims=True, dtype=np.float64),
    "max": lambda x, y, i: x.max(axis=1),
    "mean": lambda x, y, i: x.mean(axis=1),
    "any": lambda x, y, i: (x > 0).any(axis=0),
    "where": lambda x, y, i: np.where(x > 0, x, 0),
    "astype": lambda x, y, i: x.astype(np.float64),
    "same type": lambda x, y, i: x.astype(np.float32, copy=False),
    "columns": lambda x, y, i: x[:, 1:4],
    "new axis": lambda x, y, i: y[None, :, None],
    "row": lambda x, y, i: x[1],
    "backwards": lambda x, y, i: x[::-1, ::2],
    "fancy": lambda x, y, i: x[i],
    "fancy columns": lambda x, y, i: x[:, i],
    "fancy pairs": lambda x, y, i: x[i, i],
    "fancy apart": lambda x, y, i: x[None][:, i, None, 0],
    "list": lambda x, y, i: x[[0, 2]],
    "transposed": lambda x, y, i: x.T,
    "reshaped view": lambda x, y, i: x.reshape(2, -1),
    "reshaped copy": lambda x, y, i: x.T.reshape(-1),
    "flat": lambda x, y, i: x.ravel(),
    "bytes": lambda x, y, i: x.view(np.uint8),
    "broadcast": lambda x, y, i: np.broadcast_to(y, (2, 6)),
    "moved": lambda x, y, i: np.moveaxis(x, 0, 1),
    "flip": lambda x, y, i: np.flip(x, 1),
    "cumsum": lambda x, y, i: np.cumsum(x, 1),
    "argmax": lambda x, y, i: np.argmax(x, 1),
    "argsort": lambda x, y, i: np.argsort(-x, -1, kind="stable"),
    "concatenate": lambda x, y, i: np.concatenate([x, x[:1]]),
    "stack": lambda x, y, i: np.stack([y, y], 1),
    "ones_like": lambda x, y, i: np.ones_like(x[:, 0]),
    "isfinite": lambda x, y, i: np.isfinite(x),
    "clip": lambda x, y, i: np.clip(x, -1, 1),
    "power": lambda x, y, i: np.power(x, 2.0),
    "mixed": lambda x, y, i: x * i[0],
    "without elements": lambda x, y, i: x[:0].sum(axis=0),
}


@pytest.fixture(scope="module")
def here():
    return SimulatedDevice()


def both(here):
    plain = np.zeros((4, 6), np.float32), np.ones(6, np.float32), np.arange(3)
    return plain, tuple(here.empty(x.shape, x.dtype) for x in plain)


def strides_that_matter(x):
    return [stride for stride, n in zip(x.strides, x.shape, strict=True) if n > 1]


@pytest.mark.parametrize("name", SAME)
def test_shape_type_and_strides_are_those_of_numpy(here, name):
    plain, shaped = both(here)
    wanted, got = np.asarray(SAME[name](*plain)), SAME[name](*shaped)
    assert type(got) is type(shaped[0])
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if any(np.shares_memory(wanted, x) for x in plain):
        assert any(np.shares_memory(got, x) for x in shaped)
        assert strides_that_matter(got) == strides_that_matter(wanted)


WRONG = {
    "shapes": (ValueError, lambda x, y, i: x + i),
    "out": (ValueError, lambda x, y, i: np.add(x, x, out=y)),
    "out of another type": (TypeError, lambda x, y, i: np.multiply(i, 0.5, out=i)),
    "assigned shape": (ValueError, lambda x, y, i: x.__setitem__(0, i)),
    "read-only": (ValueError, lambda x, y, i: np.broadcast_to(y, (2, 6)).__setitem__(0, 1)),
    "reshape": (ValueError, lambda x, y, i: x.reshape(5, 5)),
    "several": (ValueError, lambda x, y, i: x.item()),
    "index": (IndexError, lambda x, y, i: x[7]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_numpy_refuses_is_refused(here, name):
    error, function = WRONG[name]
    for arrays in both(here):
        with pytest.raises(error):
            function(*arrays)


UNKNOWN = {
    "numpy.linalg.norm": np.linalg.norm,
    "numpy.unique": np.unique,
    "numpy.matmul": lambda x: x @ x.T,
    "numpy.add.outer": lambda x: np.add.outer(x, x),
    "numpy.ndarray.sort": lambda x: x.sort(),
    "an index of booleans": lambda x: x[x > 0],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_an_error_that_names_it(here, name):
    (x, *_), expected = both(here)[1], name
    with pytest.raises(TypeError, match=expected):
        UNKNOWN[name](x)


def test_arrays_of_the_host_and_of_the_device_mix_in_copies_alone(here):
    x, pinned = here.empty(6, np.float32), here.pinned(6, np.float32)
    here.copy(pinned, x)
    with pytest.raises(TypeError, match="another device"):
        x + pinned
    with pytest.raises(TypeError, match="must be an array of the simulated device"):
        np.add(x, x, out=np.zeros(6, np.float32))


def items_of(here, function):
    start = len(here.program.items)
    result = function()
    return result, here.program.items[start:]


def test_a_function_is_recorded_with_the_bytes_that_it_reads_and_writes(here):
    x, y = here.empty((4, 6), np.float32), here.empty(6, np.float32)
    z, items = items_of(here, lambda: np.multiply(x[:2], y, out=x[2:]))
    (work,) = items
    at = x.__array_interface__["data"][0]
    assert (work.name, work.flops, work.nbytes) == ("numpy.multiply", 12, 48 + 24 + 48)
    assert work.writes == (Range(at + 48, at + 96),)
    assert set(work.reads) == {Range(at, at + 48), *ranges_of(y)}
    assert work.site.startswith("tests/device/test_shapes.py:") or work.site.startswith("device/test_shapes")


@pytest.mark.parametrize("like", [CPUDevice, CUDADevice])
def test_memory_goes_back_with_the_last_view_and_a_pool_lends_it_again(like):
    here = SimulatedDevice(like)
    x = here.empty(1000, np.float32)
    view, at = x[10:], x.__array_interface__["data"][0]
    del x
    assert not [item for item in here.program.items[-1:] if isinstance(item, Free)]
    del view
    assert here.program.items[-1].start == at and isinstance(here.program.items[-1], Free)
    y, items = items_of(here, lambda: here.empty(1000, np.float32))
    assert isinstance(items[0], Take) and items[0].memory == ranges_of(y)[0]
    assert (items[0].memory == Range(at, at + 4000)) == (like is CUDADevice)


def test_columns_are_ranges_of_their_own_and_together_the_matrix(here):
    x = here.empty((8, 6), np.float32)
    left, right = ranges_of(x[:, :2]), ranges_of(x[:, 2:])
    assert len(left) == len(right) == 8
    assert not any(a.start < b.stop and b.start < a.stop for a in left for b in right)
    heads = here.empty((2, 5, 3, 4), np.float32)[:, :, 1]  # what one part of three has, of each row
    assert [(r.stop - r.start) for r in ranges_of(heads)] == [16] * 10
    assert ranges_of(x.T) == ranges_of(x) == ranges_of(x[::-1]) and len(ranges_of(x)) == 1


@pytest.mark.parametrize("rows", [ROWS, 8 * ROWS])
def test_ranges_hold_every_element_and_are_not_too_many(here, rows):
    x = here.empty((8, rows // 8, 6), np.uint8)[:, :, 1:3]
    found = ranges_of(x)
    assert len(found) == min(rows, ROWS) if rows == ROWS else len(found) == 8
    at = x.__array_interface__["data"][0]
    places = at + np.add.outer(np.add.outer(np.arange(8) * rows // 8 * 6, np.arange(rows // 8) * 6), [0, 1])
    inside = np.zeros(places.shape, bool)
    for r in found:
        inside |= (places >= r.start) & (places < r.stop)
    assert inside.all()


def test_what_the_host_reads_is_waited_for_and_has_a_value_that_is_made_up():
    here = SimulatedDevice(values=lambda site, dtype, what, usual: (3, "loss"))
    x = here.zeros(4, np.float32)
    start = len(here.program.items)
    assert (float(x[1]), x.tolist(), int(x.sum()), bool((x > 0).all())) == (3.0, [3.0] * 4, 3, True)
    kinds = [type(item) for item in here.program.items[start:]]
    assert kinds.count(HostWait) == kinds.count(HostRead) == 4
    read = next(item for item in here.program.items if isinstance(item, HostRead))
    assert read.why == "loss" and read.reads == ranges_of(x[1]) and ":" in read.site


def test_16_bits_have_their_type(here):
    x = here.empty((3, 4), ml_dtypes.bfloat16)
    assert (
        (x * 2).dtype == x.dtype and (x > 0).dtype == np.bool_ and x.sum(dtype=np.float32).dtype == np.float32
    )


TOUCH = """
import faulthandler, numpy as np
from shardrt.device.simulated import SimulatedDevice
faulthandler.enable()
x = SimulatedDevice().empty(10, np.float32)
memoryview(x)[3]
"""


def test_a_touched_element_ends_the_process_and_faulthandler_says_where():
    ended = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True, timeout=60)
    assert ended.returncode < 0
    assert "Segmentation fault" in ended.stderr and 'File "<string>", line 6' in ended.stderr


def test_terabytes_of_addresses_take_no_memory(here):
    arrays = [here.buffer(1 << 38, np.float32) for _ in range(4)]  # 1 TiB each
    assert arrays[3][1 << 37 :].nbytes == 1 << 39
    assert isinstance(items_of(here, lambda: arrays[0].__iadd__(arrays[1]))[1][-1], Work)


LIMITED = """
import resource, numpy as np
from shardrt.device.addresses import Addresses
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
addresses = Addresses()
addresses.take(1 << 30)
try:
    addresses.take(1 << 40)
except MemoryError as error:
    print(error)
"""


def test_few_addresses_are_enough_for_small_models_and_too_few_an_error():
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert "no addresses for 1099511627776 bytes more" in ended.stdout, ended.stderr
