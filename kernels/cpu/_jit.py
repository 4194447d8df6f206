"""How kernels are compiled: by decorators here; and exp, erf and a maximum that vectorise.

All release the interpreter lock and are cached on disk; what is found there needs no compiler. The wheel of
llvmlite has no vector math library, so exp and erf of float32 are polynomials here (relative error of exp
2e-7, of erf 5e-7); float64, which gradient checks use, takes the ones of libm.
"""

import math
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.extending import intrinsic, overload


class _Kept(FunctionCache):
    """Kernels on disk. Numba's own loads the whole compiler before it looks: 0.3 s of every process.

    (`target_context.refresh`; whoever compiles does that again.) Dispatchers hold Numba's lock meanwhile. And
    it looks at a kernel's own file alone, so one would keep what it has of another that has changed since.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # functions that compiled code may call
        return self._load_overload(sig, target_context)

    def _index_key(self, sig: Any, codegen: Any) -> tuple:
        return *super()._index_key(sig, codegen), _used(self._py_func.__module__)


@cache
def _used(module: str) -> tuple[tuple[str, int, int], ...]:
    """The stamps of a module of kernels and of those that it uses."""
    found: dict[str, tuple[str, int, int]] = {}
    left = [module]
    while left:
        name = left.pop()
        if name in found or not name.startswith(__package__):
            continue
        found[name] = stamp(Path(sys.modules[name].__file__))
        for value in vars(sys.modules[name]).values():
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
            left.append(str(home))
    return tuple(sorted(found.values()))


def stamp(path: Path) -> tuple[str, int, int]:
    """A source's name, when it was changed, in ns, and its bytes."""
    found = path.stat()
    return path.name, found.st_mtime_ns, found.st_size


def _decorator(*fastmath: str, part: bool = False) -> Callable[[Callable], Any]:
    compiled = njit(nogil=True, error_model="numpy", fastmath=set(fastmath), forceinline=part)

    def decorate(function: Callable) -> Any:
        kernel = compiled(function)  # not cache=True, which gives it Numba's own
        kernel._cache = _Kept(function)
        return kernel

    return decorate


# Whether the compiler may fuse multiply-adds of elementwise work. For arm64 it chooses loop by loop which of
# two products it fuses, so vectors would have other bits than the elements that are left over behind them.
_CONTRACT = ("contract",) if platform.machine() == "x86_64" else ()

# The same bits however a range is cut: no reordering, no fused multiply-add.
exact = _decorator()
# The same for what is too long for the compiler to inline by itself, and called in loops that become vectors.
exact_part = _decorator(part=True)
# Elementwise work, with the same bits however a range is cut: fused multiply-adds, sums not reordered.
fused = _decorator(*_CONTRACT, "arcp", "nsz")
# Sums and maxima over a row may be reordered, which is what makes them vectorise.
reordered = _decorator("reassoc", "contract", "arcp", "nsz")
# The same for what kernels call: it becomes a piece of each of them. Called instead, it would be one copy in
# the process that compiles and another in those that load, with other last bits.
fused_part = _decorator(*_CONTRACT, "arcp", "nsz", part=True)
reordered_part = _decorator("reassoc", "contract", "arcp", "nsz", part=True)


@intrinsic
def _float_of_bits(typing_context, bits):
    """The float32 with these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def larger(typing_context, a, b):
    """The larger of two floats; one of them if one is nan. Unlike max(), a loop of these becomes vectors."""

    def generate(context, builder, signature, arguments):
        flags = ("nnan", "nsz")
        above = builder.fcmp_ordered(">", *arguments, flags=flags)
        return builder.select(above, *arguments, flags=flags)

    return a(a, a), generate


def exp(x):
    """Return e to the power x, for kernels: dispatched by type below."""
    raise NotImplementedError("call it only inside compiled kernels")


def erf(x):
    """The error function, for kernels: dispatched by type below."""
    raise NotImplementedError("call it only inside compiled kernels")


_f = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = _f(1.44269504088896), _f(0.693359375), _f(-2.12194440e-4)
_LOWEST, _HIGHEST, _ZERO, _HALF, _ONE = _f(-87.3), _f(88.3), _f(0), _f(0.5), _f(1)
# exp(r) on |r| <= ln(2) / 2 (Moshier, Cephes, expf).
_E0, _E1, _E2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_E3, _E4, _E5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)


@overload(exp, jit_options={"fastmath": set(_CONTRACT), "forceinline": True}, inline="never")
def _exp(x):
    if x == types.float64:
        return lambda x: math.exp(x)

    def exp32(x):
        given = x  # may be nan: no comparison below is true of it, so y is nan
        x = _LOWEST if x < _LOWEST else x
        x = _HIGHEST if x > _HIGHEST else x
        n = np.floor(x * _LOG2E + _HALF)  # math.floor gives 64 bits: half as many in a vector
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
        y = p * r * r + r + _ONE
        y *= _float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
        return _ZERO if given < _LOWEST else y  # 0 where it underflows

    return exp32


# x P(x^2) / Q(x^2) is erf(x) to within 5e-7 of it where |x| < 4 (Eigen 3.4, MathFunctionsImpl.h).
_P0, _P1, _P2 = _f(-2.72614225801306e-10), _f(2.77068142495902e-8), _f(-2.10102402082508e-6)
_P3, _P4, _P5 = _f(-5.69250639462346e-5), _f(-7.34990630326855e-4), _f(-2.95459980854025e-3)
_P6, _Q4 = _f(-1.60960333262415e-2), _f(-1.42647390514189e-2)
_Q0, _Q1 = _f(-1.45660718464996e-5), _f(-2.13374055278905e-4)
_Q2, _Q3 = _f(-1.68282697438203e-3), _f(-7.37332916720468e-3)
_FOUR = _f(4)


@overload(erf, jit_options={"fastmath": set(_CONTRACT), "forceinline": True}, inline="never")
def _erf(x):
    if x == types.float64:
        return lambda x: math.erf(x)

    def erf32(x):
        s = x * x
        p = (((((_P0 * s + _P1) * s + _P2) * s + _P3) * s + _P4) * s + _P5) * s + _P6
        y = x * p / ((((_Q0 * s + _Q1) * s + _Q2) * s + _Q3) * s + _Q4)
        if abs(x) >= _FOUR:
            return _ONE if x > _ZERO else -_ONE
        return y

    return erf32
