"""Wrapping: fully_shard on many modules at once, picked by class, by size or by a function.

The parts become units before what contains them, and the model itself last. A parameter that is tied to a
module outside of a picked one is left to the unit around both, so a model with tied weights needs no care.
"""

from collections.abc import Callable, Iterable
from typing import Any

from shardrt.fsdp.api import fully_shard
from shardrt.fsdp.boundary import unit_of
from shardrt.nn.layers import Embedding
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage

# (path of a module, the module, elements in it that no unit has yet) -> whether it becomes a unit; a dict of
# settings for fully_shard says yes as well.
WrapPolicy = Callable[[str, Module, int], "bool | dict[str, Any]"]


def wrap(
    model: Module, policy: WrapPolicy, *, ignored: Iterable[Module | Parameter] = (), **settings: Any
) -> Module:
    """fully_shard on every module of `model` that `policy` picks, and on `model`; gives `model` back.

    policy: by_class, by_size, by_predicate, or a function like theirs. It is asked about every module that
    has a forward and parameters left, inner ones first, but not about `model`.
    settings: for all calls of fully_shard; a dict from the policy overrides them. ignored: as there.

    Raises ValueError if the policy picks nothing, and as fully_shard.
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
        own = answer if isinstance(answer, dict) else {}
        fully_shard(module, ignored=[*ignored, *tied], **{**settings, **own})
        picked += 1
    if not picked:
        raise ValueError(
            f"wrap: the policy picks no module of {type(model).__name__}; fully_shard(model) would do"
        )
    return fully_shard(model, ignored=ignored, **settings)


def by_class(*classes: type[Module], **settings: Any) -> WrapPolicy:
    """Picks modules of these classes. `settings`: of fully_shard, for them.

    Raises TypeError for anything but classes of modules.
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
    """Picks a module once at least `min_parameters` elements in it are in no unit below it.

    So units are at least that large, except the outermost, which takes the rest. leave: classes that are not
    picked themselves; by default embeddings, because a head often reads their weight directly, and a
    parameter can be read only while its unit is gathered. Raises ValueError for less than 1.
    """
    if min_parameters < 1:
        raise ValueError(f"by_size: min_parameters must be at least 1, got {min_parameters}")

    def policy(path: str, module: Module, count: int) -> bool | dict[str, Any]:
        picked = count >= min_parameters and not isinstance(module, leave)
        return settings if picked and settings else picked

    return policy


def by_predicate(function: Callable[[str, Module], "bool | dict[str, Any]"]) -> WrapPolicy:
    """Picks the modules for which `function(path, module)` is true, or gives a dict of settings."""

    def policy(path: str, module: Module, count: int) -> bool | dict[str, Any]:
        answer = function(path, module)
        return answer if isinstance(answer, dict) else bool(answer)

    return policy


def _free(parameter: Parameter) -> bool:
    """Whether no unit has the parameter."""
    return isinstance(parameter.storage, LocalStorage)


def _users(model: Module) -> dict[int, set[int]]:
    """Parameter -> the modules that hold it, both by id."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(id(module))
    return users


def _parameters(item: Module | Parameter) -> list[Parameter]:
    return list(item.parameters()) if isinstance(item, Module) else [item]
