"""Module: a tree of layers with named parameters, and the seams where sharding and saving memory attach.

`Module.__call__` runs the forward inside the wrappers that `wrap_forward` attached; `Layer` lists them, and
that is all that a module knows of them. Modules know their parent, so a parameter's full name, which its
initial values depend on, is known as soon as the tree stands.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import IntEnum, auto
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import numpy as np

from shardrt import autograd, device, random
from shardrt.comm import world
from shardrt.comm.first import FromFirst
from shardrt.comm.protocol import Communicator
from shardrt.hooks import Hooks, RemovableHandle
from shardrt.nn import elsewhere
from shardrt.nn.parameter import Parameter
from shardrt.nn.placement import ModulePlacement, PipelinePlacement
from shardrt.nn.storage import LocalStorage
from shardrt.tensor import Tensor

A = TypeVar("A")
_NOWHERE = ModulePlacement()


class Layer(IntEnum):
    """What runs inside what, around the forward of a module: the innermost layer first."""

    CONVERSION = auto()  # of a module that is cut over ranks; recomputation converts activations again
    RECOMPUTATION = auto()
    ACTIVATION_OFFLOAD = auto()  # around recomputation, so only the inputs that it keeps travel
    UNIT = auto()  # around recomputation, so what runs again in backward finds the unit gathered
    MODEL = auto()  # around all units: what a call of the whole model begins with
    STAGES = auto()  # refuses the call of a model of which this rank runs stages
    PIPELINE = auto()  # around that refusal: runs the stages of all ranks in place of the model


class ForwardWrapper(Protocol):
    """What `wrap_forward` attaches to a module: it runs the forward, and acts when that begins and ends.

    layer: its place among the wrappers of the module. every_entry: it also runs where one entry of the module
    calls another, not only around the outer entry.
    """

    layer: Layer
    every_entry: bool

    def run(self, module: "Module", forward: Callable, /, *args: Any, **kwargs: Any) -> Any: ...


class Module:
    """Base of all layers. Assign Parameters and Modules as attributes; define `forward`."""

    full_precision = False  # True of a class: mixed precision leaves its own parameters what they are

    def __init__(self) -> None:
        state = self.__dict__
        state["_parameters"] = {}
        state["_modules"] = {}
        state["_buffers"] = {}
        state["_parent"] = None
        state["_attribute"] = ""
        state["training"] = True
        state["_block"] = None
        state["placement"]: ModulePlacement | None = None  # None of what belongs to no pipeline and no plan
        state["_forward_wrappers"]: list[ForwardWrapper] = []  # innermost first
        state["_forward_pre_hooks"] = Hooks()
        state["_forward_hooks"] = Hooks()

    # -- the tree

    def __setattr__(self, name: str, value: Any) -> None:
        state, before = self.__dict__, self.__dict__.get(name)
        held = isinstance(value, Parameter | Module)
        if held and "_modules" not in state:
            raise RuntimeError(f"{type(self).__name__}: call super().__init__() before setting {name!r}")
        if isinstance(before, Parameter) and not held and value is not None:
            raise TypeError(
                f"{type(self).__name__}: {name!r} is a parameter, and {type(value).__name__} is none; assign "
                f"a Parameter, or None to take it out, or set its values: {name}.data = ..."
            )
        kind = self._kind(name, value)
        if value is not before:
            self._let_go(name, before, kind)
        if kind is not None:
            state[kind][name] = value
        if held:
            value.belongs_to(self, name)
            _warn_of_early_values(value)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        before = self.__dict__.get(name)
        object.__delattr__(self, name)
        self._let_go(name, before, None)

    def _kind(self, name: str, value: Any) -> str | None:
        """Which of the dictionaries below `value` goes into under this name."""
        if isinstance(value, Parameter):
            return "_parameters"
        if isinstance(value, Module):
            return "_modules"
        return "_buffers" if value is not None and name in self.__dict__.get("_buffers", ()) else None

    def _let_go(self, name: str, before: Any, kind: str | None) -> None:
        """`name` is `before` no more; in the dictionary `kind` something else takes its place."""
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

    @property
    def batch_block(self) -> random.Block | None:
        """Which block of the batch's tensors this rank has in here; None: that of its rank in the world."""
        module = self
        while module is not None and module._block is None:
            module = module.parent
        return None if module is None else module._block()

    def set_batch_block(self, block: Callable[[], random.Block]) -> None:
        """Let this tell `batch_block`, of this module and all in it that have none of their own."""
        object.__setattr__(self, "_block", block)

    def __getattr__(self, name: str) -> Any:
        raise elsewhere.missing(self, name, elsewhere.MODULE)

    def children(self) -> Iterator["Module"]:
        """The modules held directly."""
        return iter(self._modules.values())

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """(name, module) of the modules held directly."""
        return iter(self._modules.items())

    def get_submodule(self, path: str) -> "Module":
        """The module at `path` from here ("blocks.0"; "" is this one). AttributeError if there is none."""
        module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                raise AttributeError(f"{type(self).__name__} has no module {path!r}")
            module = module._modules[name]
        return module

    def get_parameter(self, path: str) -> Parameter:
        """The parameter at `path` from here ("blocks.0.up.weight"). AttributeError if there is none."""
        above, _, name = path.rpartition(".")
        parameters = self.get_submodule(above)._parameters
        if name not in parameters:
            raise AttributeError(f"{type(self).__name__} has no parameter {path!r}")
        return parameters[name]

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
        self,
        name: str,
        values: Any,
        value: float | None = None,
        *,
        dtype: Any = None,
        persistent: bool = True,
    ) -> None:
        """Give the module an array that is state but no parameter, whole on every rank: a copy of `values`.

        With `value`, `values` is a shape, and the array is full of it, float32 unless `dtype` is given. It is
        read as `self.name` and changed in place. State dicts and checkpoints hold it under its name, rank 0's
        where ranks differ; persistent=False: they don't, and it is a plain attribute. Raises TypeError for
        values that are no array, where there is no `value`.
        """
        if value is None and not hasattr(values, "dtype"):
            raise TypeError(f"register_buffer {name!r}: give it an array, or a shape and a value")
        if value is None:
            given = values.data if isinstance(values, Tensor) else values
            array = device.current().zeros(given.shape, dtype or given.dtype)
            array[...] = device.current().asarray(given)
        else:
            array = device.current().zeros(values, dtype or np.float32)
            array += value
        if persistent:
            self._buffers[name] = array
        else:
            self._buffers.pop(name, None)
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
        hooked = self._forward_pre_hooks or self._forward_hooks
        return self._enter(self._hooked_forward if hooked else self.forward, args, kwargs)

    def register_forward_pre_hook(
        self, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Call hook(module, args) before each forward; what it returns, unless None, are the new arguments.

        with_kwargs: hook(module, args, kwargs), which returns both. prepend: before the other hooks. Hooks
        run where forward runs: parameters are gathered, inputs cast, and recomputation calls them again.
        """
        return self._forward_pre_hooks.add((hook, with_kwargs), prepend)

    def register_forward_hook(
        self, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Call hook(module, args, output) after each forward; what it returns, unless None, is the output.

        with_kwargs: hook(module, args, kwargs, output). Else as register_forward_pre_hook.
        """
        return self._forward_hooks.add((hook, with_kwargs), prepend)

    def _hooked_forward(self, *args: Any, **kwargs: Any) -> Any:
        for hook, with_kwargs in self._forward_pre_hooks:
            changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        output = self.forward(*args, **kwargs)
        for hook, with_kwargs in self._forward_hooks:
            changed = hook(self, args, kwargs, output) if with_kwargs else hook(self, args, output)
            output = output if changed is None else changed
        return output

    def take_placement(self, **facts: Any) -> None:
        """Let `placement` have these fields, besides those that it has already."""
        object.__setattr__(self, "placement", replace(self.placement or _NOWHERE, **facts))

    def wrap_forward(self, wrapper: ForwardWrapper) -> None:
        """Let `wrapper` run each forward from now on, in its layer; of one layer the first is inside."""
        self._forward_wrappers.append(wrapper)
        self._forward_wrappers.sort(key=lambda other: other.layer)

    def around(self, kind: type[A]) -> A | None:
        """The wrapper of this kind, or None."""
        return next((wrapper for wrapper in self._forward_wrappers if isinstance(wrapper, kind)), None)

    def wrapped_in(self, layer: Layer) -> bool:
        """Whether a wrapper of this layer is attached."""
        return any(wrapper.layer is layer for wrapper in self._forward_wrappers)

    def entered_around(self, method: Callable) -> Callable:
        """`method` as another entry beside forward: what is attached to the module runs each call."""

        @wraps(method)
        def entry(*args: Any, **kwargs: Any) -> Any:
            return self._enter(method, args, kwargs)

        return entry

    def _enter(self, method: Callable, args: tuple, kwargs: dict) -> Any:
        """Call `method` inside all that is attached; not twice where one entry calls another."""
        running = autograd.modules()
        depth, nested = len(running), self in running
        if not running:
            random.call_begins()
        for wrapper in self._forward_wrappers:
            if wrapper.every_entry or not nested:
                method = partial(wrapper.run, self, method)
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

    def requires_grad_(self, requires_grad: bool = True) -> "Module":
        """Set requires_grad of every parameter: False freezes them. Units follow at the next forward."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters. Raises ValueError for set_to_none=False."""
        check_set_to_none(set_to_none)
        for parameter in self.parameters():
            parameter.storage.zero_grad()

    # -- state

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> whole array, not copied, of parameters and then buffers.

        RuntimeError where parameters are sharded or cut: see full_state_dict.
        """
        parameters = dict(self.named_parameters())
        if cut := [name for name, p in parameters.items() if p.shape != p.whole_shape]:
            raise RuntimeError(f"parameter {cut[0]!r} is cut; shardrt.checkpoint has full_state_dict")
        parameters = {name: parameter.data for name, parameter in parameters.items()}
        return parameters | dict(self.named_buffers())

    def load_state_dict(
        self,
        state: Mapping[str, np.ndarray] | None,
        *,
        strict: bool = True,
        broadcast_from_rank0: bool = False,
    ) -> None:
        """Set every parameter and buffer from whole arrays; a rank takes its pieces, one parameter at a time.

        strict=False leaves what `state` does not have as it is: for adapters kept alone, say.
        broadcast_from_rank0: rank 0 alone has a `state`, and sends it array by array; collective.
        Raises ValueError that lists the names that are missing or not expected, or a shape that differs, or,
        with broadcast_from_rank0 and several ranks, for a model without a unit.
        """
        control = everyone(self, "load_state_dict") if broadcast_from_rank0 else None
        if control is not None:
            state = FromFirst(control, state)
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

    def __deepcopy__(self, memo: dict) -> "Module":
        """A model of its own with equal values, made yet or not, and without gradients.

        Raises TypeError for a sharded one.
        """
        copy.deepcopy(self._forward_wrappers)  # a unit's boundary refuses, before anything is copied
        twin = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            object.__setattr__(twin, name, None if name == "_parent" else copy.deepcopy(value, memo))
        for name, held in (*twin._parameters.items(), *twin._modules.items()):
            held.belongs_to(twin, name)
        return twin

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            f"{type(self).__name__} can't be pickled or copied by copy.copy; shardrt.checkpoint has save and "
            "load for weights, copy.deepcopy copies a model that is not sharded"
        )

    def __repr__(self) -> str:
        lines = [f"  ({name}): {child!r}".replace("\n", "\n  ") for name, child in self._modules.items()]
        own = ", ".join(f"{name}{list(p.shape)}" for name, p in self._parameters.items())
        return f"{type(self).__name__}({own}" + ("\n" + "\n".join(lines) + "\n" if lines else "") + ")"


def everyone(model: Module, call: str) -> Communicator | None:
    """What joins all ranks that train `model`, for a `call` with broadcast_from_rank0; None for one rank.

    Raises ValueError for a model without a unit, which knows of no other ranks. Collective at its first use.
    """
    ranks = ranks_of(model)
    if ranks is None and not world.alone():
        raise ValueError(f"{call}: broadcast_from_rank0 needs a sharded model; call fully_shard first")
    return ranks


def is_leader(model: Module) -> bool:
    """Whether this rank is rank 0 of those that train `model`, or of all, for one that is not sharded."""
    ranks = ranks_of(model)
    return world.first() if ranks is None else ranks.rank == 0


def ranks_of(model: Module) -> Communicator | None:
    """What joins all ranks that train `model`; None for a model that is neither sharded nor cut."""
    for parameter in model.parameters():
        if parameter.place is not None:
            return parameter.place.everyone
        _ = parameter.shard  # there is a communicator once the storage is built
        if parameter.storage.everyone is not None:
            return parameter.storage.everyone
    return None


def label_of(module: Module) -> str:
    """For messages: the path from the outermost module; for that one "(root)", or which stage it is."""
    return module.name or (module.placement or _NOWHERE).label or "(root)"


def inner_ends(module: Module) -> tuple[bool, bool]:
    """Whether its first argument, and its output, lie inside of a model: of a stage, between two."""
    return (module.placement or _NOWHERE).inner_ends


def stages_of(module: Module) -> list[Module]:
    """The stages that this rank runs in place of the module (parallel/stage.py)."""
    references = (module.placement or _NOWHERE).stages
    return [stage for stage in (reference() for reference in references) if stage is not None]


def caller_of(module: Module) -> Module | None:
    """What calls this one: the module that holds it, or in a pipeline the stage that has it."""
    stage = (module.placement or _NOWHERE).stage
    return module.parent if stage is None else stage()


def place_of(module: Module) -> PipelinePlacement | None:
    """Which ranks of a pipeline run this module; None for a model without stages."""
    while module is not None:
        if module.placement is not None and module.placement.pipeline is not None:
            return module.placement.pipeline
        module = module.parent
    return None


def is_stage_leader(model: Module) -> bool:
    """Like is_leader, among the ranks that have the same stages."""
    place = next((parameter.place for parameter in model.parameters()), None)
    return is_leader(model) if place is None else place.is_leader


def _warn_of_early_values(placed: "Parameter | Module") -> None:
    """Initial values depend on names: say so where some were made before the name was complete."""
    for parameter in [placed] if isinstance(placed, Parameter) else placed.parameters():
        early = parameter.storage.made_under() if isinstance(parameter.storage, LocalStorage) else None
        if early is not None:
            warnings.warn(
                f"parameter {parameter.name!r} was read or used when it was called {early!r}, and keeps that "
                "name's initial values; put a module into its place first (docs/from_pytorch.md)",
                stacklevel=4,
            )
            return


def check_set_to_none(set_to_none: bool) -> None:
    """Raise ValueError for an argument that PyTorch knows, and that zeros gradients in their place."""
    if not set_to_none:
        raise ValueError(
            "zero_grad: there is no set_to_none=False: gradients are forgotten, and a parameter without one "
            "is not updated"
        )


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
