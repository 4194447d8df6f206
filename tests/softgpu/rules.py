"""What CuPy does and what it refuses, asked of the real one and of tests/cuda/fake_cupy.py alike."""

import threading

import numpy as np

HOST = np.ones((4, 6), np.float32)

# What is done with x (4, 6) and y (1,) of float32, rows (2,) of int64, all on the device.
CALLS = {
    "an array of a list": lambda cupy, x, y, rows: cupy.asarray([0, 1]),
    "an array of the host's": lambda cupy, x, y, rows: cupy.asarray(HOST),
    "an array of a number": lambda cupy, x, y, rows: cupy.asarray(1.0),
    "zeros": lambda cupy, x, y, rows: cupy.zeros((3,), np.float32),
    "fill": lambda cupy, x, y, rows: x.fill(1),
    "astype": lambda cupy, x, y, rows: x.astype(np.float64),
    "sum": lambda cupy, x, y, rows: x.sum(),
    "get": lambda cupy, x, y, rows: x.get(),
    "get of a transposed one": lambda cupy, x, y, rows: x.T.get(),
    "item": lambda cupy, x, y, rows: x[0, 0].item(),
    "tolist": lambda cupy, x, y, rows: x.tolist(),
    "float": lambda cupy, x, y, rows: float(x[0, 0]),
    "bool": lambda cupy, x, y, rows: bool(x.sum() > 0),
    "np.asarray": lambda cupy, x, y, rows: np.asarray(x),
    "plus a number": lambda cupy, x, y, rows: x + 1.0,
    "plus NumPy's number": lambda cupy, x, y, rows: x + np.float32(1),
    "plus the host's": lambda cupy, x, y, rows: x + HOST,
    "plus the host's, without axes": lambda cupy, x, y, rows: x + np.array(1.0),
    "a row": lambda cupy, x, y, rows: x[1],
    "rows of a list": lambda cupy, x, y, rows: x[[0, 1]],
    "rows of a list in a tuple": lambda cupy, x, y, rows: x[[0, 1], 2],
    "rows of the host's": lambda cupy, x, y, rows: x[np.array([0, 1])],
    "rows of the device's": lambda cupy, x, y, rows: x[rows],
    "a number written": lambda cupy, x, y, rows: x.__setitem__(1, 2.0),
    "the device's written": lambda cupy, x, y, rows: x.__setitem__(slice(1, None), x[1:]),
    "a number written by a list": lambda cupy, x, y, rows: x.__setitem__([0], 2.0),
    "added at the device's": lambda cupy, x, y, rows: np.add.at(x, rows, 1.0),
    "added at the host's": lambda cupy, x, y, rows: np.add.at(x, np.array([0]), 1.0),
    "added at a list": lambda cupy, x, y, rows: np.add.at(x, [0], 1.0),
    "added at the device's in a tuple": lambda cupy, x, y, rows: np.add.at(x, (rows, rows), 1.0),
    "added at the device's behind a slice": lambda cupy, x, y, rows: np.add.at(x, (slice(None), rows), 1.0),
    "added by CuPy behind a slice": lambda cupy, x, y, rows: cupy.add.at(x, (slice(None), rows), 1.0),
    "added by CuPy at the host's": lambda cupy, x, y, rows: cupy.add.at(x, (np.array([0]),), 1.0),
    "added by CuPy at a list": lambda cupy, x, y, rows: cupy.add.at(x, [0], 1.0),
    "8 joined": lambda cupy, x, y, rows: np.concatenate([y] * 8),
    "9 joined": lambda cupy, x, y, rows: np.concatenate([y] * 9),
    "9 joined along the last axis": lambda cupy, x, y, rows: np.concatenate([x] * 9, axis=1),
    "9 stacked": lambda cupy, x, y, rows: np.stack([y] * 9),
}
# What is done with two streams in a new thread.
STREAMS = {
    "nothing": lambda s, t: None,
    "use": lambda s, t: s.use(),
    "use, with": lambda s, t: (s.use(), t.__enter__(), t.__exit__()),
    "with": lambda s, t: (s.__enter__(), s.__exit__()),
    "with, with": lambda s, t: (s.__enter__(), t.__enter__(), t.__exit__()),
    "with, use": lambda s, t: (s.__enter__(), t.use()),
    "with, use, with": lambda s, t: (s.__enter__(), t.use(), t.__enter__(), t.__exit__()),
    "with, use, end": lambda s, t: (s.__enter__(), t.use(), s.__exit__()),
}


def outcomes(cupy):
    """Name of a call -> what comes of it: as usual, in a capture."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x, y = cupy.zeros((4, 6), np.float32), cupy.zeros((1,), np.float32)
        arrays = x, y, cupy.zeros((2,), np.int64)
        usual = {name: _outcome(call, cupy, *arrays) for name, call in CALLS.items()}
        captured = {}
        for name, call in CALLS.items():
            stream.begin_capture()
            captured[name] = _outcome(call, cupy, *arrays)
            stream.end_capture()
    return {name: [usual[name], captured[name]] for name in CALLS}


def _outcome(call, *args):
    try:
        call(*args)
    except TypeError:
        return "TypeError"
    except RuntimeError as error:
        return str(error)
    return "done"


def current_streams(cupy):
    """Name of what is done with streams -> which one is current then: "s", "t" or "null"."""
    found = {}

    def run(name):
        s, t = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        STREAMS[name](s, t)
        found[name] = {s.ptr: "s", t.ptr: "t", 0: "null"}[cupy.cuda.get_current_stream().ptr]

    for name in STREAMS:
        thread = threading.Thread(target=run, args=(name,))
        thread.start()
        thread.join()
    return found
