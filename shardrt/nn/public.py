"""Module and Parameter as users have them: nn.Module and nn.Parameter.

Each extends its class of the runtime (nn/module.py, nn/parameter.py), which fsdp runs, by features that fsdp
does not need: initial values, operators, hooks, modes, buffers, state dicts and copies.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes, random
from shardrt.comm.first import FromFirst
from shardrt.device import Array
from shardrt.functional.elsewhere import missing
from shardrt.hooks import Hooks, RemovableHandle
from shardrt.nn import elsewhere, module, parameter
from shardrt.nn.extents import Extents, spans, take
from shardrt.nn.init import AsNamed, Initialiser, InitialiserOfRuns
from shardrt.nn.ranks import everyone
from shardrt.nn.storage import LocalStorage
from shardrt.tensor import Tensor

__all__ = ["Module", "Parameter", "check_set_to_none", "parameters_in"]


module.before_call.append(random.call_begins)


class Parameter(parameter.Parameter, Tensor):
    """A trainable tensor of a Module.

    `data` is the whole array. While the parameter is sharded, reading or writing it raises a RuntimeError
    that names the parameter; in the forward of its unit it can be read. `shard` and `grad` are the part that
    this rank holds: a 1-D array of a sharded parameter, the whole array of a plain one. Arrays that peers
    may read are read-only (ValueError); write a shard in `with parameter.writing()`. The first use of
    a sharded model, even the reading of a `shard`, makes the shards of all its units and is collective: every
    rank must come to it.

    Args:
        shape: its shape.
        init: the rule for its initial values (nn.init); required.
        requires_grad: False freezes it.
        dtype: float32 or float64; integers and booleans if it is frozen.

    Raises:
        TypeError: for a bad shape, for no rule of nn.init, and for integers that require a gradient.
        ValueError: for a shape without dimensions or with a negative size.
    """

    __slots__ = ("init", "in_parts", "float8", "_hooks", "_words")
    changed_in_place = True

    def __init__(
        self,
        shape: tuple[int, ...],
        init: Initialiser | None = None,
        *,
        requires_grad: bool = True,
        dtype: Any = np.float32,
    ) -> None:
        shape, self.init, dtype = _checked(shape), _rule(init), np.dtype(dtype)
        if requires_grad and not dtypes.floating(dtype):
            raise TypeError(f"Parameter: requires_grad=True needs a float dtype, got {dtype}")
        self.in_parts: Any = None  # how matmuls with it are split; see functional/in_parts.py
        self.float8 = False  # linear layers multiply by it in float8; see MixedPrecisionPolicy
        self._words: Any = None
        self._hooks: Hooks | None = None
        super().__init__(shape, dtype, requires_grad, random.initial_seed())

    @property
    def words(self) -> Any:
        """How rows of a vocabulary that is split, or could be, are looked up and make logits; else None."""
        return self._words if self.placement is None else self.placement.words

    @words.setter
    def words(self, words: Any) -> None:
        self._words = words

    def detach(self) -> Tensor:
        """Its values without its past: a copy if it is sharded, as `value`."""
        return Tensor(self.value())

    @property
    def extents(self) -> Extents:
        """The elements that this rank holds, of `whole_shape` in memory order: those of `shard`."""
        return self.in_whole(self.storage.extents_of(self))

    @property
    def counts(self) -> bool:
        """Whether this rank's stages are where it is counted: not if it is absent, or a copy."""
        return self.pipeline is None or self.pipeline.owner

    @property
    def updated(self) -> bool:
        """Whether optimizers on this rank update it: not if it is absent, or a twin."""
        return self.pipeline is None or (self.pipeline.here and not self.pipeline.twin)

    @contextmanager
    def writing(self) -> Iterator[Array]:
        """Lend `shard` to be written inside a with block: a custom update, an average of weights.

        Collective: every rank comes here for the same parameters, even if its shard is empty, because a
        slower rank may still read the old values. The next forward uses the new ones.
        """
        start, stop = self.storage.range_of(self)
        self.storage.before_write()
        try:
            yield self.storage.shard[start:stop]
        finally:
            self.storage.modified()

    @property
    def grad(self) -> Array | None:
        """The gradient of this rank's shard: in the parameter's shape if it is all, else 1-D."""
        return super().grad

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise TypeError(
                f"parameter {self.name!r}: grad can be set to None only; to change a gradient write to "
                "`parameter.grad[...]`"
            )
        if not isinstance(self.storage, LocalStorage):
            raise RuntimeError(
                f"parameter {self.name!r} is sharded, and the gradients of its unit are cleared together: "
                "use optimizer.zero_grad() or model.zero_grad()"
            )
        self.storage.zero_grad()

    def fill(self, out: Array, part: Extents, name: str | None = None) -> None:
        part = self.in_whole(part)
        if isinstance(self.init, InitialiserOfRuns):
            stop = 0
            for runs in part:
                start, stop = stop, stop + runs.size
                self.init.fill_extent(out[start:stop], runs)
            return
        key = random.name_key(self.name if name is None else name)
        for place, first, length in spans(part):
            self.init.fill(out[place : place + length], self.seed, key, first)

    def load(self, values: Any) -> None:
        """Set this rank's shard, if it has one, from the whole array `values`.

        Raises:
            ValueError: which names the parameter, if the shape differs.
        """
        if tuple(values.shape) != self.whole_shape:
            raise ValueError(
                f"parameter {self.name!r}: values must have shape {self.whole_shape}, got "
                f"{tuple(values.shape)}"
            )
        if self.absent:
            return
        start, stop = self.storage.range_of(self)
        shard = self.storage.shard[start:stop]
        piece = np.ascontiguousarray(take(self.extents, np.asarray(values)))
        device.of(shard).copy(shard, piece.astype(shard.dtype, copy=False))
        self.storage.modified()

    def __deepcopy__(self, memo: dict) -> "Parameter":
        """A parameter with equal values, not made yet if these are not, and without a gradient.

        Raises:
            TypeError: which names the parameter, if it is sharded.
        """
        if self.pipeline is not None:
            raise TypeError(f"parameter {self.name!r} is {self.pipeline.description}, and can't be copied")
        if not isinstance(self.storage, LocalStorage):
            raise TypeError(f"parameter {self.name!r} is sharded and can't be copied; see full_state_dict")
        if self.placement is not None:
            raise TypeError(f"parameter {self.name!r} is on {self.placement.mesh!r} and can't be copied")
        if not self.storage.materialised and not isinstance(self.init, AsNamed):
            self.init = AsNamed(self.init, random.name_key(self.name))
        twin = Parameter(self._shape, self.init, requires_grad=self.requires_grad, dtype=self.dtype)
        twin.seed, twin.in_parts, twin.words = self.seed, self.in_parts, self.words
        if self.storage.materialised:
            twin.storage = twin.new_storage(self.data.copy())
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            f"parameter {self.name!r} can't be pickled; shardrt.checkpoint has save and load for weights"
        )

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Raises RuntimeError: the whole gradient of a parameter never exists as one array."""
        raise RuntimeError(
            f"parameter {self.name!r}: register_hook is for the results of ops; the gradient of a parameter "
            "is accumulated in place: use register_post_accumulate_grad_hook"
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[["Parameter"], None]) -> RemovableHandle:
        """Call hook(parameter) at the end of each backward that has added to `parameter.grad`.

        The gradient is this rank's shard, reduced over the ranks; the hook may read and change it. Under
        no_sync, and with set_world_invariant before the last micro-batch of a step, the hook is not called,
        since nothing is complete. A rank whose backward did not come to the parameter does not call it
        either. An optimizer that updates in backward has updated before.
        """
        self._hooks = self._hooks or Hooks()
        return self._hooks.add(hook)

    def _gradient_target(self) -> tuple[Array, bool, Any]:
        self._call_hooks_at_end()
        return super()._gradient_target()

    def _put_rows(self, fill: autograd.Fill) -> Any:
        self._call_hooks_at_end()
        return super()._put_rows(fill)

    def _call_hooks_at_end(self) -> None:
        if self._hooks and autograd.running() is not None:
            autograd.running().at_end(self._call_hooks, hook=True)

    def _call_hooks(self) -> None:
        if self.storage.reduced and self.storage.has_gradient(self):
            with autograd.no_grad():
                for hook in self._hooks:
                    hook(self)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self._shape}, dtype={self.dtype.name})"


def _checked(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) for n in shape):
        raise TypeError(
            f"Parameter: shape must be a tuple of integers, got {type(shape).__name__}: values come from "
            "`init`, or are set afterwards, `parameter.data = values`"
        )
    if not shape or min(shape) < 0:
        raise ValueError(f"Parameter: shape needs at least one dimension, each >= 0; got {tuple(shape)}")
    return tuple(int(n) for n in shape)


def _rule(init: Any) -> Initialiser:
    if isinstance(init, type | np.ndarray) or not hasattr(init, "fill"):
        given = f"the class {init.__name__}: call it" if isinstance(init, type) else repr(init)
        raise TypeError(f"Parameter: init must be a rule, such as nn.init.Normal(0.0, 0.02), got {given}")
    return init


def parameters_in(given: Any, wanted_by: str) -> list[Parameter]:
    """`given`, one Parameter or an iterable of them, as a list. TypeError, from `wanted_by`, for others."""
    alone = isinstance(given, Parameter) or not isinstance(given, Iterable)
    found = [given] if alone else list(given)
    for one in found:
        if not isinstance(one, Parameter):
            kind = type(one).__name__
            raise TypeError(f"{wanted_by}: must be Parameters, such as model.parameters(), got {kind}")
    return found


class Module(module.Module):
    """Base of all layers. Assign Parameters and Modules as attributes; define `forward`."""

    def __init__(self) -> None:
        super().__init__()
        state = self.__dict__
        state["_block"] = None
        state["_forward_pre_hooks"] = Hooks()
        state["_forward_hooks"] = Hooks()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Parameter | Module):
            _warn_of_early_values(value)

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name, elsewhere.MODULE)

    # -- the tree, as in the runtime's class, with the types that users have

    def children(self) -> Iterator["Module"]:
        """The modules held directly."""
        return super().children()

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """(name, module) of the modules held directly."""
        return super().named_children()

    def modules(self) -> Iterator["Module"]:
        """This module and all below it, each once, parents first."""
        return super().modules()

    def named_modules(self) -> Iterator[tuple[str, "Module"]]:
        """(path from here, module) for this module ("") and all below it, each once, parents first."""
        return super().named_modules()

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once."""
        return super().parameters()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(path from here, parameter), each parameter once, under the first path that leads to it."""
        return super().named_parameters()

    def get_submodule(self, path: str) -> "Module":
        """The module at `path` from here ("blocks.0"; "" is this one). AttributeError if there is none."""
        found = self
        for name in path.split(".") if path else ():
            if name not in found._modules:
                raise AttributeError(f"{type(self).__name__} has no module {path!r}")
            found = found._modules[name]
        return found

    def get_parameter(self, path: str) -> Parameter:
        """The parameter at `path` from here ("blocks.0.up.weight"). AttributeError if there is none."""
        above, _, name = path.rpartition(".")
        parameters = self.get_submodule(above)._parameters
        if name not in parameters:
            raise AttributeError(f"{type(self).__name__} has no parameter {path!r}")
        return parameters[name]

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

        Read it as `self.name` and change it in place. State dicts and checkpoints hold it under its name,
        rank 0's if ranks differ.

        Args:
            name: name of the attribute.
            values: an array; with `value`, a shape.
            value: the array is full of this number, float32 unless `dtype` is given.
            dtype: element type; None: the type of `values`.
            persistent: False: state dicts do not hold it, and it is a plain attribute.

        Raises:
            TypeError: if `values` is no array and there is no `value`.
        """
        if value is None and not hasattr(values, "dtype"):
            raise TypeError(f"register_buffer: {name!r} needs an array, or a shape and a value")
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
        for path, below in self.named_modules():
            for name, array in below._buffers.items():
                yield (f"{path}.{name}" if path else name), array

    def apply(self, function: Callable[["Module"], None]) -> "Module":
        """Call `function` on this module and all below it."""
        for below in self.modules():
            function(below)
        return self

    @property
    def batch_block(self) -> random.Block | None:
        """Which block of the batch's tensors this rank has in here; None: the block of its world rank."""
        above = self
        while above is not None and above._block is None:
            above = above.parent
        return None if above is None else above._block()

    def set_batch_block(self, block: Callable[[], random.Block]) -> None:
        """Let block() give `batch_block`, of this module and all in it that have none of their own."""
        object.__setattr__(self, "_block", block)

    # -- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooked = self._forward_pre_hooks or self._forward_hooks
        return self._enter(self._hooked_forward if hooked else self.forward, args, kwargs)

    def register_forward_pre_hook(
        self, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Call hook(module, args) before each forward; its result, unless None, replaces the arguments.

        Hooks run where forward runs: parameters are gathered, inputs cast, and recomputation calls the hooks
        again.

        Args:
            hook: the function.
            prepend: call it before the other hooks.
            with_kwargs: call hook(module, args, kwargs), which returns both.
        """
        return self._forward_pre_hooks.add((hook, with_kwargs), prepend)

    def register_forward_hook(
        self, hook: Callable, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Call hook(module, args, output) after each forward; its result, unless None, replaces the output.

        Args:
            with_kwargs: hook(module, args, kwargs, output).
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

    def train(self, mode: bool = True) -> "Module":
        """Switch this module and all below it to training (dropout acts) or, with False, to evaluation."""
        return self.apply(lambda below: object.__setattr__(below, "training", mode))

    def eval(self) -> "Module":
        """The same as train(False)."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> "Module":
        """Set requires_grad of every parameter: False freezes them. Units follow at the next forward."""
        for each in self.parameters():
            each.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters.

        Raises:
            ValueError: for set_to_none=False.
        """
        check_set_to_none(set_to_none)
        for each in self.parameters():
            each.storage.zero_grad()

    # -- state

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> whole array, not copied, of parameters and then buffers.

        Raises:
            RuntimeError: if parameters are sharded or split: see full_state_dict.
        """
        parameters = dict(self.named_parameters())
        if cut := [name for name, p in parameters.items() if p.shape != p.whole_shape]:
            raise RuntimeError(
                f"state_dict: parameter {cut[0]!r} is split over ranks; use "
                "shardrt.checkpoint.full_state_dict"
            )
        arrays = {name: each.data for name, each in parameters.items()}
        return arrays | dict(self.named_buffers())

    def load_state_dict(
        self,
        state: Mapping[str, np.ndarray] | None,
        *,
        strict: bool = True,
        broadcast_from_rank0: bool = False,
    ) -> None:
        """Set every parameter and buffer from whole arrays; a rank takes its shards, one parameter at a time.

        Args:
            state: name -> whole array.
            strict: False leaves parameters without an entry as they are (for saved adapters, say).
            broadcast_from_rank0: rank 0 alone has a `state`, and sends it array by array; collective.

        Raises:
            ValueError: lists the names that are missing or not expected, or names a shape that differs. With
                broadcast_from_rank0 and several ranks, for a model without a unit.
        """
        control = everyone(self, "load_state_dict") if broadcast_from_rank0 else None
        if control is not None:
            state = FromFirst(control, state)
        parameters, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        own, given = parameters.keys() | buffers.keys(), set(state.keys())
        absent = sorted(own - given) if strict else []
        extra = sorted(given - own)
        if absent or extra:
            raise ValueError(f"load_state_dict: missing keys {absent[:10]}, unexpected keys {extra[:10]}")
        parameters = {name: each for name, each in parameters.items() if name in given}
        _barrier(parameters.values())  # a peer may still read the old values if ranks share memory,
        for name, each in parameters.items():
            each.load(state[name])
        _barrier(parameters.values())  # and may read the new ones only when all are written
        for name, array in buffers.items():
            if name in given:
                _set_buffer(name, array, state[name])

    def __deepcopy__(self, memo: dict) -> "Module":
        """A separate model with equal values, made yet or not, and without gradients.

        Raises:
            TypeError: for a sharded one.
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


def check_set_to_none(set_to_none: bool) -> None:
    """Raise ValueError for PyTorch's set_to_none=False, which would fill gradients with zeros."""
    if not set_to_none:
        raise ValueError(
            "zero_grad: set_to_none=False is not supported: gradients are freed, and a parameter without one "
            "is not updated"
        )


def _warn_of_early_values(placed: Parameter | Module) -> None:
    """Warn if initial values were made before the name that they depend on was complete."""
    for each in [placed] if isinstance(placed, Parameter) else placed.parameters():
        early = each.storage.made_under() if isinstance(each.storage, LocalStorage) else None
        if early is not None:
            warnings.warn(
                f"parameter {each.name!r} was read or used when it was called {early!r}, and keeps that "
                "name's initial values; put a module into its place first (docs/howto/from_pytorch.md)",
                stacklevel=4,
            )
            return


def _set_buffer(name: str, array: Any, values: Any) -> None:
    if tuple(values.shape) != array.shape:
        raise ValueError(f"buffer {name!r}: values must have shape {array.shape}, got {tuple(values.shape)}")
    device.of(array).copy(array, np.ascontiguousarray(values, array.dtype))


def _barrier(parameters: Iterable[Parameter]) -> None:
    """Wait until every rank that holds a shard of these parameters has come here."""
    communicators = []
    for each in parameters:
        _ = each.shard  # there is a communicator once the storage is built
        if each.storage.communicator not in [None, *communicators]:
            communicators.append(each.storage.communicator)
    for communicator in communicators:
        communicator.barrier(stream=device.current().current_stream)
