"""Module: a tree of layers with named parameters, and the seams where sharding and saving memory attach.

`Module.__call__` lets `self.boundary` run the forward; that is all that a layer knows of FSDP. Inside,
`self.offload` and `self.recomputation` may run it in their own way. Modules know their parent, so a
parameter's full name, which its initial values depend on, can be told as soon as the tree stands.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, Protocol

import numpy as np

from shardrt import autograd, device
from shardrt.nn.parameter import Parameter


class Around(Protocol):
    """What may be attached to a module to run its forward, and act when it begins and ends."""

    def run(self, module: "Module", forward: Callable, /, *args: Any, **kwargs: Any) -> Any: ...


class Module:
    """Base of all layers. Assign Parameters and Modules as attributes; define `forward`."""

    def __init__(self) -> None:
        state = self.__dict__
        state["_parameters"] = {}
        state["_modules"] = {}
        state["_buffers"] = {}
        state["_parent"] = None
        state["_attribute"] = ""
        state["training"] = True
        state["boundary"]: Around | None = None  # see shardrt.fsdp
        state["recomputation"]: Around | None = None  # see shardrt.recompute
        state["offload"]: Around | None = None  # see shardrt.activation_offload

    # -- the tree

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter | Module):
            if "_modules" not in self.__dict__:
                raise RuntimeError(f"{type(self).__name__}: call super().__init__() before setting {name!r}")
            self._parameters.pop(name, None)
            self._modules.pop(name, None)
            (self._parameters if isinstance(value, Parameter) else self._modules)[name] = value
            value.belongs_to(self, name)
        object.__setattr__(self, name, value)

    def belongs_to(self, parent: "Module", attribute: str) -> None:
        """Take the name `attribute` in `parent`; the first parent that is alive stays."""
        if self._parent is None or self._parent() is None:
            object.__setattr__(self, "_parent", weakref.ref(parent))
            object.__setattr__(self, "_attribute", attribute)

    @property
    def parent(self) -> "Module | None":
        """The module that holds this one, or None for the outermost."""
        return self._parent() if self._parent is not None else None

    @property
    def name(self) -> str:
        """The path from the outermost module, whose own name is ""."""
        parent = self.parent
        if parent is None:
            return ""
        return f"{parent.name}.{self._attribute}" if parent.name else self._attribute

    def children(self) -> Iterator["Module"]:
        """The modules held directly."""
        return iter(self._modules.values())

    def modules(self) -> Iterator["Module"]:
        """This module and all below it, each once, parents first."""
        for _, module in self.named_modules():
            yield module

    def named_modules(self) -> Iterator[tuple[str, "Module"]]:
        """(path from here, module) for this module ("") and all below it, each once, parents first."""
        seen: set[int] = set()
        stack: list[tuple[str, Module]] = [("", self)]
        while stack:
            path, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
            below = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items()]
            stack.extend(reversed(below))

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(path from here, parameter), each parameter once, under the first path that leads to it."""
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, parameter in module._parameters.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (f"{path}.{name}" if path else name), parameter

    def register_buffer(
        self, name: str, shape: tuple[int, ...], value: float, *, dtype: Any = np.float32
    ) -> None:
        """Give the module an array that is state but no parameter: full of `value`, whole on every rank.

        It is read as `self.name` and changed in place. State dicts and checkpoints hold it under its name,
        rank 0's where ranks differ.
        """
        array = device.current().zeros(shape, dtype)
        array += value
        self._buffers[name] = array
        object.__setattr__(self, name, array)

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        """(path from here, array) of every buffer."""
        for path, module in self.named_modules():
            for name, array in module._buffers.items():
                yield (f"{path}.{name}" if path else name), array

    def apply(self, function: Callable[["Module"], None]) -> "Module":
        """Call `function` on this module and all below it."""
        for module in self.modules():
            function(module)
        return self

    # -- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter(self.forward, args, kwargs)

    def entered_around(self, method: Callable) -> Callable:
        """`method` as another entry beside forward: the boundary runs each call."""

        @wraps(method)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return self._enter(method, args, kwargs)

        return entry

    def _enter(self, method: Callable, args: tuple, kwargs: dict) -> Any:
        """Call `method`, recomputed and offloaded as this module is; not twice where one calls another."""
        running = autograd.modules()
        depth, nested = len(running), self in running
        for around in (self.boundary,) if nested else (self.recomputation, self.offload, self.boundary):
            if around is not None:
                method = partial(around.run, self, method)
        try:
            running.append(self)
            return method(*args, **kwargs)
        finally:
            del running[depth:]

    def train(self, mode: bool = True) -> "Module":
        """Switch this module and all below it to training (dropout acts) or, with False, to evaluation."""
        return self.apply(lambda module: object.__setattr__(module, "training", mode))

    def eval(self) -> "Module":
        """The same as train(False)."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters():
            parameter.storage.zero_grad()

    # -- state

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> whole array, not copied, of parameters and then buffers.

        RuntimeError where parameters are sharded: see full_state_dict.
        """
        parameters = {name: parameter.data for name, parameter in self.named_parameters()}
        return parameters | dict(self.named_buffers())

    def load_state_dict(self, state: Mapping[str, np.ndarray], *, strict: bool = True) -> None:
        """Set every parameter and buffer from whole arrays; a rank takes its pieces, one parameter at a time.

        strict=False leaves what `state` does not have as it is: for adapters kept alone, say.
        Raises ValueError that lists the names that are missing or not expected, or a shape that differs.
        """
        parameters, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        own, given = parameters.keys() | buffers.keys(), set(state.keys())
        missing = sorted(own - given) if strict else []
        extra = sorted(given - own)
        if missing or extra:
            raise ValueError(f"load_state_dict: missing {missing[:10]}, not expected {extra[:10]}")
        parameters = {name: parameter for name, parameter in parameters.items() if name in given}
        _barrier(parameters.values())  # a peer may still read the old values where ranks share memory,
        for name, parameter in parameters.items():
            parameter.load(state[name])
        _barrier(parameters.values())  # and may read the new ones only when all are written
        for name, array in buffers.items():
            if name in given:
                _set_buffer(name, array, state[name])

    def __repr__(self) -> str:
        lines = [f"  ({name}): {child!r}".replace("\n", "\n  ") for name, child in self._modules.items()]
        own = ", ".join(f"{name}{list(p.shape)}" for name, p in self._parameters.items())
        return f"{type(self).__name__}({own}" + ("\n" + "\n".join(lines) + "\n" if lines else "") + ")"


def _set_buffer(name: str, array: Any, values: Any) -> None:
    if tuple(values.shape) != array.shape:
        raise ValueError(f"buffer {name!r} has shape {array.shape}, the values {tuple(values.shape)}")
    device.of(array).copy(array, np.ascontiguousarray(values, array.dtype))


def _barrier(parameters: Iterable[Parameter]) -> None:
    """Wait until every rank that holds a part of these parameters has come here."""
    communicators = []
    for parameter in parameters:
        _ = parameter.shard  # there is a communicator once the storage is built
        if parameter.storage.communicator not in [None, *communicators]:
            communicators.append(parameter.storage.communicator)
    for communicator in communicators:
        communicator.barrier(stream=device.current().current_stream)


class ModuleList(Module):
    """Modules by index; called by whoever holds the list."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module at the end."""
        setattr(self, str(len(self._modules)), module)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Module:
        return list(self.children())[index]


class Sequential(ModuleList):
    """Modules called one after the other."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x
