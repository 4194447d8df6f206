"""Tied replicas: a parameter that two stages on one rank use is two parameters, so each sums its gradients.

The later stage uses the replica. The replica has its own gradient and, where stages are sharded, its own
shard, which is copied from the owner's after each write of the owner. Optimizers, norms and
checkpoints have the owner only.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from shardrt import device
from shardrt.nn.extents import Extents
from shardrt.nn.module import Module
from shardrt.nn.parameter_placement import PlacedStorage
from shardrt.nn.public import Parameter
from shardrt.nn.storage import LocalStorage

Array = Any


class Alias(PlacedStorage):
    """The values of another parameter that is not sharded, with a separate gradient."""

    def __init__(self, parameter: Parameter, of: LocalStorage) -> None:
        super().__init__(parameter)
        self._of = of

    @property
    def materialised(self) -> bool:
        return self._of.materialised

    def array(self) -> Array:
        return self._of.array()

    def give(self, extents: Extents, out: Array) -> None:
        self._of.give(extents, out)


class TiedReplica:
    """A parameter `own`, and its replica `parameter`."""

    def __init__(self, own: Parameter) -> None:
        self.own = own
        self.parameter = Parameter(own.shape, own.init, requires_grad=own.requires_grad, dtype=own.dtype)
        self.parameter.seed, self.parameter.placement = own.seed, own.placement
        self.parameter.pipeline = replace(own.pipeline, twin=True)
        self.parameter.storage = Alias(self.parameter, own.storage)
        self._writes = 0  # of the owner's shard that the replica has copied

    def refresh(self) -> None:
        """Copy the owner's values to the replica.

        Collective over the ranks of the stages.

        Raises:
            ValueError: if the two are not sharded alike.
        """
        own, twin = self.own, self.parameter
        twin.requires_grad = own.requires_grad
        plain = [isinstance(each.storage, LocalStorage) for each in (own, twin)]
        if all(plain):
            return
        if any(plain) or own.extents != twin.extents:
            first, last = own.pipeline.stages
            raise ValueError(
                f"tied parameter {own.name!r} must be sharded the same way on stages {first} and {last}"
            )
        if own.storage.writes != self._writes:
            self._writes = own.storage.writes
            with twin.writing() as shard:
                device.of(shard).copy(shard, own.shard)

    def add_gradient(self) -> None:
        """Add the replica's gradient to the owner's, and drop it.

        Raises:
            RuntimeError: if one is missing.
        """
        gradient, more = gradient_of(self.own), gradient_of(self.parameter)
        gradient += more
        self.parameter.storage.zero_grad()


def with_tied_replicas(module: Module, tied_replicas: Collection[TiedReplica]) -> Module:
    """`module` with tied_replicas in place of their owners; a module without any stays the same.

    Returns:
        A new object without a parent, with the same name.
    """
    by_owner = {id(twin.own): twin.parameter for twin in tied_replicas}
    parameters = {name: by_owner.get(id(p), p) for name, p in module._parameters.items()}
    modules = {name: with_tied_replicas(child, tied_replicas) for name, child in module._modules.items()}
    before = {**module._parameters, **module._modules}
    if all(before[name] is held for name, held in (parameters | modules).items()):
        return module
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__, _parameters=parameters, _modules=modules, **parameters, **modules)
    other.__dict__["_forward_wrappers"] = list(module._forward_wrappers)
    for name, parameter in parameters.items():
        if parameter is not before[name]:
            parameter.belongs_to(other, name)
    return other


def gradient_of(tied: Parameter) -> Array:
    """The sum over all micro-batches of a step.

    Raises:
        RuntimeError: if there is none.
    """
    tied.storage.refuse_applied("sum_tied")
    gradient = tied.storage.complete_gradient()
    if gradient is None:
        raise RuntimeError(f"sum_tied: {tied.name!r} has no gradient; run backward of all stages first")
    return gradient
