"""Modules and parameters in lists and dictionaries. Their names are their positions, or their keys."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from shardrt.nn.public import Module, Parameter

Item = TypeVar("Item")


class ModuleList(Module):
    """Modules by index; called by the module with the list. A slice is a list that shares its modules.

    Example:
        >>> from shardrt import nn
        >>> layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        >>> len(layers), [name for name, _ in layers.named_parameters()][:2]
        (3, ['0.weight', '0.bias'])
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def append(self, module: Module) -> "ModuleList":
        """Add a module at the end."""
        position = len(self)
        while str(position) in self._modules:  # a slice of a Sequential keeps its modules' names
            position += 1
        setattr(self, str(position), _held(self, module, Module))
        return self

    def extend(self, modules: Iterable[Module]) -> "ModuleList":
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> None:
        """Put a module before this index; the modules after it change their names."""
        modules = list(self)
        modules.insert(index, _held(self, module, Module))
        self._refill(modules)

    def _refill(self, modules: list[Module]) -> None:
        for name in list(self._modules):
            delattr(self, name)
        self.extend(modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int | slice) -> Any:
        modules = list(self.children())[index]
        return ModuleList(modules) if isinstance(index, slice) else modules

    def __setitem__(self, index: int, module: Module) -> None:
        setattr(self, list(self._modules)[index], _held(self, module, Module))

    def __delitem__(self, index: int | slice) -> None:
        modules = list(self)
        del modules[index]
        self._refill(modules)


class Sequential(ModuleList):
    """Modules called one after the other, given one by one or as a dictionary with their names.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
        >>> model(np.ones((3, 8), np.float32)).shape
        (3, 2)
    """

    def __init__(self, *modules: Module | Mapping[str, Module]) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            super().__init__()
            for name, module in modules[0].items():
                setattr(self, _key(self, name), _held(self, module, Module))
        else:
            super().__init__(modules)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Sequential(dict(list(self.named_children())[index]))
        return super().__getitem__(index)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class _ByName(Module, Generic[Item]):
    """What ModuleDict and ParameterDict share."""

    _class: type  # of the items
    _store: str  # the attribute in which a module keeps them

    @property
    def _items(self) -> dict[str, Item]:
        return self.__dict__[self._store]

    def __setitem__(self, name: str, item: Item) -> None:
        setattr(self, _key(self, name), _held(self, item, self._class))

    def __getitem__(self, name: str) -> Item:
        return self._items[name]

    def __delitem__(self, name: str) -> None:
        _ = self._items[name]
        delattr(self, name)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._items.keys()

    def values(self) -> Iterable[Item]:
        """The modules or parameters."""
        return self._items.values()

    def items(self) -> Iterable[tuple[str, Item]]:
        """Both."""
        return self._items.items()


class ModuleDict(_ByName[Module]):
    """Modules by name; called by the module that holds the dictionary."""

    _class, _store = Module, "_modules"

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] = ()) -> None:
        super().__init__()
        self.update(modules)

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Set all of them."""
        for name, module in dict(modules).items():
            self[name] = module

    def pop(self, name: str) -> Module:
        """Take a module out."""
        module = self[name]
        del self[name]
        return module


class ParameterList(Module):
    """Parameters by index."""

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        super().__init__()
        self.extend(parameters)

    def append(self, parameter: Parameter) -> "ParameterList":
        """Add a parameter at the end."""
        setattr(self, str(len(self)), _held(self, parameter, Parameter))
        return self

    def extend(self, parameters: Iterable[Parameter]) -> "ParameterList":
        """Add parameters at the end."""
        for parameter in parameters:
            self.append(parameter)
        return self

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters.values())

    def __getitem__(self, index: int | slice) -> Any:
        return list(self._parameters.values())[index]

    def __setitem__(self, index: int, parameter: Parameter) -> None:
        setattr(self, list(self._parameters)[index], _held(self, parameter, Parameter))


class ParameterDict(_ByName[Parameter]):
    """Parameters by name."""

    _class, _store = Parameter, "_parameters"

    def __init__(self, parameters: Mapping[str, Parameter] | Iterable[tuple[str, Parameter]] = ()) -> None:
        super().__init__()
        for name, parameter in dict(parameters).items():
            self[name] = parameter


def _held(container: Module, item: Any, kind: type) -> Any:
    if not isinstance(item, kind):
        own, given = type(container).__name__, type(item).__name__
        raise TypeError(f"{own}: each must be a {kind.__name__}, got {given}")
    return item


def _key(container: Module, name: Any) -> str:
    """A name that can be part of a parameter's name, and that is no attribute of the container."""
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"{type(container).__name__}: a name must be a string without dots, got {name!r}")
    if name not in container._modules and name not in container._parameters and hasattr(container, name):
        raise ValueError(
            f"{type(container).__name__}: the container already has an attribute {name!r}; use another name"
        )
    return name
