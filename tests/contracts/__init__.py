"""What kernels give, said once for all backends: calls of them, each with its truth, a formula in float64.

A file here has the contracts of one family of ops. tests/kernels/test_contracts.py holds the CPU's kernels to
them, tests/cuda/test_contracts.py those of CUDA in the emulator, and tests/gpu runs that file on a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tests.cuda.numbers import assert_close, dtype_of, guarded

CONTRACTS: dict[str, Callable[[], Iterator["Call"]]] = {}  # of "module.function"


@dataclass(frozen=True)
class Wide:
    """Numbers in float32 where others have 16 bits."""

    values: np.ndarray


@dataclass(frozen=True)
class Double:
    """Numbers in float64 whatever others have."""

    values: np.ndarray


@dataclass(frozen=True)
class Out:
    """An array that the kernel writes: all of it, or beginning with `values`, which the truth gets too.

    wide: in float32 where others have 16 bits. double: in float64 whatever others have.
    """

    values: np.ndarray | None = None
    wide: bool = False
    double: bool = False


@dataclass(frozen=True)
class Call:
    """Arguments of a kernel, in order, and the truth: it gets all arrays among them, floats as float64.

    A list is one of arrays, which the truth gets one by one.

    Views are laid out as they are, in one array if they are views of one; the rest of that must stay.

    how: arguments by keyword. factor: of the tolerance, or one for each array that is written.
    over: which argument may also be the first that is written. exact: without rounding.
    elements: types that it is for. offsets: how many elements beyond 16 bytes its arrays begin.
    rounds: the truth gets `rounded`, which rounds to the type of the elements.
    gives: whether what the kernel gives back is right: gets that, and the arrays as the truth does.
    """

    args: tuple
    truth: Callable
    how: dict = field(default_factory=dict)
    factor: float | tuple = 1.0
    over: int | None = None
    exact: bool = False
    elements: tuple = ("float32", "float64", "float16", "bfloat16")
    offsets: tuple = (0, 1)
    rounds: bool = False
    gives: Callable | None = None


def contract(*kernels: str):
    """Register a function that yields the calls of these kernels; with several it takes the kernel's name."""

    def register(calls):
        for kernel in kernels:
            CONTRACTS[kernel] = calls if len(kernels) == 1 else lambda kernel=kernel: calls(kernel)
        return calls

    return register


def check(kernels, kernel: str, element: str, calls=None, launch=lambda function: function) -> None:
    """Hold a kernel of a package to its contract, or to other calls. launch: gives what runs it."""
    module, function = kernel.split(".")
    function = launch(getattr(getattr(kernels, module), function))
    for number, call in enumerate(CONTRACTS[kernel]() if calls is None else calls):
        for offset in call.offsets if element in call.elements else ():
            try:
                found = run(function, call, element, offset)
                if call.over is not None:
                    again = run(function, call, element, offset, in_place=True)
                    np.testing.assert_array_equal(again[0], found[0])
            except BaseException as error:
                error.add_note(f"{kernel}, call {number}, {offset} elements beyond 16 bytes")
                raise


@dataclass
class Laid:
    """The arrays of a call as a kernel gets them, of one type and alignment.

    args: all arguments by position. given: the arrays among them. written, expected: what the kernel writes,
    and the truth. gaps: (memory, which of it is between the rows of views).
    """

    args: list
    given: list
    written: list
    expected: tuple
    gaps: list


def lay(call, array, element, offset=0) -> Laid:
    """array: what `guarded` gives, or another that makes arrays of values."""
    wide = dtype_of("float64" if element == "float64" else "float32")
    bases = {}

    def laid(arg):
        values = getattr(arg, "values", arg)
        if isinstance(arg, list):
            return [laid(each) for each in arg]
        if not isinstance(values, np.ndarray):
            return arg
        if isinstance(arg, Wide) or isinstance(arg, Out) and arg.wide:
            return array(values, dtype=wide)
        if isinstance(arg, Double) or getattr(arg, "double", False) or values.dtype == np.int64:
            return array(values, dtype=values.dtype)
        kind = None if values.dtype == np.float64 else values.dtype
        base = values.base
        if base is None or values.flags.c_contiguous:
            return array(values, offset, kind)
        if id(base) not in bases:
            bases[id(base)] = array(base, offset, kind).reshape(-1), np.ones(base.size, bool)
        start = (values.ctypes.data - base.ctypes.data) // base.itemsize
        steps = np.array(values.strides) // base.itemsize
        view, between = (
            as_strided(flat[start:], values.shape, steps * flat.itemsize) for flat in bases[id(base)]
        )
        between[...] = False
        return view

    args = [laid(arg) for arg in call.args]
    given = [
        x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, np.ndarray)
    ]
    more = {"rounded": lambda x: x.astype(dtype_of(element)).astype(np.float64)} if call.rounds else {}
    with np.errstate(all="ignore"):
        expected = call.truth(*map(_in_double, given), **more)
    expected = expected if isinstance(expected, tuple) else (expected,)
    outs = [place for place, arg in enumerate(call.args) if isinstance(arg, Out)]
    for place, values in zip(outs, expected, strict=True):
        if call.args[place].values is None:
            fill = 7 if values.dtype.kind in "iu" else np.nan
            args[place] = laid(replace(call.args[place], values=np.full_like(values, fill)))
    return Laid(args, given, [args[place] for place in outs], expected, list(bases.values()))


def run(function, call, element, offset=0, in_place=False):
    """Run and compare; returns what is written."""
    with np.errstate(invalid="ignore"), guarded(element) as array:
        laid = lay(call, array, element, offset)
        args, written = laid.args, laid.written
        if in_place:
            place = next(place for place, arg in enumerate(args) if arg is written[0])
            args[place] = written[0] = args[call.over]
        before = [(arg, arg.tobytes()) for arg in laid.given if not any(arg is out for out in written)]
        gaps = [(flat, between, flat[between].tobytes()) for flat, between in laid.gaps]
        exact = [_in_double(arg) + 0 for arg in laid.given]
        result = function(*args, **call.how)
        assert call.gives is None or call.gives(result, *exact), f"gives {result}"
        factors = call.factor if isinstance(call.factor, tuple) else [call.factor] * len(written)
        for found, values, factor in zip(written, laid.expected, factors, strict=True):
            if call.exact or found.dtype.kind in "iu":
                np.testing.assert_array_equal(_in_double(found), _in_double(values.astype(found.dtype)))
            else:
                assert_close(found, values, factor)
        for arg, values in before:
            assert arg.tobytes() == values, "an argument that is only read has changed"
        for flat, between, values in gaps:
            assert flat[between].tobytes() == values, "written between the rows of a view"
        return [array.copy() for array in written]


def _in_double(arg):
    return arg.astype(np.float64) if arg.dtype.kind not in "iub" else arg
