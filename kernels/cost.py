"""What a call of a kernel does to memory and how much it computes, declared where the kernel is defined.

    @cost("x dy dweight?accumulate -> dweight", flops=2)
    def backward(x, dy, dweight, accumulate): ...

A declaration changes nothing of the kernel. kernels/costs.py makes a Cost of it and of a call's arguments.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

Array = Any


class Cost(NamedTuple):
    """What one call does to memory, and how much of it.

    reads, writes: arguments, or views of them; what is changed or added to is in both. flops: operations,
    about; an exponential counts as ten. nbytes: that move to and from memory, with those of scratch.
    launches: how often the CUDA twin's host calls the driver, or a library. sizes: (m, n, k) of a matmul,
    and how many there are if several; else the shape of what is worked on. value: what the call gives back:
    None, a number, True or False, an argument, New or Answer. scratch: the bytes of nbytes that are those of
    memory of the CUDA twin's own, written and read once each.
    """

    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    flops: int
    nbytes: int
    launches: int = 1
    sizes: tuple[int, ...] = ()
    value: Any = None
    scratch: int = 0


class New(NamedTuple):
    """A value that is an array which the kernel makes, and writes; it is in no `writes`."""

    shape: tuple[int, ...]
    dtype: type


class Answer(NamedTuple):
    """A value that the kernel computes and the host waits for: which it is, and what it usually is."""

    what: str
    usual: Any


NOTHING = Cost((), (), 0, 0, 0)


@dataclass(frozen=True)
class Declaration:
    """See `cost`."""

    kernel: Callable
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: Any
    sizes: Any
    more: Any
    part: Mapping[str, Callable]
    value: Any
    scratch: bool

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.kernel)

    def arguments(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Those of a call, by name. Raises TypeError as the kernel would."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def cost(self, given: dict[str, Any], launches: int, scratch: int) -> Cost:
        """Of a call with these arguments, of which the CUDA twin makes so many launches and takes scratch."""
        given = {**given, "launches": launches}
        reads = self._arrays(self.reads, given, self.part)
        writes = self._arrays(self.writes, given, {})
        value = _asked(self.value, given)
        if not reads and not writes:
            return NOTHING._replace(value=value)
        first = (reads or writes)[0]
        flops = _asked(self.flops, given) if callable(self.flops) else self.flops * first.size
        sizes = first.shape if self.sizes is None else _asked(self.sizes, given)
        own = 2 * scratch if self.scratch else 0
        nbytes = sum([x.nbytes for x in (*reads, *writes)]) + own + _asked(self.more, given)
        return Cost(reads, writes, flops, nbytes, launches, sizes, value, own)

    @staticmethod
    def _arrays(names: tuple[str, ...], given: dict[str, Any], part: Mapping[str, Callable]) -> tuple:
        found: list[Array] = []
        for word in names:
            name, _, condition = word.partition("?")
            value = _asked(part[name], given) if name in part else given[name]
            unless = condition.startswith("!")
            if not condition or bool(given[condition.lstrip("!")]) != unless:
                found += value if isinstance(value, list | tuple) else [value]
        return tuple([x for x in found if x is not None])


def cost(
    arrays: str,
    flops: Any = 0,
    *,
    sizes: Any = None,
    more: Any = 0,
    part: Mapping[str, Callable] | None = None,
    value: Any = None,
    scratch: bool = True,
) -> Callable[[Callable], Callable]:
    """Declare the cost of a kernel.

    arrays: "read read?condition -> written": names of arguments. What is changed in place stands on both
    sides. With a condition an argument is read where the condition is true, as a gradient that is added to;
    with "!condition" where it is false. None is no array, and of a list all are.
    flops: for each element of the first array; or, as everything below may be, a function of arguments, named
    as they are.
    sizes: see Cost; by default the shape of the first array.
    more: bytes that move besides all arrays once, below zero where not all of an array moves. It may ask for
    `launches`.
    part: of an argument, what is read if not all.
    value: what the call gives back.
    scratch: whether the scratch memory of the CUDA twin counts.
    """
    reads, writes = (tuple(side.split()) for side in arrays.split("->"))

    def declare(kernel: Callable) -> Callable:
        how = flops, sizes, more, part or {}, value, scratch
        kernel.cost = Declaration(kernel, reads, writes, *how)  # type: ignore[attr-defined]
        return kernel

    return declare


def _asked(value: Any, given: dict[str, Any]) -> Any:
    """A value, or what a function gives of the arguments that it names."""
    if not callable(value):
        return value
    code = value.__code__
    return value(*[given[name] for name in code.co_varnames[: code.co_argcount]])
