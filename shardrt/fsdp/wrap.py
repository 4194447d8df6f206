"""wrap: calls fully_shard on many modules, picked by class, by size or by a function.

Inner modules become units before outer ones, and the model itself comes last. If a parameter of a picked
module is tied to a module outside, wrap leaves it to the unit around both. Models with tied weights need no
special treatment.
"""

from collections.abc import Callable, Iterable
from typing import Any

from shardrt.fsdp.api import fully_shard
from shardrt.fsdp.boundary import unit_of
from shardrt.nn.layers import Embedding
from shardrt.nn.public import Module, Parameter
from shardrt.nn.storage import LocalStorage

# (path of a module, the module, number of its elements that no unit has yet) -> whether it becomes a unit. A
# dict of settings for fully_shard means True as well.
WrapPolicy = Callable[[str, Module, int], "bool | dict[str, Any]"]


def wrap(
    model: Module, policy: WrapPolicy, *, ignored: Iterable[Module | Parameter] = (), **settings: Any
) -> Module:
    """Call fully_shard on every module of `model` that `policy` picks, and on `model`.

    Args:
        model: the model.
        policy: by_class, by_size, by_predicate, or a function like theirs. It is called for every module that
            has a forward and parameters left, inner modules first, but not for `model`.
        ignored: as in fully_shard.
        **settings: arguments for all calls of fully_shard. A dict from the policy overrides them.

    Returns:
        `model`.

    Raises:
        ValueError: if the policy picks no module. Other errors are those of fully_shard.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import by_class, units, wrap
        >>> model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), by_class(nn.Linear))
        >>> [unit.label for unit in units(model)]
        ['(root)', '0', '1']
    """
    ignored = list(ignored)
    skipped = {id(parameter) for item in ignored for parameter in _parameters(item)}
    users = _users(model)
    picked = 0
    for path, module in reversed(list(model.named_modules())):
        if module is model or type(module).forward is Module.forward or unit_of(module) is not None:
            continue
        inside = {id(below) for below in module.modules()}
        free = [p for p in module.parameters() if _free(p) and id(p) not in skipped]
        tied = [parameter for parameter in free if not users[id(parameter)] <= inside]
        count = sum(parameter.size for parameter in free) - sum(parameter.size for parameter in tied)
        answer = policy(path, module, count) if count else False
        if answer is False:
            continue
        of_module = answer if isinstance(answer, dict) else {}
        fully_shard(module, ignored=[*ignored, *tied], **{**settings, **of_module})
        picked += 1
    if not picked:
        raise ValueError(
            f"wrap: the policy picks no module of {type(model).__name__}; to make it one unit, call "
            "fully_shard(model)"
        )
    return fully_shard(model, ignored=ignored, **settings)


def by_class(*classes: type[Module], **settings: Any) -> WrapPolicy:
    """A policy for wrap that picks modules of these classes.

    Args:
        *classes: subclasses of nn.Module.
        **settings: arguments of fully_shard for the picked modules.

    Raises:
        TypeError: if an argument is not a class of modules.
        ValueError: without a class.
    """
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, Module)):
            raise TypeError(f"by_class: expected classes of shardrt.nn.Module, got {kind!r}")
    if not classes:
        raise ValueError("by_class: name at least one class")

    def policy(path: str, module: Module, count: int) -> bool | dict[str, Any]:
        picked = isinstance(module, classes)
        return settings if picked and settings else picked

    return policy


def by_size(
    min_parameters: int, *, leave: tuple[type[Module], ...] = (Embedding,), **settings: Any
) -> WrapPolicy:
    """A policy for wrap that picks a module if at least `min_parameters` elements in it have no unit yet.

    All units are then at least that large, except the outermost unit, which takes the rest.

    Args:
        min_parameters: number of elements, at least 1.
        leave: classes whose modules are not picked. By default embeddings: a head often reads their weight
            directly, and a parameter can be read only while its unit is gathered.
        **settings: arguments of fully_shard for the picked modules.

    Raises:
        ValueError: if `min_parameters` is less than 1.
    """
    if min_parameters < 1:
        raise ValueError(f"by_size: min_parameters must be at least 1, got {min_parameters}")

    def policy(path: str, module: Module, count: int) -> bool | dict[str, Any]:
        picked = count >= min_parameters and not isinstance(module, leave)
        return settings if picked and settings else picked

    return policy


def by_predicate(function: Callable[[str, Module], "bool | dict[str, Any]"]) -> WrapPolicy:
    """A policy for wrap that picks the modules for which `function(path, module)` is true or a dict.

    Args:
        function: gets the path of a module and the module. A dict has arguments of fully_shard for the
        module.
    """

    def policy(path: str, module: Module, count: int) -> bool | dict[str, Any]:
        answer = function(path, module)
        return answer if isinstance(answer, dict) else bool(answer)

    return policy


def _free(parameter: Parameter) -> bool:
    """Whether no unit has the parameter yet."""
    return isinstance(parameter.storage, LocalStorage)


def _users(model: Module) -> dict[int, set[int]]:
    """Map the id of a parameter to the ids of the modules that hold it."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(id(module))
    return users


def _parameters(item: Module | Parameter) -> list[Parameter]:
    return list(item.parameters()) if isinstance(item, Module) else [item]
