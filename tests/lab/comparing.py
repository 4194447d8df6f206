"""Values in any nesting of dicts, lists and tuples are compared to the bit, or to a tolerance."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def assert_equal(found: Any, expected: Any, case: object = "") -> None:
    """The same structure, keys, shapes, types and bits. A failure names `case` and the place."""
    assert not isinstance(expected, Mapping) or expected, f"{case}: there is nothing to compare"
    for place, ours, theirs in _leaves(found, expected, str(case)):
        if isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, err_msg=place, strict=True)
        else:
            assert ours == theirs, f"{place}: {ours} is not {theirs}"


def assert_close(
    found: Any,
    expected: Any,
    case: object = "",
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    of_largest: float = 0.0,
    more: bool = False,
) -> None:
    """Numbers differ by atol + rtol * |expected| at most; None is None.

    of_largest: also by so much of the largest number of an array. more: `found` may have keys besides.
    """
    for place, ours, theirs in _leaves(found, expected, str(case), more):
        if theirs is None or isinstance(theirs, str):
            assert ours == theirs, place
            continue
        theirs = np.asarray(theirs)
        largest = of_largest * np.abs(theirs).max(initial=0) if of_largest else 0.0
        assert np.shape(ours) == theirs.shape, f"{place}: shape {np.shape(ours)} is not {theirs.shape}"
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol + largest, err_msg=place)


def assert_near(found: Any, expected: Any, case: object = "", *, rtol: float, atol: float = 0.0) -> None:
    """Arrays are off by rtol * |expected| + atol at most, where | | is the Euclidean norm of an array."""
    for place, ours, theirs in _leaves(found, expected, str(case)):
        theirs = np.asarray(theirs)
        off = np.linalg.norm(np.reshape(ours, theirs.shape) - theirs)
        assert off <= rtol * np.linalg.norm(theirs) + atol, f"{place}: off by {off}"


def _leaves(found: Any, expected: Any, place: str, more: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """(place, ours, theirs) of everything that is no container."""
    if isinstance(expected, Mapping):
        missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
        assert not missing and (more or not extra), f"{place}: without {missing}, besides {extra}"
        for key, value in expected.items():
            yield from _leaves(found[key], value, f"{place} {key}", more)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{place}: {len(found)} values, not {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            yield from _leaves(ours, theirs, f"{place} [{index}]", more)
    else:
        yield place, found, expected
