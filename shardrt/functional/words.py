"""PyTorch's argument names, next to NumPy's: x.sum(dim=1) is x.sum(axis=1)."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


def also(_refused: dict[str, tuple] | None = None, /, **words: str) -> Callable[[F], F]:
    """Let a function also be called with PyTorch's argument names, as in @also(dim="axis").

    Type checkers know only the function's own names.

    Args:
        _refused: names of arguments that the function does not support: the value that asks for nothing, and
            the advice of the TypeError for other values.
    """
    refused = _refused or {}

    def decorated(function: F) -> F:
        @wraps(function)
        def called(*arguments: Any, **given: Any) -> Any:
            return function(*arguments, **_translated(function.__name__, given, words, refused))

        return called  # type: ignore[return-value]

    return decorated


def _translated(name: str, given: dict[str, Any], words: dict[str, str], refused: dict[str, tuple]) -> dict:
    found = {}
    for word, value in given.items():
        if word in refused:
            nothing, instead = refused[word]
            if value is not nothing and not (isinstance(value, float | bool) and value == nothing):
                raise TypeError(f"{name}: unknown argument {word}; {instead}")
            continue
        own = words.get(word, word)
        if own in found or (own != word and own in given):
            raise TypeError(f"{name}: {own} was passed twice, once as {word}")
        found[own] = value
    return found


torch_words = also(dim="axis", keepdim="keepdims")


def only(op: str, instead: str, **given: tuple[Any, Any]) -> None:
    """Refuse arguments that only PyTorch's op supports: each argument is (what it got, what it takes).

    Raises:
        ValueError: that names the argument and says what to do instead.
    """
    for name, (got, taken) in given.items():
        if got is not taken and not (isinstance(got, bool | int | float) and got == taken):
            raise ValueError(f"{op}: {name} must be {taken!r}, got {got!r}; {instead}")
