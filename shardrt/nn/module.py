"""Module: a tree of layers with named parameters, and the seams where sharding and saving memory attach.

`Module.__call__` runs the forward inside the wrappers that `wrap_forward` attached. `WrapperOrder` lists
their layers; a module knows no more of them. Modules know their parent, so a parameter's full name, which its
initial values depend on, is known as soon as the tree stands.

This is what the runtime needs of a module. nn/public.py has the subclass that users subclass, with hooks,
modes, buffers and state dicts.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from shardrt import autograd
from shardrt.nn.parameter import Parameter

__all__ = ["Module", "WrapperOrder", "between_stages", "caller_of", "label_of", "stages_of"]

A = TypeVar("A")

# Each is called when a module is called and no other module runs: a call of the whole model begins.
before_call: list[Callable[[], None]] = []


class WrapperOrder(IntEnum):
    """The wrappers around the forward of a module, the innermost first."""

    CONVERSION = auto()  # of a module that is cut over ranks; recomputation converts activations again
    RECOMPUTATION = auto()
    ACTIVATION_OFFLOAD = auto()  # around recomputation, so only the inputs that it keeps travel
    UNIT = auto()  # around recomputation, so what runs again in backward finds the unit gathered
    MODEL = auto()  # around all units: a call of the whole model begins here
    STAGES = auto()  # refuses the call of a model of which this rank runs stages
    PIPELINE = auto()  # around that refusal: runs the stages of all ranks in place of the model


class ForwardWrapper(Protocol):
    """Runs the forward of a module that it is attached to, and acts when the forward begins and ends.

    layer: its place among the wrappers of the module.
    every_entry: it also runs if one entry of the module calls another, not only around the outer entry.
    """

    layer: WrapperOrder
    every_entry: bool

    def run(self, module: "Module", forward: Callable, /, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class ModulePlacement:
    """The facts that parallelism has added to a module; nn/placement.py has more of them.

    label: of a pipeline stage, for messages.
    between_stages: whether the first argument comes from a stage, and whether the output goes to one.
    stages: of a model in a pipeline, weak references to the stages that this rank runs in its place.
    stage: of a module in a stage, a weak reference to that stage, if this rank has it.
    """

    label: str = ""
    between_stages: tuple[bool, bool] = (False, False)
    stages: tuple[weakref.ref, ...] = ()
    stage: weakref.ref | None = None


class Module:
    """Base of all layers. Assign Parameters and Modules as attributes; define `forward`."""

    full_precision = False  # True of a class: mixed precision does not change the type of its own parameters

    def __init__(self) -> None:
        state = self.__dict__
        state["_parameters"] = {}
        state["_modules"] = {}
        state["_buffers"] = {}
        state["_parent"] = None
        state["_attribute"] = ""
        state["training"] = True
        state["placement"] = ModulePlacement()
        state["_forward_wrappers"]: list[ForwardWrapper] = []  # innermost first

    # -- the tree

    def __setattr__(self, name: str, value: Any) -> None:
        state, before = self.__dict__, self.__dict__.get(name)
        held = isinstance(value, Parameter | Module)
        if held and "_modules" not in state:
            raise RuntimeError(f"{type(self).__name__}: call super().__init__() before setting {name!r}")
        if isinstance(before, Parameter) and not held and value is not None:
            raise TypeError(
                f"{type(self).__name__}: {name!r} is a parameter, but got a {type(value).__name__}; assign "
                f"a Parameter, or None to remove it, or set its values: {name}.data = ..."
            )
        kind = self._kind(name, value)
        if value is not before:
            self._let_go(name, before, kind)
        if kind is not None:
            state[kind][name] = value
        if held:
            value.belongs_to(self, name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        before = self.__dict__.get(name)
        object.__delattr__(self, name)
        self._let_go(name, before, None)

    def _kind(self, name: str, value: Any) -> str | None:
        """The dictionary that holds `value` under this name, or None for a plain attribute."""
        if isinstance(value, Parameter):
            return "_parameters"
        if isinstance(value, Module):
            return "_modules"
        return "_buffers" if value is not None and name in self.__dict__.get("_buffers", ()) else None

    def _let_go(self, name: str, before: Any, kind: str | None) -> None:
        """End the name of `before`. In the dictionary `kind`, another value takes its place."""
        for other in {"_parameters", "_modules", "_buffers"} - {kind}:
            self.__dict__.get(other, {}).pop(name, None)
        if isinstance(before, Parameter | Module):
            before.leaves(self, name)

    def belongs_to(self, parent: "Module", attribute: str) -> None:
        """Take the name `attribute` in `parent`; the first parent that is alive stays."""
        if self.parent is None:
            object.__setattr__(self, "_parent", weakref.ref(parent))
            object.__setattr__(self, "_attribute", attribute)

    def leaves(self, parent: "Module", attribute: str) -> None:
        """Give up the name `attribute` in `parent`, if that is its name."""
        if self.parent is parent and self._attribute == attribute:
            object.__setattr__(self, "_parent", None)
            object.__setattr__(self, "_attribute", "")

    @property
    def parent(self) -> "Module | None":
        """The module that holds this one, or None for the outermost."""
        return self._parent() if self._parent is not None else None

    @property
    def name(self) -> str:
        """The path from the outermost module, whose own name is ""."""
        names, module = [], self
        while (parent := module.parent) is not None:
            names.append(module._attribute)
            module = parent
        return ".".join(reversed(names))

    def children(self) -> Iterator["Module"]:
        """The modules held directly."""
        return iter(self._modules.values())

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """(name, module) of the modules held directly."""
        return iter(self._modules.items())

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

    # -- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output. Subclasses define it, and users call the module itself."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward inside the wrappers that are attached to the module."""
        return self._enter(self.forward, args, kwargs)

    def wrap_forward(self, wrapper: ForwardWrapper) -> None:
        """Let `wrapper` run each forward from now on. Of two wrappers of one layer, the first is inside."""
        self._forward_wrappers.append(wrapper)
        self._forward_wrappers.sort(key=lambda other: other.layer)

    def around(self, kind: type[A]) -> A | None:
        """The wrapper of this kind, or None."""
        return next((wrapper for wrapper in self._forward_wrappers if isinstance(wrapper, kind)), None)

    def entered_around(self, method: Callable) -> Callable:
        """`method` as a second entry next to forward: the wrappers of the module run each call."""

        @wraps(method)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return self._enter(method, args, kwargs)

        return entry

    def _enter(self, method: Callable, args: tuple, kwargs: dict) -> Any:
        """Call `method` inside the wrappers, but not inside a wrapper twice if one entry calls another."""
        running = autograd.modules()
        depth, nested = len(running), self in running
        for begins in before_call if not running else ():
            begins()
        for wrapper in self._forward_wrappers:
            if wrapper.every_entry or not nested:
                method = partial(wrapper.run, self, method)
        try:
            running.append(self)
            return method(*args, **kwargs)
        finally:
            del running[depth:]


def label_of(module: Module) -> str:
    """For messages: the path from the outermost module; for that one "(root)", or which stage it is."""
    return module.name or module.placement.label or "(root)"


def between_stages(module: Module) -> tuple[bool, bool]:
    """Whether the first argument and the output of `module` lie inside of a model, between two stages."""
    return module.placement.between_stages


def stages_of(module: Module) -> list[Module]:
    """The pipeline stages that this rank runs in place of the module."""
    return [stage for stage in (reference() for reference in module.placement.stages) if stage is not None]


def caller_of(module: Module) -> Module | None:
    """The module that calls this one: its parent, or in a pipeline the stage that has it."""
    stage = module.placement.stage
    return module.parent if stage is None else stage()
