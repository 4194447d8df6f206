"""Chooses oneDNN or others for a matmul: the faster, measured once for each shape, and kept on disk.

A file is for one shape, number of threads, processor, BLAS and version of oneDNN (kernels/kept.py). Sizes
that are about the same have one file: experts have other numbers of rows at each step. What can't be
measured, or must not be (use_deterministic_algorithms), goes by the type alone: bfloat16 to oneDNN, float32
to BLAS.
"""

import platform
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from shardrt.kernels import determinism, kept, onednn
from shardrt.kernels.cost import Array
from shardrt.kernels.cpu import _blas
from shardrt.kernels.cpu._threads import threads

Way = Callable[..., None]

LEAST = 2**23  # operations of a float32 product that is worth a look: below, a call costs more than is won
GAIN = 0.95  # of BLAS's time: float32 goes to oneDNN where that takes less
ROUNDS = 4
BUDGET = 30.0  # seconds of a process, after which new shapes go by their type, from then on

_chosen: dict[tuple, str] = {}
_spent = 0.0


def open_to(a: Array, b: Array, out: Array, library: onednn.Library | None) -> bool:
    """Whether there is a choice: oneDNN is here, reads these operands, and the product is worth it.

    On a processor without instructions for bfloat16 oneDNN has no matmul of its bits.
    """
    if library is None:
        return False
    if a.dtype == np.uint16:
        here = library.computes_bf16 and a.size > 0 and b.size > 0
        return here and _read(a) and _read(b) and out.strides[1] == out.itemsize
    if a.dtype != np.float32 or 2 * a.size * b.shape[1] < LEAST or _by_rule():
        return False
    return min(*a.shape, b.shape[1]) > 1 and _read(a) and _read(b) and out.strides[1] == out.itemsize


def choose(ways: dict[str, Way], a: Array, b: Array, bias: Array | None, out: Array, accumulate: bool) -> str:
    """The name of the way that computes this matmul."""
    what = (*map(_about, (a, b, out)), bias is not None, accumulate)
    rule = "onednn" if a.dtype == np.uint16 else "blas"
    return choose_from(ways, rule, what, 3 if accumulate else None, a, b, bias, out, accumulate)


def choose_from(ways: dict[str, Way], rule: str, what: tuple, out: int | None, *given: Any) -> str:
    """The name of the way that computes `what`: the faster, or where that must not count the rule.

    given: what a way is called with. out: which of them is added to, so that trials need another; None:
    written anew, by trials too. rule: one of the ways.
    """
    by_rule, what = _by_rule(), (*what, threads())
    found = _chosen.get((what, by_rule))
    if found is None:
        found = rule if by_rule or len(ways) < 2 else _kept(ways, what, rule, out, *given)
        _chosen[what, by_rule] = found
    return found


def _about(x: Array) -> onednn.Matrix:
    """An operand, its sizes rounded up to 4, 5, 6 or 7 times a power of two."""
    return _rounded(x.shape, x.strides, x.itemsize)


@lru_cache(4096)  # asked for with each matmul
def _rounded(shape: tuple[int, int], strides: tuple[int, int], item: int) -> onednn.Matrix:
    whole = onednn.described(*shape, strides[0] // item, strides[1] // item, item)
    steps = [max(0, (size - 1).bit_length() - 3) for size in (whole.rows, whole.columns)]
    rows, columns = (-(-size >> step) << step for size, step in zip(whole, steps, strict=False))
    return whole._replace(rows=rows, columns=columns)


def _by_rule() -> bool:
    """Whether no result may depend on measurements."""
    return determinism.are_deterministic_algorithms_enabled()


def forget() -> None:
    """Read from disk, or measure, again."""
    global _spent
    _chosen.clear()
    _store.cache_clear()
    _spent = 0.0


def _kept(ways: dict[str, Way], what: tuple, rule: str, *trial: Any) -> str:
    """What is on disk, or is measured now."""
    global _spent
    store, name = _store(), repr(what)
    found = store.read(name)
    if found in ways:
        return found
    begin = perf_counter()
    choice = rule if _spent > BUDGET else _faster(ways, rule, *trial)
    found = store.write(name, choice, instead_of=found)
    _spent += perf_counter() - begin
    return found if found in ways and store.read(name) == found else rule  # a folder that can't be written


def _faster(ways: dict[str, Way], rule: str, out: int | None, *given: Any) -> str:
    """The least time of each decides, alternating; at equal speed the rule.

    The processor's time, where all is computed by this thread: others that use the cores take no part in it.
    """
    clock = thread_time if threads() == 1 else perf_counter
    if out is not None:
        given = (*given[:out], np.zeros(given[out].shape, given[out].dtype), *given[out + 1 :])
    least = dict.fromkeys(ways, np.inf)
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begin = clock()
            way(*given)
            least[name] = min(least[name], clock() - begin)
    other = next(name for name in ways if name != rule)
    return other if least[other] < GAIN * least[rule] else rule


def _read(x: Array) -> bool:
    """Whether oneDNN reads the matrix where it lies."""
    (rows, columns), (down, right), size = x.shape, x.strides, x.itemsize
    plain = (right == size or columns == 1) and down >= columns * size
    turned = (down == size or rows == 1) and right >= rows * size
    return (plain or turned or rows == 1 or columns == 1) and down % size == 0 and right % size == 0


@cache
def _store() -> kept.Kept:
    return kept.Kept(_folder, _identity, "way", "processor or library")


def _folder() -> Path:
    return kept.cache_directory() / "cpu" / "products"


@cache
def _identity() -> dict[str, Any]:
    library = onednn.library()
    version = "" if library is None else f"{library.version} isa {library.isa:#x}"
    return {"processor": processor(), "blas": _blas.described(), "onednn": version}


@cache
def processor() -> str:
    """The processor by name, family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    return f"{name}, family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
